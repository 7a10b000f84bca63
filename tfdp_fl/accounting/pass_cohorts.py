"""Cohort sizes, and how a pass over the clients is cut into cohorts."""

from __future__ import annotations

from typing import Any

from tfdp_fl import _validate, schedules


def checked_size(value: Any, num_clients: int, fractional: bool = False) -> float:
    """Returns a cohort size, checked against the number of clients.

    Args:
      value: The size.
      num_clients: N.
      fractional: Whether an expected size need not be whole (Poisson).
    """
    size = _validate.positive(clients_per_round=value)
    if size > num_clients:
        raise ValueError(
            f"clients_per_round must be at most num_clients={num_clients}, "
            f"got {size:g}."
        )
    if size.is_integer():
        return int(size)
    if not fractional:
        raise ValueError(f"clients_per_round must be a whole number, got {value!r}.")
    return size


class PassCohorts:
    """Cuts passes over N clients into cohorts of scheduled sizes.

    A cohort never straddles two passes: the last of a pass takes what is left.
    So every client is in exactly one cohort of each full pass.
    """

    def __init__(self, num_clients: int, clients_per_round: schedules.Schedule):
        self._num_clients = _validate.positive_integer(num_clients=num_clients)
        self._schedule = clients_per_round
        self._constant: int | None = None
        if schedules.is_constant(clients_per_round):
            self._constant = int(checked_size(clients_per_round, num_clients))
        self._cohorts: list[tuple[int, int, int]] = []

    def place(self, round_index: int) -> dict[str, int]:
        """Returns what a `RoundCharge` says of a round's place in its pass."""
        index, start, stop = self.cohort(round_index)
        return {
            "clients_per_round": stop - start,
            "pass_index": index,
            "pass_offset": start,
        }

    def cohort(self, round_index: int) -> tuple[int, int, int]:
        """Returns (pass, first position, one past the last) of a round."""
        n = self._num_clients
        if self._constant is not None:
            m = self._constant
            index, place = divmod(round_index, -(-n // m))
            return index, place * m, min(n, (place + 1) * m)
        while len(self._cohorts) <= round_index:
            index, _, start = self._cohorts[-1] if self._cohorts else (0, 0, 0)
            if start == n:
                index, start = index + 1, 0
            size = checked_size(
                schedules.value_at(
                    self._schedule, len(self._cohorts), "clients_per_round"
                ),
                n,
            )
            self._cohorts.append((index, start, min(n, start + int(size))))
        return self._cohorts[round_index]
