"""A mechanism from outside of the package is used like those inside."""

import json
import subprocess
import sys

import numpy as np
import pytest

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import rounds
from tests.outside.loading import FILE, smooth_clipping
from tests.scripts.programs import ROOT
from tfdp_fl import accounting
from tfdp_fl.mechanisms import declaration


def _fed(**options):
    model = cohorts.mlp()
    model.compile("sgd", cohorts.cross_entropy(), ["accuracy"])
    mechanism = smooth_clipping()(noise_multiplier=0.0)
    return tfdp_fl.DPFederatedModel(model, mechanism, 4, "fixed_size", **options)


@pytest.mark.parametrize("name", ["statistics.py", "smooth_clipping.py", "none.py"])
def test_a_file_is_not_mistaken_for_a_module_that_is_there(tmp_path, monkeypatch, name):
    smooth_clipping()
    monkeypatch.setattr(sys, "path", [*sys.path])
    if name != "none.py":
        (tmp_path / name).write_text("")
    with pytest.raises(ImportError, match=r"none|has its name"):
        declaration.load(str(tmp_path / name))


def test_trains_by_name_and_says_what_it_is():
    smooth_clipping()
    sizes = {"num_clients": 20, "clients_per_round": 5, "rounds": 3}
    target = {"target_epsilon": 4.0, "target_delta": 1e-3, **sizes}
    chosen = {"mechanism": "smooth", "start_norm": 0.3, "accountant": "rdp"}
    fed = tfdp_fl.make_private(_fed().model, **target, **chosen)
    assert isinstance(fed.mechanism, smooth_clipping())
    fed.compile("sgd", cohorts.cross_entropy(), jit_compile=False)
    history = fed.fit(
        cohorts.dataset((5,) * 20), rounds=3, batch_size=5, verbose=0
    ).history
    first, second, third = history["clip_norm"]
    assert (first, third != second) == (pytest.approx(0.3, abs=1e-6), True)
    z = fed.mechanism.noise_multiplier
    epsilon = accounting.epsilon(z, "poisson", 20, 5, 3, 1e-3)
    assert fed.epsilon(1e-3) == pytest.approx(epsilon, abs=1e-6)
    assert epsilon <= 4.0
    assert "squashed smoothly" in " ".join(fed.privacy_statement().split())


def test_ways_to_train_are_the_same():
    def trained(jit_compile=None, protocol=None):
        fed = _fed(secure_aggregation=protocol)
        fed.compile("sgd", cohorts.cross_entropy(), jit_compile=jit_compile)
        history = fed.fit(
            cohorts.dataset((5,) * 4), rounds=2, batch_size=5, verbose=0
        ).history
        return rounds.flat(fed.get_weights()), history["clip_norm"][1]

    side_by_side, clip = trained()
    one_by_one, _ = trained(jit_compile=False)
    np.testing.assert_allclose(side_by_side, one_by_one, rtol=1e-4, atol=1e-6)
    # A secure sum adds up its own sum.
    sums = tfdp_fl.secure_aggregation.AdditiveSecretSharing(bits=64)
    assert trained(protocol=sums)[1] == pytest.approx(clip, abs=1e-5)


def test_train_py_has_its_flags(tmp_path):
    flags = ["--num_clients=20", "--clients_per_round=20", "--model=linear"]
    flags += [f"--mechanism_module={FILE}", "--mechanism=smooth", "--start_norm=0.25"]
    flags += ["--rounds=2", "--verbose=0", f"--output_dir={tmp_path / 'run'}"]
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *flags]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=300)
    result = json.loads((tmp_path / "run" / "result.json").read_text("utf-8"))
    assert result["mechanism"] == "SmoothClipping"
    assert result["mechanism_parameters"]["start_norm"] == 0.25
    assert result["epsilon"] <= 8.0
