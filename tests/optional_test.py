from __future__ import annotations

import pathlib
import sys
import tempfile
import warnings
from unittest import mock

from absl.testing import absltest

import tfdp_fl
from tfdp_fl.experiments import Settings, training


def _without(*names):
    return mock.patch.dict(sys.modules, dict.fromkeys(names))


class NeededTest(absltest.TestCase):
    def test_a_missing_package_is_named_with_the_command_that_brings_it(self):
        with (
            _without("sklearn"),
            self.assertRaisesRegex(
                ImportError,
                "^load_digits needs scikit-learn, .*: pip install scikit-learn",
            ),
        ):
            tfdp_fl.datasets.load_digits(num_clients=10)

    def test_a_run_without_matplotlib_leaves_everything_but_the_chart(self):
        prepared = training.prepare(
            Settings(
                dataset="digits",
                num_clients=20,
                clients_per_round=10,
                model="linear",
                mechanism="none",
                rounds=1,
            )
        )
        with (
            tempfile.TemporaryDirectory() as folder,
            _without("matplotlib"),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            training.run(prepared, folder, verbose=0)
            names = {path.name for path in pathlib.Path(folder).iterdir()}
        self.assertIn("result.json", names)
        self.assertNotIn("accuracy.png", names)
        messages = [str(each.message) for each in caught]
        self.assertLen([m for m in messages if "pip install matpl" in m], 1)
