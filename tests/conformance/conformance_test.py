"""Mechanism by runtime: what each promises holds in every cell.

A cell that is left out says why: `pytest -rs tests/conformance` lists them. A
false alarm of the noise's tests has a probability below 1e-6 (`statistics`).
"""

import dataclasses
import inspect

import numpy as np
import pytest

import tfdp_fl
from tests.conformance import mechanisms, runtimes
from tests.mechanisms import statistics
from tfdp_fl import accounting

S, Z, M = mechanisms.S, mechanisms.Z, mechanisms.M
# A few more than a float32's rounding of the clip, proven in `clipping`.
_ALLOWED = 1 + 1e-5
_WIDE = 20_000
# The last one moves a model without a clip beyond what float32 can tell.
_HOSTILE = {
    "longer than the clip": np.array([3.0, 0, -4, 0, 0, 0]),
    "NaN": np.array([0.1, np.nan, 0, 0, 0, 0]),
    "infinite": np.array([0.1, np.inf, 0, 0, 0, -np.inf]),
    "beyond float32's norms": np.full(6, 3e38),
    "denormal": np.full(6, 1e-42),
    "huge": np.full(6, 1e18),
    "cancelling": np.array([1e7, -1e7] * 3),
}
# Of a difference of two models in float32.
_ROUNDING = 1e-6
_CELLS = [
    pytest.param(case, run, id=f"{mechanism} in {runtime}", marks=_marks)
    for mechanism, case in mechanisms.CASES.items()
    for runtime, run in runtimes.RUNTIMES.items()
    for why in [case.not_in.get(runtime) or runtimes.missing(runtime)]
    for _marks in [
        [pytest.mark.skip(reason=f"{mechanism} in {runtime}: {why}")] if why else []
    ]
]


def _updates(norms=(0.1, 0.4, 2.0, 30.0)) -> np.ndarray:
    rows = np.random.default_rng(0).normal(size=[len(norms), 6])
    rows *= np.array(norms)[:, None] / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)


@pytest.fixture(scope="module")
def quiet():
    """Returns the rounds of a cell without noise, run once for all tests.

    The first has all updates; in the next ones the second client is silent, or
    hands in zeros, or is hostile.
    """
    done = {}

    def rounds(case, run):
        if (id(case), id(run)) not in done:
            updates = _updates()
            changed = [runtimes.SILENT, np.zeros(6), *_HOSTILE.values()]
            if not _can_be_silent(case, run):
                changed[0] = np.zeros(6)
            cohorts = [list(updates)]
            for change in changed:
                cohorts.append(list(updates))
                cohorts[-1][1] = change
            done[id(case), id(run)] = run(case.make(0.0), cohorts, M).moved
        return done[id(case), id(run)]

    return rounds


def _can_be_silent(case, run) -> bool:
    # TFF has no client that is asked and does not answer: it is not there.
    return case.make(1.0).noise_site != "client"


@pytest.mark.parametrize(("case", "run"), _CELLS)
def test_without_noise_it_is_the_papers_mean(case, run, quiet):
    expected = case.mean(_updates().astype(float))
    np.testing.assert_allclose(quiet(case, run)[0], expected, rtol=2e-5, atol=_ROUNDING)


@pytest.mark.parametrize(("case", "run"), _CELLS)
def test_a_silent_client_changes_the_sum_and_no_denominator(case, run, quiet):
    _, silent, zero, *_ = quiet(case, run)
    if not _can_be_silent(case, run):
        pytest.skip("without a share of the noise the round is abandoned")
    answered = M / (M - 1) if case.by_answers else 1.0
    if case.make(1.0).name == "MedianClipping":
        zero = mechanisms._median_mean(np.delete(_updates(), 1, axis=0).astype(float))
    np.testing.assert_allclose(silent, zero * answered, rtol=2e-5, atol=_ROUNDING)


@pytest.mark.parametrize(("case", "run"), _CELLS)
def test_one_client_moves_the_mean_by_its_clip_at_most(case, run, quiet):
    _, _, zero, *hostile = quiet(case, run)
    for kind, moved in zip(_HOSTILE, hostile, strict=True):
        assert np.isfinite(moved).all(), kind
        if kind in ("NaN", "infinite"):
            np.testing.assert_allclose(moved, zero, 1e-6, _ROUNDING, err_msg=kind)
        assert np.linalg.norm(moved - zero) <= case.bound * _ALLOWED + _ROUNDING, kind
        if kind == "longer than the clip" and np.isfinite(case.bound):
            assert np.linalg.norm(moved - zero) >= case.bound * (1 - 1e-4)


@pytest.mark.parametrize(("case", "run"), _CELLS)
def test_noise_has_its_scale_is_new_each_round_and_is_charged(case, run):
    update = np.zeros(1 + _WIDE, np.float32)
    update[0] = 0.999 * S  # The rest of what moves is noise.
    nothing = np.zeros_like(update)
    nothing[0] = np.nan  # It has noise all the same.
    done = run(case.make(Z), [[update, nothing, update, update]] * 2, M)
    first, second = done.moved[:, 1:]
    if not case.stddev:
        assert not first.any() and not second.any()
        return
    second = second + case.correlation * first
    statistics.assert_gaussian(first, case.stddev)
    statistics.assert_gaussian(second, case.stddev)
    statistics.assert_uncorrelated(first, second)
    statistics.assert_uncorrelated(first[: _WIDE // 2], first[_WIDE // 2 :])
    if case.sampled and done.epsilon is not None:
        by = "pld" if run is runtimes.RUNTIMES["Flower"] else "rdp"  # The tighter.
        expected = accounting.epsilon(
            Z, "fixed_size", M, M, rounds=2, delta=runtimes.DELTA, accountant=by
        )
        assert done.epsilon == pytest.approx(expected, rel=1e-6)


# (A contribution of one's own would not train side by side, nor in Flower.)
_TAKE_A_ROUND = [
    name
    for name, member in inspect.getmembers(tfdp_fl.CorrelatedNoise, callable)
    if not name.startswith("_") and "round" in inspect.signature(member).parameters
    if name != "contribution"
]


def _watch(name, called):
    """Returns a member that fails where it is given a noise state."""
    member = getattr(tfdp_fl.CorrelatedNoise, name)

    def watched(*args, **given):
        round = inspect.signature(member).bind(*args, **given).arguments["round"]
        assert round.noise_state == (), f"{name} sees the noise of earlier rounds"
        called.add(name)
        return member(*args, **given)

    return watched


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            run, id=name, marks=[pytest.mark.skipif(bool(why), reason=f"{why}")]
        )
        for name, run in runtimes.RUNTIMES.items()
        for why in [runtimes.missing(name)]
    ],
)
def test_a_member_never_sees_the_noise_of_earlier_rounds(run):
    called = set()
    members = {name: _watch(name, called) for name in _TAKE_A_ROUND}
    members["round_event"] = tfdp_fl.CorrelatedNoise.round_event
    watched = type("CorrelatedNoise", (tfdp_fl.CorrelatedNoise,), members)
    made = mechanisms.CASES["CorrelatedNoise"].make(Z)
    given = {
        field.name: getattr(made, field.name) for field in dataclasses.fields(made)
    }
    run(watched(**given), [list(_updates())] * 2, M)
    assert called == {*_TAKE_A_ROUND}
