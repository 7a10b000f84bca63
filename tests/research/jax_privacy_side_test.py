"""What is compared with jax-privacy, against a stand-in of known faults."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from research import jax_privacy_side
from tests.correlated_noise import references


def _stand_in(sensitivity=1.0, error=1.0, coefficients=1.0):
    """Returns modules like jax-privacy's, by dense matrices, with faults."""

    def minsep_sensitivity_squared(c, min_sep, max_participations, n, **_):
        dense = references.dense(c, n)
        visits = np.zeros(n)
        visits[: max_participations * min_sep : min_sep] = 1
        return sensitivity**2 * np.sum((dense @ visits) ** 2)

    def per_query_error(strategy_coef, n):
        b = np.tril(np.ones([n, n])) @ np.linalg.inv(references.dense(strategy_coef, n))
        return error * np.sum(b**2, axis=1)

    class BufferedToeplitz:
        @classmethod
        def build(cls, buf_decay, output_scale):
            made = cls()
            made.decay, made.scale = buf_decay, output_scale
            return made

        def toeplitz_coefs(self, n):
            powers = self.decay ** np.arange(n - 1)[:, None]
            tail = coefficients * (powers @ self.scale)
            return np.concatenate([[1.0], tail])

    toeplitz = types.SimpleNamespace(
        minsep_sensitivity_squared=minsep_sensitivity_squared,
        per_query_error=per_query_error,
    )
    blt = types.SimpleNamespace(BufferedToeplitz=BufferedToeplitz)
    package = types.ModuleType("jax_privacy")
    rooms = types.ModuleType("jax_privacy.matrix_factorization")
    rooms.toeplitz, rooms.buffered_toeplitz = toeplitz, blt
    jax = types.ModuleType("jax")
    jax.config = mock.Mock()
    return {
        "jax": jax,
        "jax_privacy": package,
        "jax_privacy.matrix_factorization": rooms,
    }


def _main(modules):
    with (
        mock.patch.dict(sys.modules, modules),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        code = jax_privacy_side.main(["--largest=16", "--optima=0"])
    return code, out.getvalue()


class SideTest(parameterized.TestCase):
    def test_the_same_numbers_are_found_the_same(self):
        code, text = _main(_stand_in())
        self.assertEqual(code, 0)
        # Two headers, two runs with a band and two numbers of buffers.
        self.assertLen([line for line in text.splitlines() if line.startswith("|")], 8)

    @parameterized.parameters("sensitivity", "error", "coefficients")
    def test_another_number_is_noticed(self, name):
        code, _ = _main(_stand_in(**{name: 1 + 1e-6}))
        self.assertEqual(code, 1)

    def test_without_jax_privacy_it_says_what_to_run(self):
        code, text = _main({"jax": None, "jax_privacy": None})
        self.assertEqual(code, 2)
        self.assertIn("make jax-privacy", text)


if __name__ == "__main__":
    absltest.main()
