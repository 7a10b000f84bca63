"""What stands in the pages comes from the runs: claims, and configurations."""

import json
import pathlib
import re

import numpy as np
import pytest

from research import reproduce_geyer as geyer
from tfdp_fl.experiments import sweeps

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CLAIMS = json.loads((_ROOT / "research" / "claims.json").read_text("utf-8"))
_CONFIGS = sorted((_ROOT / "research" / "configs").rglob("*.json"))


@pytest.mark.parametrize("claim", _CLAIMS, ids=lambda claim: claim["text"])
def test_pages_say_what_was_measured(claim):
    assert claim["text"] in (_ROOT / claim["page"]).read_text("utf-8")
    shown = re.search(r"\d+(\.(\d+))?", claim["text"])
    assert shown[0] == f"{claim['value']:.{len(shown[2] or '')}f}"
    assert (_ROOT / claim["command"].split()[1]).is_file()


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.name)
def test_every_run_of_a_configuration_is_allowed(path):
    config = json.loads(path.read_text("utf-8"))
    if config["base"]["dataset"] != "digits":
        config["base"]["data_path"] = __file__  # It is not read.
    assert sweeps.expand(config)


@pytest.mark.parametrize("name", geyer.names())
def test_every_configuration_is_geyers_setting(tmp_path, name):
    path = tmp_path / "mnist.npz"
    images, labels = np.zeros((400, 28, 28), np.uint8), np.arange(400, dtype="u1") % 10
    parts = {"x_train": images, "y_train": labels}
    np.savez(path, **parts, x_test=images[:50], y_test=labels[:50])
    k = int(name.split("_")[0][1:])
    for trial in sweeps.expand(geyer.read_config(name, path)):
        chosen = trial.settings
        assert (chosen.dataset, chosen.num_clients) == ("mnist", k)
        assert (chosen.examples_per_client, chosen.shards_per_client) == (600, 2)
        if name != "k100_non_private":
            delta = {100: 1e-3, 1000: 1e-5, 10000: 1e-6}[k]
            assert (chosen.target_epsilon, chosen.target_delta) == (8, delta)
            exact = chosen.median_noise_multiplier == "exact"
            assert exact == ("as_published" in name)
