"""Clients from pandas frames, and tables with a person for each row."""

import datetime
import uuid

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset, adapters, tables
from tfdp_fl.keras.evaluation import Validation

_from_frame = FederatedDataset.from_dataframe


_COLUMNS = {
    "who": ["b", "a", "b", "c", "b"],
    "age": [1, 2, 3, 4, 5],
    "height": [0.5, 1.5, 2.5, 3.5, 4.5],
    "label": [0, 1, 0, 1, 1],
}


def _frame(**columns) -> pd.DataFrame:
    return pd.DataFrame({**_COLUMNS, **columns})


@pytest.mark.parametrize("columns", [None, ["age", "height"]])
def test_rows_stay_in_order_and_clients_as_they_appear(tmp_path, columns):
    frame = _frame()
    frame.index = [7, 7, 3, 1, 0]  # It changes nothing.
    frame.to_parquet(tmp_path / "table.parquet")
    for dataset in (
        _from_frame(frame, client="who", features=columns, label="label"),
        FederatedDataset.from_parquet(tmp_path / "table.parquet", "who", columns),
    ):
        assert list(dataset.client_ids) == ["b", "a", "c"]
        x, y = dataset.client("b")
        np.testing.assert_array_equal(x, [[1, 0.5], [3, 2.5], [5, 4.5]])
        np.testing.assert_array_equal(y, [0, 0, 1])
        assert (x.dtype, y.dtype) == (np.float32, np.int64)


def test_one_column_a_mapping_and_a_series():
    one = _from_frame(_frame(), client="who", features="height")
    assert one.element_spec[0].shape == ()
    features = {"left": "age", "right": ["age", "height"]}
    several = _from_frame(_frame(), "who", features, label=["label", "age"])
    (x, y) = several.client("a")
    np.testing.assert_array_equal(x["left"], [2])
    np.testing.assert_array_equal(x["right"], [[2, 1.5]])
    np.testing.assert_array_equal(y, [[1, 2]])
    # With a person for each row.
    frame = pd.DataFrame({"age": [1, 2, 3], "height": [0.5, 1.5, 2.5]}, [7, 8, 9])
    labels = pd.Series([0, 1, 0], index=[7, 8, 9])
    for given in (labels, pd.Index(labels)):
        x, y = adapters.group_by_person(frame, given, [5, 5, 6]).client(5)
        np.testing.assert_array_equal(x, [[1, 0.5], [2, 1.5]])
        np.testing.assert_array_equal(y, [0, 1])
    # Names that are no text, as of a file without a header.
    nameless = _frame().set_axis(range(4), axis=1)
    x, y = _from_frame(nameless, 0, label=3, vocabulary={1: range(6)}).client("a")
    np.testing.assert_array_equal(x, [[0, 0, 1, 0, 0, 0, 1.5]])
    np.testing.assert_array_equal(y, [1])


_TOWNS = ["b", "a", "b", "b", "b"]
_VOCABULARY = {"town": ["a", "b", "c"], "label": ["no", "yes"]}
_OF_TOWNS = {"vocabulary": _VOCABULARY}


@pytest.mark.parametrize(
    "frame, arguments, message",
    [
        ([1], {}, "pandas.DataFrame, got list"),
        (_frame().age, {}, "pandas.DataFrame, got Series"),
        (_frame(who=2.0**53), {}, "client_ids must distinguish clients"),
        (_frame(), {"client": ["who"]}, "client must.*'who'"),
        (_frame(), {"client": "whom"}, "client.*'whom'"),
        (_frame(), {"features": ["x"]}, "features.*'x'"),
        (_frame(), {"features": []}, "features must"),
        (_frame(), {"label": "y"}, "label.*'y'"),
        (_frame(), {"features": ["who"]}, "not hold the client column"),
        (_frame().head(0), {}, "have rows"),
        (pd.concat([_frame(), _frame()[["age"]]], axis=1), {}, "distinct"),
        # Values that cannot be trained on.
        (_frame(age=["Secret"] * 5), {}, "features must be numbers.*'age'"),
        (_frame(age=[1, None, 1, 1, 1]), {}, "'age' with 1 missing"),
        (_frame(height=[np.inf] * 5), {}, "finite.*'height' of row 0, and 5"),
        (_frame(age=np.full(5, 2**63, np.uint64)), {}, "fit into int64"),
        (_frame(who=["a", None, "b", "b", "b"]), {}, "'who' with 1 miss"),
        (_frame(label=["Secret"] * 5), {}, "label must be numbers"),
        (_frame(town=_TOWNS), {}, r"vocabulary=\{'town': \[...\]\}"),
        (_frame(town=["b", "Secret", *"bbb"]), _OF_TOWNS, "'town'.*1 .*row 1"),
        (_frame(town=["b", "a", None, *"bb"]), _OF_TOWNS, "'town' with 1.*row 2"),
        (_frame(town=_TOWNS), {"vocabulary": {"town": ["a", "a", "b"]}}, "duplicates"),
    ],
)
def test_what_does_not_go(frame, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        _from_frame(frame, **{"client": "who", **arguments})
    assert "Secret" not in str(caught.value)


@pytest.mark.parametrize("towns", [_TOWNS, pd.Categorical(_TOWNS)])
def test_words_are_a_place_alone_and_in_a_list_zeros_and_ones(tmp_path, towns):
    frame = _frame(town=towns, label=["no", "yes", "yes", "no", "no"])
    frame.to_parquet(tmp_path / "table.parquet")
    for make, source in (
        (_from_frame, frame),
        (FederatedDataset.from_parquet, tmp_path / "table.parquet"),
    ):
        x, y = make(source, "who", ["age", "town"], **_OF_TOWNS).client("b")
        np.testing.assert_array_equal(x, [[1, 0, 1, 0], [3, 0, 1, 0], [5, 0, 1, 0]])
        np.testing.assert_array_equal(y, [0, 1, 0])
        alone = make(source, "who", {"t": "town"}, **_OF_TOWNS)
        np.testing.assert_array_equal(alone.client("b")[0]["t"], [1, 1, 1])
        np.testing.assert_array_equal(alone.client("a")[0]["t"], [0])


@pytest.mark.parametrize("weight", [None, "height"])
def test_a_sorted_file_is_read_client_by_client(tmp_path, weight):
    whole, path = _frame(), tmp_path / "table.parquet"
    whole = pd.concat([whole.assign(who=whole.who + str(k)) for k in range(7)])
    options = {"client": "who", "features": ["age"], "sample_weight": weight}
    whole.sort_values("who").to_parquet(path, row_group_size=4)
    streamed = FederatedDataset.from_parquet(path, **options)
    assert not streamed.is_indexed
    whole.to_parquet(path.with_name("unsorted"), row_group_size=4)
    held = FederatedDataset.from_parquet(path.with_name("unsorted"), **options)
    assert held.is_indexed
    assert streamed.element_spec == held.element_spec
    assert sorted(held.client_ids) == list(streamed.client_ids)
    for client_id in held.client_ids:
        for one, other in zip(
            streamed.client(client_id), held.client(client_id), strict=True
        ):
            np.testing.assert_array_equal(np.sort(one, 0), np.sort(other, 0))
    # Another file in its place: what was read and checked is what trains.
    before = streamed.client("a0")
    whole.sort_values("who", ascending=False).to_parquet(path, row_group_size=4)
    path.with_name("unsorted").unlink()
    for one, other in zip(before, streamed.client("a0"), strict=True):
        np.testing.assert_array_equal(one, other)
    whole.loc[whole.who == "b5", "age"] = None
    whole.sort_values("who").to_parquet(path, row_group_size=4)
    with pytest.raises(ValueError, match=r"'age' with.*Row 0 is row \d+ of"):
        FederatedDataset.from_parquet(path, **options)


# `fit(x, y, client_ids=)`.


def _table(rows=60, people=12):
    x, y = toy.arrays(rows)
    return x, y, np.array([f"anna {k % people}" for k in range(rows)])


def test_words_are_trained_and_evaluated_on_as_numpy_has_them():
    layers, words, y = tf.keras.layers, np.array([["red"], ["blue"]] * 6), [0, 1] * 6
    look_up = layers.StringLookup(vocabulary=["red"], output_mode="multi_hot")
    stack = [layers.Input([1], dtype="string"), look_up, layers.Dense(2)]
    fed = tfdp_fl.DPFederatedModel(tf.keras.Sequential(stack), tfdp_fl.NoPrivacy(), 3)
    fed.compile(tf.keras.optimizers.SGD(0.1), toy.loss())
    shown = {"validation_data": (words, y), "verbose": 0}
    seen = fed.fit(words, y, client_ids=np.arange(12) % 3, **shown).history["val_loss"]
    assert fed.evaluate(words, y, verbose=0) == pytest.approx(seen[-1])
    assert fed.predict(words.astype(object), verbose=0).shape == (12, 2)


def test_fit_is_that_of_the_clients_with_all_their_rows():
    x, y, ids = _table()
    weight = np.linspace(0, 1, len(x), dtype=np.float32)
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
    one, other = (toy.federated(mechanism, None, 4, "poisson") for _ in range(2))
    options = {"batch_size": 5, "verbose": 0, "seed": 1}
    one.fit(x=x, y=y, client_ids=pd.Series(ids), sample_weight=weight, **options)
    names = dict.fromkeys(ids.tolist())
    clients = {name: [each[ids == name] for each in (x, y, weight)] for name in names}
    other.fit({name: tuple(rows) for name, rows in clients.items()}, **options)
    one.fit(adapters.group_by_person(x, y, ids), rounds=2, **options)
    without = {name: tuple(rows[:2]) for name, rows in clients.items()}
    other.fit(without, rounds=2, **options)
    with pytest.raises(
        TypeError, match=r"rounds by its name, fit\(clients, rounds=2\)"
    ):
        other.fit(without, 2)
    toy.assert_same(one, other)
    assert one.rounds == 3
    assert one.epsilon(1e-3) == other.epsilon(1e-3)
    assert one.run.population[0] == 12
    # Validation holds out people, and no rows.
    one.fit(x, y, client_ids=ids, rounds=1, validation_split=0.3, verbose=0)
    assert one.run.population[0] < 12
    # Tables are evaluated on as they are trained on.
    frame = pd.DataFrame(x).assign(flag=y > 0).convert_dtypes().drop(columns=7)
    as_array = frame.to_numpy(np.float32)
    public = {"verbose": 0, "validation_data": (frame, y)}
    seen = one.fit(frame, pd.Index(y), client_ids=ids, **public).history["val_loss"]
    for given in (frame, as_array):
        assert one.evaluate(given, y, verbose=0) == pytest.approx(seen[-1])
        toy.assert_same([one.predict(given, verbose=0)], [one.predict(as_array)])
    with pytest.raises(ValueError, match=r"validation_data must be numbers.*'flag'"):
        one.fit(clients, validation_data=(frame.assign(flag="Secret"), y))
    for wrong, message in (((x, y), "must say whose"), (((x, y),), r"fit\(x, y, cl")):
        with pytest.raises(TypeError, match=message):
            one.fit(*wrong, rounds=1)
    with pytest.raises(TypeError, match="x must be None"):
        one.fit(clients, x=clients)


def _with_a_gap(x, *_):
    x[7, 2] = np.nan
    return x


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, y, i: (x, y, i[:-1]), "client_ids.*60 rows, got .59"),
        (lambda x, y, i: (x, y, i[:, None]), "client_ids"),
        (lambda x, y, i: (x, y[:-1], i), "59|60"),
        (lambda x, y, i: (x, 2, i), "y must have a leading dimension"),
        (lambda x, y, i: (x, y, [None, *i[1:]]), "NoneType.* row 0"),
        (lambda x, y, i: (x, y, np.where(i == "anna 1", np.nan, 1.0)), "row 1"),
        (lambda x, y, i: (x, y, [1, 1.0, *i[2:]]), "list of both"),
        (lambda x, y, i: (x, y, [float("nan"), *i[1:]]), "list of both"),
        (lambda x, y, i: (x[:0], y[:0], i[:0]), "x must have rows"),
        (lambda x, y, i: (_with_a_gap(x), y, i), "column 2 of row 7"),
        (
            lambda x, y, i: (pd.DataFrame(_with_a_gap(x)).add_prefix("c"), y, i),
            "column 'c2' with 1.*row 7",
        ),
        (lambda x, y, i: (pd.DataFrame(x)[[0, 0]], y, i), "x must have distinct col"),
        (lambda x, y, i: (x, pd.Series(["a"] * 60), i), "y must be.*'y' of"),
        (lambda x, y, i: (x, y, i, [np.nan] * 60), "sample_weight.*row 0"),
        (lambda x, y, i: (x, y, np.ma.array(i, mask=i == i[3])), "NoneType.* row 3"),
        (lambda x, y, i: (np.ma.masked_equal(x, x[0, 0]), y, i), "x must.*masked"),
    ],
)
def test_what_does_not_go_together(change, message):
    with pytest.raises(ValueError, match=message):
        adapters.group_by_person(*change(*_table()))


@pytest.mark.parametrize(
    "ids",
    [
        [uuid.UUID(int=k) for k in (1, 2, 1)],
        [datetime.date(2020, 1, k) for k in (1, 2, 1)],
        [("a", k) for k in (1, 2, 1)],
        pd.date_range("2020", periods=2)[[0, 1, 0]],
    ],
)
def test_ids_are_the_same_in_a_frame_and_beside_a_table(ids):
    x, y = np.eye(3), np.arange(3)
    frame = pd.DataFrame({"who": pd.Series(ids), "x": [1, 2, 3], "label": y})
    named = _from_frame(frame, "who").client_ids
    assert len(named) == 2
    for given in (ids, pd.Series(ids), pd.Series(ids, dtype=object)):
        assert adapters.group_by_person(x, y, given).client_ids == named
    nans = [(1, float("nan")) for _ in y]  # Which equal only themselves.
    with pytest.raises(ValueError, match=r"client_ids must be .* row 0"):
        adapters.group_by_person(x, y, nans)
    for wrong in ([ids[0], {}, ids[2]], pd.array([1, None, 1], dtype="Int64")):
        with pytest.raises(ValueError, match=r"client_ids must be .* row 1"):
            adapters.group_by_person(x, y, wrong)
    with pytest.raises(ValueError, match=r"must be a vector.*got \[3, 1\]"):
        adapters.group_by_person(x, y, pd.DataFrame({"who": ids}))


def _other_index(values):
    """Returns a series whose rows pandas would put in another order."""
    return pd.Series(values, index=np.arange(len(values))[::-1])


@pytest.mark.parametrize("name", ["y", "client_ids", "sample_weight", "none"])
def test_rows_of_one_person_are_not_anothers(name):
    x, y, ids = _table()
    given = {"y": y, "client_ids": ids, "sample_weight": np.ones(len(y))}
    given = {key: pd.Series(values) for key, values in given.items()}
    x = {"a": pd.DataFrame(x), "b": x}
    takes = [lambda: adapters.group_by_person(x, **given)]
    if name != "sample_weight":
        bounded = {key: given[key] for key in ("y", "client_ids")}
        takes.append(lambda: tfdp_fl.limit_rows_per_client(x, **bounded, max_rows=2))
    if name != "none":
        given[name] = _other_index(given[name].to_numpy())
        bounded = {key: given[key] for key in ("y", "client_ids")}
    for take in takes:
        if name == "none":
            take()
            continue
        with pytest.raises(ValueError, match=f"{name} must have the same pandas ind"):
            take()
    if name == "y":
        with pytest.raises(ValueError, match="y must have the same pandas index"):
            Validation(data=(x, given["y"]), every=1, batch_size=1)


@pytest.mark.parametrize("choose", ["random", "first", "last"])
def test_nobody_keeps_more_rows_than_the_bound(choose):
    x = {"a": np.arange(9), "b": pd.DataFrame({"c": np.arange(9)})}
    ids = np.array([1, 1, 1, 1, 1, 2, 2, 3, 1])
    left, y, kept = tfdp_fl.limit_rows_per_client(
        x, np.arange(9), ids, max_rows=2, keep=choose
    )
    assert np.bincount(kept).tolist() == [0, 2, 2, 1]
    np.testing.assert_array_equal(left["a"], y)
    np.testing.assert_array_equal(left["b"]["c"], y)
    np.testing.assert_array_equal(ids[y], kept)
    if choose != "random":
        own = {"first": [0, 1], "last": [4, 8]}[choose]
        assert [row for row in y if ids[row] == 1] == own
    # Ids stay what they were.
    names = [("a", 1), ("a", 1), ("b", 2)]
    kept = tfdp_fl.limit_rows_per_client(*[np.arange(3)] * 2, names, max_rows=1)[2]
    assert kept == [("a", 1), ("b", 2)]
    for name, value in (("max_rows", 0), ("keep", "best")):
        with pytest.raises(ValueError, match=name):
            tfdp_fl.limit_rows_per_client(*_table(), **{"max_rows": 2, name: value})


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "i8", "u8"])
def test_integers_of_any_range_are_grouped_in_order_of_appearance(dtype):
    limits, rng = np.iinfo(dtype), np.random.default_rng(0)
    for low, high in [(limits.min, limits.max), (limits.max - 3, limits.max)]:
        ids = rng.integers(low, high, 500, dtype=dtype, endpoint=True)
        rows_of: dict[int, list[int]] = {}
        for row, client in enumerate(ids.tolist()):
            rows_of.setdefault(client, []).append(row)
        found = tables.group_rows(ids, 500)
        assert found.client_ids == list(rows_of)
        np.testing.assert_array_equal(found.rows, np.concatenate([*rows_of.values()]))
        assert found.lengths.tolist() == [*map(len, rows_of.values())]


@pytest.mark.parametrize(
    "ids",
    [
        np.array([3, 1, 1, 2, 3, 1]),
        np.array([1, 1, 2, 2, 2, 9], np.uint64),
        np.array([-5, 7, -5, 7, 0, 0], np.int8),
        np.array([4, 4, 4, 4, 4, 4]),
    ],
)
def test_numbers_are_grouped_as_any_ids_are(ids):
    found = tables.group_rows(ids, 6)
    for other in (ids.tolist(), ids.astype(object), pd.Series(ids)):
        wanted = tables.group_rows(other, 6)
        assert found.client_ids == wanted.client_ids
        np.testing.assert_array_equal(found.rows, wanted.rows)
        np.testing.assert_array_equal(found.lengths, wanted.lengths)
    by_client = found.by_client()
    assert list(by_client) == list(dict.fromkeys(ids.tolist()))
    for client_id, rows in by_client.items():
        np.testing.assert_array_equal(rows, np.flatnonzero(ids == client_id))


def test_ids_that_differ_have_different_digests_and_alike_ones_are_found():
    lists = [
        *([1, 2], [2, 1], [12], [1, 2, 0], ["1", "2"], ["12"], ["1", "2", ""]),
        *([1.0, 2.0], [1, "2"], [b"1", b"2"], [True, 2], range(1, 3), [2**70, 1]),
    ]
    assert len({tables.hash_ids(ids) for ids in lists}) == len(lists)
    assert tables.hash_ids([np.int64(1), 2]) == tables.hash_ids([1, 2])
    assert tables.hash_ids([np.str_("a")]) == tables.hash_ids(["a"])
    plain = ["ann", "ben", "x1", "10", "2.5", "-3", "a_b", "1e5", "0x"]
    assert tables._are_plain([word for word in plain if word != "0x"])
    for word in plain:
        assert tables._normalise_id(word) == word or not tables._are_plain([word])
    assert not tables._are_plain(["ben", ""])
    for odd in ("Ann", " ann", "a nn", "01", "1.0", "+07", "\ufeffann", "a\x01"):
        assert not tables._are_plain(["ben", odd])
        with pytest.warns(RuntimeWarning, match="differ only in"):
            tables.require_distinct([odd, tables._normalise_id(odd), "ben"])
