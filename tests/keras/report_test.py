"""Tests of the page of a run."""

import html.parser
import pathlib
import tempfile
from unittest import mock

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
        facts = fed.privacy_statement(1e-2, "dict")
        parts = [facts[name] for name in ("summary", "meaning", "secrecy", "how")]
        for part in (*parts, *facts["caveats"].values()):
            self.assertIn(" ".join(part.split()), text)
        self.assertIn("<td>SGD</td>", self.path.read_text("utf-8"))
        self.assertIn("batch_size", text)
        self.assertNotIn("broken off", text)
        drawn = self.path.read_text("utf-8").count("<svg")
        self.assertGreaterEqual(drawn, 4)

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

        fed = toy.federated()
        settings = {"optimizer": "<script>alert(1)</script>"}
        with mock.patch.object(report.resuming, "settings", lambda *_: settings):
            made = callbacks.Report(self.path, 1e-2)
            fed.fit(toy.clients(), verbose=0, callbacks=[made])
        page = self.path.read_text("utf-8")
        self.assertNotIn("<script>", page)
        self.assertIn("&lt;script&gt;", page)

    def test_where_it_is_to_be(self):
        with self.assertRaisesRegex(ValueError, "path must name a file"):
            callbacks.Report(self.path.parent.parent)

    def test_without_matplotlib_it_says_how_to_get_charts(self):
        fed = toy.federated()
        with mock.patch.dict("sys.modules", {"matplotlib": None}):
            fed.fit(
                toy.clients(), verbose=0, callbacks=[callbacks.Report(self.path, 1e-2)]
            )
        text = self.path.read_text("utf-8")
        self.assertIn('pip install "tfdp_fl[plots]"', text)
        self.assertNotIn("<svg", text)

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
