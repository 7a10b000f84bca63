"""The page of a run has everything, and loads nothing."""

import html
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest

import tfdp_fl
from tests.keras import toy
from tfdp_fl import callbacks
from tfdp_fl.keras.callbacks import report


class ReportTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.path = pathlib.Path(folder, "new", "report.html")

    def _written(self, fed, **options):
        made = callbacks.Report(self.path, delta=1e-2)
        extra = options.pop("callbacks", [])
        fed.fit(toy.clients(), verbose=0, callbacks=[made, *extra], **options)
        return self.path.read_text("utf-8")

    def test_one_file_with_everything(self):
        fed = toy.federated(delta=1e-2, compile_options={"metrics": ["accuracy"]})
        page = self._written(fed, rounds=3, validation_data=toy.arrays(20))
        self.assertNotRegex(page, r"(src|href)=.(?!#)")
        text = " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())
        facts = fed.privacy_statement(1e-2, "dict")
        parts = [facts[name] for name in ("summary", "meaning", "secrecy", "how")]
        for part in (*parts, *facts["caveats"].values()):
            self.assertIn(" ".join(part.split()), text)
        self.assertIn("<td>SGD</td>", page)
        self.assertNotIn("broken off", text)
        self.assertGreaterEqual(page.count("<svg"), 4)
        shown = float(re.search(r"<b>([0-9.]+)</b>epsilon", page)[1])
        self.assertBetween(shown, facts["epsilon"], facts["epsilon"] + 0.001)

    def test_after_an_interruption(self):
        class Stop(callbacks.FederatedCallback):
            def on_round_released(self, round_index, logs):
                raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            self._written(toy.federated(), callbacks=[Stop()])
        self.assertIn("broken off", self.path.read_text("utf-8"))

    def test_names_are_text_and_charts_need_matplotlib(self):
        settings = {"optimizer": "<script>alert(1)</script>"}
        with (
            mock.patch.object(report.resuming, "settings", lambda *_: settings),
            mock.patch.dict("sys.modules", {"matplotlib": None}),
        ):
            page = self._written(toy.federated(tfdp_fl.NoPrivacy()))
        self.assertNotIn("<script>", page)
        self.assertIn("&lt;script&gt;", page)
        self.assertIn('pip install "tfdp_fl[plots]"', page)
        self.assertNotIn("<svg", page)
        self.assertIn("<b>none</b>", page)

    def test_where_it_is_to_be(self):
        with self.assertRaisesRegex(ValueError, "path must name a file"):
            callbacks.Report(self.path.parent.parent)
