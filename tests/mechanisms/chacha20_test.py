from __future__ import annotations

import importlib.util
import os
import unittest

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tfdp_fl.mechanisms import chacha20


def _words(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<u4").astype(np.uint32)


def _bytes(blocks) -> bytes:
    return blocks.numpy().T.astype("<u4").tobytes()


class KeyStreamTest(parameterized.TestCase):
    def _rfc_block(self):
        nonce = _words(bytes.fromhex("000000090000004a00000000")).tolist()
        key = tf.constant(_words(bytes(range(32))))
        return chacha20.key_stream(key, nonce, 1, first=1)

    @parameterized.parameters(None, False, True)
    def test_is_that_of_the_rfc(self, xla):
        # RFC 8439, section 2.3.2.
        block = self._rfc_block
        if xla is not None:
            block = tf.function(block, jit_compile=xla)
        self.assertEqual(
            _bytes(block()).hex(),
            "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
            "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
        )

    @unittest.skipIf(
        importlib.util.find_spec("cryptography") is None,
        "cryptography is not installed.",
    )
    @parameterized.parameters((1000, 0), (7, 5), (3, 2**32 - 3), (0, 0))
    def test_is_that_of_the_package_cryptography(self, count, first):
        from cryptography.hazmat.primitives import ciphers

        key, nonce = os.urandom(32), os.urandom(12)
        algorithm = ciphers.algorithms.ChaCha20(
            key, first.to_bytes(4, "little") + nonce
        )
        expected = ciphers.Cipher(algorithm, None).encryptor()
        stream = chacha20.key_stream(
            tf.constant(_words(key)), _words(nonce).tolist(), count, first
        )
        self.assertEqual(stream.shape, (16, count))
        self.assertEqual(_bytes(stream), expected.update(bytes(64 * count)))

    def test_of_a_count_that_is_known_only_when_it_runs(self):
        key = tf.constant(_words(os.urandom(32)))

        @tf.function
        def stream(count):
            return chacha20.key_stream(key, (1, 2, 3), count)

        self.assertEqual(
            _bytes(stream(tf.constant(9))),
            _bytes(chacha20.key_stream(key, (1, 2, 3), 9)),
        )


if __name__ == "__main__":
    absltest.main()
