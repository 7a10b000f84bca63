"""Tests of the page of a run."""

import collections
import html.parser
import pathlib
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest

import tfdp_fl
from tests.keras import toy
from tfdp_fl import callbacks


class _Reader(html.parser.HTMLParser):
    """Checks that tags nest, and keeps texts and what is loaded."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.loaded = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "hr", "img", "link"):
            self.open.append(tag)
        self.loaded += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href")
            and not (value or "").startswith("#")
        ]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.texts.append(data)


def _read(path):
    reader = _Reader()
    reader.feed(pathlib.Path(path).read_text("utf-8"))
    return reader


def _events(log_dir):
    """Returns `(round, value)`s by tag, and the texts, of a folder's files."""
    scalars, texts = collections.defaultdict(list), []
    for path in sorted(log_dir.glob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for each in event.summary.value:
                value = tf.make_ndarray(each.tensor)
                if value.dtype.kind == "f":
                    scalars[each.tag].append((event.step, float(value)))
                else:
                    texts += [text.decode() for text in value.ravel()]
    return scalars, texts


class ReportTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name, "new", "report.html")

    def test_one_file_with_everything(self):
        fed = toy.federated()
        fed.fit(
            toy.clients(),
            rounds=3,
            verbose=0,
            validation_data=toy.arrays(20),
            callbacks=[callbacks.Report(self.path, delta=1e-2)],
        )
        reader = _read(self.path)
        self.assertEqual((reader.open, reader.loaded), ([], []))
        text = " ".join(" ".join(reader.texts).split())
        for paragraph in fed.privacy_statement(1e-2).split("\n\n"):
            self.assertIn(" ".join(paragraph.split()), text)
        self.assertIn("batch_size", text)
        self.assertNotIn("broken off", text)
        drawn = self.path.read_text("utf-8").count("<svg")
        self.assertGreaterEqual(drawn, 4)

    def test_tensorboard_has_what_the_charts_show(self):
        log_dir = self.path.parent / "logs"
        fed = toy.federated(delta=1e-2)
        report = callbacks.Report(self.path, log_dir=log_dir)
        self.assertFalse(log_dir.exists())
        history = fed.fit(
            toy.clients(), rounds=3, verbose=0, callbacks=[report]
        ).history
        scalars, texts = _events(log_dir)
        for title, name in (
            ("Loss", "loss"),
            ("Epsilon spent", "epsilon"),
            ("Clip and norms", "mean_update_norm"),
            ("Cohorts", "cohort_size"),
        ):
            rounds, values = zip(*scalars[f"{title}/{name}"], strict=True)
            self.assertEqual(rounds, (1, 2, 3))
            np.testing.assert_allclose(values, history[name], rtol=1e-6)
        self.assertEqual(texts, [fed.privacy_statement(1e-2)])
        # A second training goes on.
        fed.fit(toy.clients(), verbose=0, callbacks=[report])
        self.assertEqual(_events(log_dir)[0]["Loss/loss"][-1][0], 4)

    def test_where_tensorboard_looks(self):
        file = pathlib.Path(__file__)
        with self.assertRaisesRegex(ValueError, "log_dir must name a folder"):
            callbacks.Report(self.path, log_dir=file)
        with (
            mock.patch.dict("sys.modules", {"tensorboard": None}),
            self.assertRaisesRegex(ImportError, "TensorBoard needs tensorboar"),
        ):
            callbacks.Report(self.path, log_dir="logs")

    def test_what_is_epsilon_is_rounded_up(self):
        from tfdp_fl.keras.callbacks import report

        self.assertEqual(report._rounded_up(2.0001), "2.01")
        self.assertEqual(report._rounded_up(1.999), "2")
        self.assertEqual(report._rounded_up(0.01234), "0.0124")

    def test_after_an_interruption(self):
        fed = toy.federated()

        class Stop(callbacks.FederatedCallback):
            def on_round_released(self, round_index, logs):
                if round_index == 1:
                    raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            fed.fit(
                toy.clients(),
                rounds=5,
                verbose=0,
                callbacks=[callbacks.Report(self.path, 1e-2), Stop()],
            )
        self.assertIn("broken off", self.path.read_text("utf-8"))

    def test_names_are_text(self):
        from tfdp_fl.keras.callbacks import report

        self.assertEqual(report._text("<b>&"), "&lt;b&gt;&amp;")
        fed = toy.federated()
        made = callbacks.Report(self.path, 1e-2)
        fed.fit(toy.clients(), verbose=0, callbacks=[made])
        settings = {"optimizer": "<script>alert(1)</script>"}
        with mock.patch.object(report.resuming, "settings", lambda *_: settings):
            page = made.page()
        self.assertNotIn("<script>", page)
        self.assertIn("&lt;script&gt;", page)

    def test_where_it_is_to_be(self):
        with self.assertRaisesRegex(ValueError, "path must name a file"):
            callbacks.Report(self.path.parent.parent)
        with (
            mock.patch.dict("sys.modules", {"matplotlib": None}),
            self.assertRaisesRegex(ImportError, "A report needs matplotlib"),
        ):
            callbacks.Report(self.path)

    def test_without_privacy(self):
        fed = tfdp_fl.DPFederatedModel(
            toy.dense(), tfdp_fl.NoPrivacy(), 5, "fixed_size"
        )
        fed.compile("sgd", toy.loss())
        report = callbacks.Report(self.path, 1e-2)
        fed.fit(toy.clients(), verbose=0, callbacks=[report])
        self.assertIn("<b>none</b>", self.path.read_text("utf-8"))


if __name__ == "__main__":
    absltest.main()
