"""Every mechanism, on every way to train, attacked in every way by one client.

`tests/keras/hostile.py` says how far that client may get, and why. Updates that
arrive, in TFF or at Flower, may be anything: `tests/conformance` and
`tests/flower/private_strategy_test.py` attack by those.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.keras import hostile, hostile_test

_with_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed."
)


def _attack(way, runtime=None):
    for case in hostile.CASES.values():
        trainer = hostile.Trainer(case, way, runtime)
        without = trainer.without()
        for attack in hostile.ATTACKS:
            hostile_test.check_attack(trainer, without, attack)
        if not way.startswith("streamed"):
            continue
        for failure in hostile.FAILURES:
            hostile_test.check_failure(trainer, without, failure)


@pytest.mark.parametrize("way", hostile.WAYS)
def test_in_this_process(way):
    _attack(way)


@_with_ray
def test_on_ray_workers():
    from tfdp_fl import runtimes

    with runtimes.RayWorkers(num_workers=2) as workers:
        _attack("ray_workers", workers)
