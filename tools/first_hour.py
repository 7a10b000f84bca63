"""Plays somebody's first hour with tfdp_fl, from the wheel on.

    python tools/first_hour.py [--python=/path/to/python3.12]

Builds the wheel, installs it in an empty environment, and there, far from the
sources: own data from a pandas frame, training to a target, the audit's sentence,
the report, and the model loaded by plain Keras elsewhere. It takes some minutes and
a package index: `make newcomer` runs it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).resolve().parents[1]

_SOURCES = (
    *("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"),
    *("requirements", "scripts", "tfdp_fl"),
)

_TRAIN = """
import numpy as np
import pandas as pd
import tensorflow as tf
import tfdp_fl

rng = np.random.default_rng(0)
centres = rng.normal(size=(3, 4))
y = rng.integers(0, 3, size=4000)
x = centres[y] + rng.normal(scale=0.3, size=(4000, 4))
frame = pd.DataFrame(x, columns=["age", "height", "weight", "pulse"])
frame["sick"] = y
frame["patient"] = [f"patient {k % 200}" for k in range(4000)]
clients = tfdp_fl.datasets.FederatedDataset.from_dataframe(
    frame, client="patient", label="sick"
)

model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(3)])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
assert tfdp_fl.validate(model) == []

fed = tfdp_fl.make_private(
    model, target_epsilon=2.0, target_delta=5e-4, num_clients=200,
    clients_per_round=50, rounds=20,
)
fed.compile(tf.keras.optimizers.SGD(0.1), loss, ["accuracy"])
audit = tfdp_fl.auditing.CanaryAudit(num_canaries=50)
fed.fit(clients, rounds=20, batch_size=10, verbose=0, audit=audit,
        callbacks=[tfdp_fl.callbacks.Report("report.html")])
(line,) = [each for each in fed.privacy_statement().split(chr(10))
           if "canar" in each.lower()][:1]
accuracy = fed.evaluate_clients(clients, verbose=0)["accuracy"].mean()
assert accuracy > 0.45, accuracy  # Chance is 1/3.
fed.save("model.keras")
np.save("x.npy", x[:5].astype("float32"))
np.save("y.npy", fed.predict(x[:5].astype("float32"), verbose=0))
print(f"accuracy {accuracy:.3f}, epsilon {fed.epsilon(5e-4):.3f}")
print(line)
"""

_LOAD = """
import sys
import numpy as np
import tensorflow as tf

model = tf.keras.models.load_model("model.keras")
assert "tfdp_fl" not in sys.modules
np.testing.assert_allclose(
    model.predict(np.load("x.npy"), verbose=0), np.load("y.npy"), atol=1e-5
)
print("the model loads without tfdp_fl")
"""

_COMMANDS = ("train", "accountant", "sweep")


def _run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
    """Runs a command; returns what it printed, and raises if it failed."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    theirs = {name: value for name, value in os.environ.items() if name not in ours}
    words = [str(word) for word in command]
    print(" ", *(word if len(word) < 60 else "..." for word in words), flush=True)
    done = subprocess.run(words, cwd=cwd, env=theirs, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nfailed: {command}")
    return done.stdout


def main() -> None:
    """Plays the hour."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="Which Python (3.12).")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as folder:
        there = pathlib.Path(folder)
        _run(python, "-m", "venv", there / "venv", cwd=there)
        own = there / "venv" / "bin"
        pip = (own / "python", "-m", "pip", "-q", "--no-input")
        for name in _SOURCES:  # What a build leaves behind stays in the copy.
            source, copy = _ROOT / name, there / "sources" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
        _run(
            *(*pip, "wheel", "--no-deps", "--wheel-dir", there / "wheel"),
            there / "sources",
            cwd=there,
        )
        (wheel,) = (there / "wheel").glob("*.whl")
        _run(*pip, "install", f"{wheel}[plots]", "pandas", cwd=there)
        work = there / "work"
        work.mkdir()
        print(_run(own / "python", "-c", _TRAIN, cwd=work), end="")
        page = (work / "report.html").read_text("utf-8")
        assert "What is guaranteed" in page
        assert page.count("<svg") >= 4
        elsewhere = there / "elsewhere"
        elsewhere.mkdir()
        for name in ("model.keras", "x.npy", "y.npy"):
            (work / name).rename(elsewhere / name)
        print(_run(own / "python", "-c", _LOAD, cwd=elsewhere), end="")
        for name in _COMMANDS:
            out = _run(own / f"tfdp-fl-{name}", "--help", cwd=elsewhere)
            assert "--" in out, name
        _run(
            own / "tfdp-fl-train",
            *("--dataset=digits", "--num_clients=50", "--clients_per_round=10"),
            *("--rounds=2", "--output_dir=digits"),
            cwd=elsewhere,
        )
        print(f"{wheel.name} on {python}: the first hour went well")


if __name__ == "__main__":
    main()
