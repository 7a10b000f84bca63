"""Charges and histories of them."""

import dp_accounting

from tfdp_fl import accounting


def charge(sampling="poisson", n=1000, m=100, z=1.0, event=None, **place):
    return accounting.RoundCharge(
        sampling=sampling,
        num_clients=n,
        clients_per_round=m,
        event=dp_accounting.GaussianDpEvent(z) if event is None else event,
        **place,
    )


def history(*charges):
    """Returns an accountant of charges, each as one or as (charge, count)."""
    return accounting.PrivacyAccountant(charges)
