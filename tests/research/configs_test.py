"""Every configuration of the results page is one that `sweep.py` takes."""

from __future__ import annotations

import json
import pathlib

from absl.testing import parameterized

from tfdp_fl.experiments import sweeps

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "research" / "configs"
_NAMES = [
    path.relative_to(_FOLDER).as_posix() for path in sorted(_FOLDER.rglob("*.json"))
]


class ConfigsTest(parameterized.TestCase):
    def test_they_are_found(self):
        self.assertIn("local_dp.json", _NAMES)
        self.assertIn("geyer/search_k100.json", _NAMES)

    @parameterized.parameters(_NAMES)
    def test_every_run_of_it_is_allowed(self, name):
        config = json.loads((_FOLDER / name).read_text("utf-8"))
        if config["base"]["dataset"] != "digits":
            config["base"]["data_path"] = __file__  # It is not read.
        self.assertNotEmpty(sweeps.expand(config))
