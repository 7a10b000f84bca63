"""A silo behind Flower: one node of any strategy, whatever its process does."""

import types

import numpy as np
import pytest

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.silo import hospital

pytestmark = fm.NEEDS_FLOWER
_MEANS = tfdp_fl.PrivateMetrics(bounds={"accuracy": (0, 1)}, noise_multiplier=30.0)


def _send(app, weights, kind="train", message_id="", node=7):
    config = fm.ConfigRecord({"server-round": 1})
    content = fm.RecordDict({"arrays": fm.model(*weights), "config": config})
    message = fm.Message(content, node, kind)
    message.metadata.__dict__["_message_id"] = message_id
    return app(message, types.SimpleNamespace(node_id=node, node_config={}))


def test_a_node_answers_for_its_people_alone(tmp_path):
    def make(context):
        return hospital.silo(tmp_path / str(context.node_id))

    app = tfdp_fl.flower.silo_app(make, _MEANS)
    start = hospital.silo(tmp_path / "none").get_weights()
    reply = _send(app, start, message_id="a")
    assert dict(reply.content["metrics"]) == {
        "num-examples": hospital.NUM_PEOPLE,
        "rounds": 1,
        "spent": 0,
        "epsilon": make(types.SimpleNamespace(node_id=7)).epsilon(hospital.DELTA),
    }
    # Another process, after this one's end; the same message; another node.
    again = _send(tfdp_fl.flower.silo_app(make), start, message_id="a")
    both = [fm.arrays(each.content["arrays"]) for each in (reply, again)]
    np.testing.assert_equal(*both)
    assert hospital.charged(tmp_path / "7") == 1
    _send(app, start, message_id="a", node=8)
    assert hospital.charged(tmp_path / "8") == 1
    shown = _send(app, start, "evaluate", "a").content["metrics"]
    assert set(shown) == {"num-examples", "accuracy"}
    assert hospital.charged(tmp_path / "7") == 2
    # Without private metrics, and without a context.
    plain = tfdp_fl.flower.silo_app(lambda: hospital.silo(tmp_path / "7"))
    shown = _send(plain, start, "evaluate").content["metrics"]
    assert dict(shown) == {"num-examples": hospital.NUM_PEOPLE}
    assert hospital.charged(tmp_path / "7") == 2


def test_of_what_is_refused_only_the_kind_leaves(tmp_path):
    app = tfdp_fl.flower.silo_app(lambda: hospital.silo(tmp_path))
    start = hospital.silo(tmp_path).get_weights()
    with pytest.raises(RuntimeError, match="raised ValueError; its message stays"):
        _send(app, [np.full_like(w, np.nan) for w in start])

    def broken(context):
        raise KeyError("patient 17")

    with pytest.raises(RuntimeError) as caught:
        _send(tfdp_fl.flower.silo_app(broken), start)
    assert "17" not in str(caught.value)
    _send(app, start, message_id="a")
    with pytest.raises(RuntimeError, match="SiloMessageError"):
        _send(app, [w + 1 for w in start], message_id="a")
    assert hospital.charged(tmp_path) == 1


@pytest.mark.parametrize("name", ["FedAdam", "FedAvg", "FedMedian"])
def test_any_strategy_makes_a_model_of_the_answers(tmp_path, name):
    from flwr.serverapp import strategy as strategies

    def make(context):
        return hospital.silo(tmp_path / str(context.node_id))

    strategy = getattr(strategies, name)(min_available_nodes=2, min_train_nodes=2)
    start = hospital.silo(tmp_path / "none").get_weights()
    arrays = fm.model(*start)
    grid = types.SimpleNamespace(get_node_ids=lambda: [7, 8])
    config = fm.ConfigRecord()
    messages = [*strategy.configure_train(1, arrays, config, grid)]
    app = tfdp_fl.flower.silo_app(make)
    replies = []
    for message in messages:
        context = types.SimpleNamespace(node_id=message.metadata.dst_node_id)
        replies.append(app(message, context))
        replies[-1].metadata.__dict__["_src_node_id"] = context.node_id
    model, metrics = strategy.aggregate_train(1, replies)
    moved = fm.arrays(model)
    assert [w.shape for w in moved] == [w.shape for w in start]
    assert all(np.isfinite(w).all() for w in moved)
    assert any((a != b).any() for a, b in zip(moved, start, strict=True))
    if name == "FedAvg":
        assert metrics["epsilon"] > 0
        sent = [fm.arrays(reply.content["arrays"]) for reply in replies]
        for got, *each in zip(moved, *sent, strict=True):
            np.testing.assert_allclose(got, np.mean(each, axis=0), rtol=1e-5, atol=1e-7)
