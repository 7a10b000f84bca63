"""Correlated noise in Flower: clients that come as they like."""

from unittest import mock

import numpy as np
import pytest

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib

_T, _B, _N, _M = 8, 3, 12, 4
_DELTA = 1e-5


def _mechanism(**options):
    usual = {"strategy": "blt:2", "rounds": _T, "min_separation": _B, **options}
    return tfdp_fl.CorrelatedNoise(clip_norm=0.5, noise_multiplier=2.0, **usual)


def _private(mechanism=None, num_clients=_N, **options):
    return fm.private(mechanism or _mechanism(), _M, num_clients, **options)


def _grid(nodes=range(_N), size=4):
    return fm.Grid({100 + i: fm.adds([np.zeros(size)]) for i in nodes})


def _squares(made):
    """Returns what each round costs, 1 / z^2."""
    return (made.mechanism.generator.round_sensitivities / 2.0) ** 2


def _spent(strategy):
    return sum(r.charge.noise_multiplier**-2 for r in strategy.charged_rounds)


def _epsilon(spent):
    return pytest.approx(accounting.gaussian_epsilon(spent**-0.5, _DELTA), abs=1e-6)


def _memory(strategy):
    """Returns where the noise is, and its buffers."""
    kept = strategy._correlation
    return kept.record.released, [
        buffer.numpy().tolist() for buffer in kept.noise_state.buffers
    ]


def _run(strategy, grid, rounds, first=1, record=None):
    """Returns the nodes that were asked, and the model."""
    record, asked = fm.model(np.zeros(4)) if record is None else record, []
    for number in range(first, first + rounds):
        record, _ = fm.a_round(strategy, grid, record, number)
        asked.append([message.metadata.dst_node_id for message in grid.sent])
    return asked, record


def _assert_apart(asked):
    for t, cohort in enumerate(asked):
        assert len(set(cohort)) == _M
        for other in asked[t + 1 : t + _B]:
            assert not set(cohort) & set(other)


def test_a_sum_has_no_digits_below_its_noise():
    grid = fm.Grid({100 + i: fm.adds([np.full(4, 1 / 30)]) for i in range(_N)})
    total = fm.arrays(_run(_private(), grid, 1)[1])[0] * _M
    assert total.dtype == np.float64
    np.testing.assert_array_equal(total, np.float32(total))


def test_nobody_comes_again_too_soon():
    made = _private(num_clients=20)
    asked, _ = _run(made, _grid(range(20)), 3 * _T)
    _assert_apart(asked)
    whole = (made.mechanism.generator.sensitivity / 2.0) ** 2
    assert _spent(made) == pytest.approx(3 * whole)
    assert made.privacy_epsilon(_DELTA, "pld") == _epsilon(3 * whole)
    text = " ".join(made.privacy_report(_DELTA)["caveats"])
    for words in ("was checked for every cohort", "were the ids of nodes", "as secret"):
        assert words in text
    assert "in its place" in made.privacy_report(_DELTA)["relation"]
    # Two nodes of one client are one: 24 of 12.
    made = _private(client_of=lambda node: f"client {node % _N}")
    asked, _ = _run(made, _grid(range(24)), 6)
    _assert_apart([[node % _N for node in each] for each in asked])
    text = " ".join(made.privacy_report(_DELTA)["caveats"])
    assert "ids of nodes" not in text
    # All 12 are needed every 3 rounds: one that was silent may come at once.
    made, grid = _private(), _grid()
    grid.trains[100] = None
    _run(made, grid, 3)
    assert made._correlation.eligible([100]) == ([100], 1)


def test_clients_have_names_that_stay_before_anybody_is_asked_or_charged():
    for wrong in (lambda node: (node,), lambda node: [node], float, lambda node: None):
        made = _private(client_of=wrong)
        with pytest.raises(TypeError, match="client_of must return strings"):
            _run(made, _grid(), 1)
        assert made.charged_rounds == ()
    with pytest.raises(TypeError, match="client_of must be a function"):
        _private(client_of="name")
    # A round is of those who were drawn, whatever they are called since.
    called = {100 + i: str(i) for i in range(_N)}
    made, grid = _private(client_of=called.get), _grid()
    messages = fm.configured(made, grid, fm.model(np.zeros(4)))
    drawn = {called[message.metadata.dst_node_id] for message in messages}
    called.update({node: f"new {name}" for node, name in called.items()})
    made.aggregate_train(1, grid.send_and_receive(messages))
    assert set(made._correlation.record._rounds) == drawn


def test_nobody_comes_more_often_than_allowed_and_no_round_passes_the_budget():
    made, grid = _private(_mechanism(max_participations=1)), _grid()
    asked, record = _run(made, grid, 3)
    assert len({node for cohort in asked for node in cohort}) == _N
    assert fm.configured(made, grid, record, 4) == []
    assert made.aggregate_train(4, []) == (None, None)
    assert len(made.charged_rounds) == 3
    assert _spent(made) == pytest.approx(_squares(made)[:3].sum())
    squares = np.cumsum(_squares(_private()))
    limit = accounting.gaussian_epsilon(((squares[3] + squares[4]) / 2) ** -0.5, _DELTA)
    made = _private(target_epsilon=limit, target_delta=_DELTA, accountant="pld")
    _, record = _run(made, grid, 4)
    assert fm.configured(made, grid, record, 5) == []
    assert made.stopped_before_round == 5


def test_rounds_that_are_refused_or_abandoned_count_for_nobody():
    made, grid = _private(on_client_failure="abort"), _grid()
    asked, _ = _run(made, grid, 1)
    before = _memory(made)
    # A model of other shapes is refused before any client is asked.
    grid.sent = []
    with pytest.raises(ValueError, match="same shapes"):
        fm.a_round(made, grid, fm.model(np.zeros(5)), 2)
    assert grid.sent == []
    silent = fm.Grid(dict.fromkeys(grid.trains))
    new, _ = fm.a_round(made, silent, fm.model(np.zeros(4)), 2)
    assert new is None
    assert _memory(made) == before
    later, _ = _run(made, grid, 2, 3)
    _assert_apart(asked + later)
    assert _spent(made) == pytest.approx(_squares(made)[:3].sum())


def test_a_server_that_restarts_begins_other_noise_charged_anew(tmp_path):
    record, path = fm.model(np.zeros(4)), tmp_path / "ledger.jsonl"
    for _ in range(2):
        made = _private(ledger=path)
        _, record = _run(made, _grid(), 3, record=record)
        made.close()
    spent = 2 * _squares(made)[:3].sum()
    assert made.privacy_epsilon(_DELTA, "pld") == _epsilon(spent)
    # A round that cannot be written moves nothing.
    made = _private(ledger=path)
    _run(made, _grid(), 1)
    before = _memory(made)
    full = ledger_lib.LedgerWriteError("full")
    with (
        mock.patch.object(ledger_lib.PrivacyLedger, "record", side_effect=full),
        pytest.raises(ledger_lib.LedgerWriteError),
    ):
        fm.a_round(made, _grid(), record, 2)
    assert _memory(made) == before
    made.close()
    with pytest.raises(ValueError, match="neighbouring relation"):
        _private(fm.NOISY, ledger=path)
