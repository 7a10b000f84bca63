"""Every mechanism audited through `scripts/audit.py`.

What the audit finds where something is broken is in
`tests/auditing/audit_test.py` and `tests/experiments/audits_test.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest, parameterized

from tests.scripts import programs
from tests.stress import counts

_TFF = importlib.util.find_spec("tensorflow_federated")
_MECHANISMS = {
    "fixed": ["--mechanism=fixed"],
    "fixed_size": ["--mechanism=fixed", "--sampling=fixed_size"],
    "shuffled": ["--mechanism=fixed", "--sampling=shuffled"],
    "adaptive": ["--mechanism=adaptive"],
    "private_median": ["--mechanism=median"],
    "correlated": ["--mechanism=correlated"],
}
# What is not audited, and a word of why.
_REFUSED = {
    "none": ["--mechanism=none"],
    "local": ["--mechanism=local"],
    "adaptive_local": ["--mechanism=adaptive_local"],
    "nbafl": ["--mechanism=nbafl"],
    "noise at the clients": [
        "--mechanism=fixed",
        "--noise_site=client",
        "--sampling=fixed_size",
    ],
}
_SMALL = [
    "--num_clients=200",
    "--clients_per_round=40",
    "--rounds=5",
    "--verbose=0",
]


def _run(flags, folder):
    done = subprocess.run(
        [sys.executable, "scripts/audit.py", *flags, f"--output_dir={folder}"],
        cwd=programs.ROOT,
        env={**os.environ, "PYTHONPATH": str(programs.ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


class AuditTest(parameterized.TestCase):
    def _audit(self, iterates):
        started = time.time()
        for name, flags in _MECHANISMS.items():
            with tempfile.TemporaryDirectory() as folder:
                more = ["--num_canaries=1000", f"--iterates={iterates}"]
                code, said = _run([*_SMALL, *flags, *more], folder)
                self.assertEqual(code, 0, said)
                with open(f"{folder}/audit.json") as file:
                    result = json.load(file)
            print(
                name,
                iterates,
                {each: result[each] for each in ("claimed", "estimate", "low", "high")},
            )
            self.assertLessEqual(result["low"], result["claimed"])
        counts.held(
            f"No audit finds significantly more than is claimed ({iterates} iterates)",
            len(_MECHANISMS),
            "audits",
            time.time() - started,
        )

    @parameterized.parameters("final", "all")
    def test_nothing_above_the_claim(self, iterates):
        self._audit(iterates)

    def test_what_is_not_audited_is_said(self):
        started = time.time()
        for name, flags in _REFUSED.items():
            with tempfile.TemporaryDirectory() as folder:
                code, said = _run([*flags, "--verbose=0"], folder)
            self.assertEqual(code, 1, name)
            self.assertIn("audit must be None unless", said)
        counts.held(
            "What cannot be audited is refused, with the reason",
            len(_REFUSED),
            "refusals",
            time.time() - started,
        )


if __name__ == "__main__":
    absltest.main()
