"""The programs train and sweep: what they leave, and what they refuse."""

import json

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tests.scripts import programs
from tfdp_fl import datasets
from tfdp_fl.experiments import settings

_CHANCE = 0.1
_SHORT = {
    "adaptive": ["--rounds=12", "--accountant=rdp"],
    "local": ["--rounds=4"],
}
_SMALL = ["--model=linear", "--num_clients=20", "--rounds=4"]
_FILES = (
    *("history.csv", "model.keras", "privacy.txt", "privacy.json"),
    *("accuracy.png", "report.html", "config.json", "result.json"),
)
_REFUSED = (
    (["--dataset=cifar"], "dataset"),
    (["--mechanism=adaptive", "--clip_norm=1"], "--clip_norm"),
    (["--mechanism=local", "--accountant=pld"], "--accountant"),
    (["--model=lstm"], "--model=lstm"),
    (["--dataset=mnist", "--data_path=nowhere.npz"], "--data_path"),
    (["--overwrite", "--resume"], "--overwrite"),
    (["surplus"], "surplus"),
)


def _read(path):
    """Returns a run's result, and its history."""
    result = json.loads((path / "result.json").read_text())
    return result, pd.read_csv(path / "history.csv")


def _run_all(program, lines):
    outcomes = programs.run_all([[program, *line] for line in lines.values()])
    return dict(zip(lines, outcomes, strict=True))


def _assert_one_sentence(outcome, word):
    assert outcome.code == 1
    assert word in outcome.err
    if "FATAL" not in outcome.err:  # That is absl's own way.
        assert len(outcome.err.splitlines()) == 1


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(name="outcomes", scope="module")
def _outcomes(folder):
    def into(name):
        return f"--output_dir={folder / name}"

    sizes = ["--clients_per_round=4x10", "--target_epsilon=2.0"]
    noise = ["--noise_multiplier=1", "--count_noise_stddev=2", "--accountant=pld"]
    checkpoints = ["--clients_per_round=20", "--seed=3", "--checkpoint_every=2"]
    others = ["--mechanism=none", "--rounds=1", "--clients_per_round=5"]
    again = into("checkpoints")
    lines = {
        # absl prints its help in the first run of a process only.
        "help": ["--helpfull"],
        "budget": [*_SMALL, *sizes, *noise, into("budget")],
        "checkpoints": [*_SMALL, *checkpoints, again],
        "not empty": [again],
        "resumed with others": ["--resume", "--rounds=9", again],
        "resumed": ["--resume", again],
        "overwritten": [*_SMALL, *others, "--overwrite", again],
    }
    for mechanism, short in _SHORT.items():
        flags = [f"--mechanism={mechanism}", "--seed=1", "--validation_freq=2"]
        lines[mechanism] = [*flags, *short, into(mechanism)]
    for number, (line, _) in enumerate(_REFUSED):
        lines[number] = [*line, into("refused")]
    return _run_all("train", lines)


def _well(outcome):
    assert outcome.code == 0, outcome.err or outcome.out
    return outcome.out


@pytest.mark.parametrize("mechanism", _SHORT)
def test_central_and_local_mechanisms_learn_digits(folder, outcomes, mechanism):
    _well(outcomes[mechanism])
    result, _ = _read(folder / mechanism)
    # 360 test examples: by chance 0.1, with a stddev of 0.016.
    assert result["accuracy"] > 3 * _CHANCE
    assert result["epsilon"] > 0


def test_it_leaves_its_files_and_says_so(folder, outcomes):
    text = " ".join(outcomes["help"].out.split())
    for mechanism in settings.MECHANISMS:
        for parameter in settings.parameters_of(mechanism):
            assert f"--{parameter}:" in text
    path, out = folder / "adaptive", _well(outcomes["adaptive"])
    for name in _FILES:
        assert name in out
        assert (path / name).stat().st_size > 0, name
    result, history = _read(path)
    for words in (f"Accuracy: {result['accuracy']:.4f}", "Epsilon:  ", str(path)):
        assert words in out
    assert history["round"].tolist() == [*range(1, 13)]
    assert history["val_accuracy"].notna().tolist() == [False, True] * 6
    assert history["epsilon"].iloc[-1] == pytest.approx(result["epsilon"], abs=1e-5)
    assert result["epsilon_pld"] <= result["epsilon_rdp"] == result["epsilon"] <= 8.0
    assert "differentially private" in (path / "privacy.txt").read_text()
    # The saved model is the one that was measured.
    model = tf.keras.models.load_model(path / "model.keras")
    _, (x, y) = datasets.load_digits(num_clients=500)
    accuracy = np.mean(np.argmax(model.predict(x, verbose=0), -1) == y)
    assert accuracy == pytest.approx(result["accuracy"], abs=1e-5)


def test_it_stops_before_the_round_that_would_overspend(folder, outcomes):
    _well(outcomes["budget"])
    result, history = _read(folder / "budget")
    assert (result["stopped"], result["accountant"]) == ("budget", "pld")
    assert 0 < result["rounds"] < 4
    assert result["epsilon"] <= 2.0
    # On the way epsilon may be a bound that is a little larger.
    assert history["epsilon"].iloc[-1] >= result["epsilon"] - 1e-5


def test_a_full_directory_is_refused_unless_told_otherwise(folder, outcomes):
    _assert_one_sentence(outcomes["not empty"], "--overwrite or --resume")
    _assert_one_sentence(outcomes["resumed with others"], "--rounds=9")
    # A resumed run gives what it gave.
    first, again = (
        [
            line.split(", after")[0]
            for line in _well(outcomes[name]).splitlines()
            if line.startswith(("Accuracy", "Epsilon"))
        ]
        for name in ("checkpoints", "resumed")
    )
    assert len(first) == 2
    assert first == again
    _well(outcomes["overwritten"])
    _, history = _read(folder / "checkpoints")
    assert history["round"].tolist() == [1]
    assert not (folder / "checkpoints" / "checkpoint").exists()


@pytest.mark.parametrize("number", range(len(_REFUSED)))
def test_bad_flags_are_refused_before_anything_starts(folder, outcomes, number):
    _assert_one_sentence(outcomes[number], _REFUSED[number][1])
    assert "Round 1" not in outcomes[number].out
    assert not (folder / "refused").exists()


def test_sweep(tmp_path):
    small = {"dataset": "digits", "num_clients": 20, "model": "linear", "rounds": 1}
    small |= {"mechanism": "none", "clients_per_round": 20}
    for name, grid in {"right": {}, "bad": {"clip_norm": [1.0]}}.items():
        config = {"base": small, "grid": grid, "seeds": [0]}
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    refused = {
        "--config": [],
        "--clip_norm": [f"--config={tmp_path / 'bad.json'}"],
        "--data_path": ["--config=digits_epsilon", "--data_path=nowhere.npz"],
    }
    run = [f"--config={tmp_path / 'right.json'}", f"--output_dir={tmp_path / 'runs'}"]
    outcomes = _run_all("sweep", {"run": run, **refused})
    assert _well(outcomes["run"]).count("accuracy 0.") == 1
    assert len((tmp_path / "runs" / "runs.csv").read_text().splitlines()) == 2
    for word in refused:
        _assert_one_sentence(outcomes[word], word)
