"""Every Python block of the documentation runs, page by page, in its order."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import re
import tempfile

from absl.testing import absltest, parameterized

from tools import docs_site

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGES = {page.stem: page for page in sorted((_ROOT / "docs").glob("*.md"))}
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

_HAS_TFF = importlib.util.find_spec("tensorflow_federated") is not None

# What a page takes for granted, and says in words.
_TRAINED = """
import tensorflow as tf
import tfdp_fl

clients, test = tfdp_fl.datasets.load_digits(num_clients=60)
layers = tf.keras.layers
model = tf.keras.Sequential([layers.Input((64,)), layers.Dense(10)])
fed = tfdp_fl.DPFederatedModel(
    model,
    tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0),
    clients_per_round=12,
)
fed.compile(
    tf.keras.optimizers.SGD(0.1),
    tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
"""
_BEFORE = {
    "mechanisms": _TRAINED,
    "resuming": _TRAINED,
    "accounting": """
import dp_accounting
from tfdp_fl.sampling import PoissonSampler

z, N, m, n, delta = 1.0, 1000, 100, 100, 1e-5
round_index, cohort_size = 0, 93
sampler, event = PoissonSampler(N, m), dp_accounting.GaussianDpEvent(z)
""",
}
# Written for a reader, and shortened for a test.
_SHORTER = {
    "resuming": [(r"rounds=100", "rounds=2")],
}
# A page's blocks that do not run here, by their beginning, and why.
_NOT_RUN = {
    "accounting": {"rdp = tfp.compute": "TF-Privacy 0.9 has neither function"},
    "adding_a_mechanism": {
        '"""A mechanism of': "tests/outside runs the file that it shows"
    },
    "distributed": {
        "from tfdp_fl.runtimes import RayWorkers": "tests/runtimes",
        "tfdp_fl.runtimes.export": "needs other machines",
    },
    "flower": {
        "# client_app.py": "tests/flower, by the app there",
        "from tfdp_fl import flower": "tests/flower",
        "saved = json": "tests/flower",
    },
    "secure_aggregation": {
        "from tfdp_fl import secure_aggregation\n\nprotocol": "needs a network",
        "from tfdp_fl.secure_aggregation import Fault": "the line before it",
    },
}
_NEEDS_TFF = {"tff"}


def _run(page: str) -> str:
    """Runs a page's blocks in a new folder; returns what they print."""
    namespace: dict[str, object] = {}
    before = os.getcwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        # A real file: TFF asks for its number.
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
    ):
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out):
                exec(_BEFORE.get(page, ""), namespace)
                for code in _blocks(page):
                    if _reason(page, code) is None:
                        for pattern, shorter in _SHORTER.get(page, ()):
                            code = re.sub(pattern, shorter, code)
                        exec(compile(code, page, "exec"), namespace)
        finally:
            os.chdir(before)
        out.seek(0)
        return out.read()


def _blocks(page: str) -> list[str]:
    return _BLOCK.findall(_PAGES[page].read_text("utf-8"))


def _reason(page: str, code: str) -> str | None:
    for beginning, reason in _NOT_RUN.get(page, {}).items():
        if code.startswith(beginning):
            return reason
    return None


class DocsTest(parameterized.TestCase):
    @parameterized.parameters(
        *(page for page in _PAGES if page not in ("auditing", "data", "index"))
    )
    def test_blocks_run(self, page):
        blocks = _blocks(page)
        if not any(_reason(page, code) is None for code in blocks):
            self.skipTest("no block that runs here")
        if page in _NEEDS_TFF and not _HAS_TFF:
            self.skipTest("tensorflow_federated is not installed")
        _run(page)

    @parameterized.parameters(
        (page, start) for page, starts in _NOT_RUN.items() for start in starts
    )
    def test_exceptions_are_of_blocks_that_are_there(self, page, start):
        found = [code for code in _blocks(page) if code.startswith(start)]
        self.assertLen(found, 1)
        compile(found[0], page, "exec")

    def test_start_trains(self):
        accuracy, epsilon = re.findall(
            r"^(?:accuracy|epsilon)\s+(\d\.\d+)", _run("index"), re.MULTILINE
        )
        self.assertGreater(float(accuracy), 0.8)  # 0.90 to 0.93; chance is 0.1.
        self.assertLessEqual(float(epsilon), 2.0)

    def test_own_data_learns(self):
        accuracy, epsilon, mean, low = map(float, _run("data").split())
        self.assertGreater(accuracy, 0.45)  # Chance is 1/3; 0.78 to 0.92.
        # The noise on it is 0.03.
        self.assertAlmostEqual(mean, accuracy, delta=0.3)
        self.assertBetween(low, 0.0, 1.0)
        self.assertBetween(epsilon, 1.9, 2.0)

    def test_audit_finds_no_more_than_is_claimed(self):
        claimed, _, low = map(float, re.findall(r"\d+\.\d+", _run("auditing")))
        # By chance it would be above this once in a million runs or less.
        self.assertLess(low, 1.3 * claimed)

    def test_reading_epsilon_says_what_its_code_prints(self):
        page = _PAGES["reading_epsilon"].read_text("utf-8")
        table = {
            name: (rdp, pld)
            for name, rdp, pld in re.findall(
                r"^\| ([\w ]+) \| a client .*? \| ([\d.]+) \| ([\d.]+) \|",
                page,
                re.MULTILINE,
            )
        }
        printed = {
            (name, by): value
            for name, by, value in re.findall(
                r"^(\w+) (rdp|pld) ([\d.]+)$", _run("reading_epsilon"), re.M
            )
        }
        self.assertLen(printed, 6)
        for name, (rdp, pld) in table.items():
            key = name.lower().replace(" ", "_")
            self.assertEqual(float(printed[key, "rdp"]), float(rdp))
            self.assertEqual(float(printed[key, "pld"]), float(pld))


class SiteTest(absltest.TestCase):
    def test_every_page_is_in_the_navigation(self):
        settings = (_ROOT / "mkdocs.yml").read_text("utf-8")
        listed = re.findall(r": ([\w/]+)\.md", settings)
        self.assertCountEqual(listed, _PAGES)

    def test_reference_has_what_rooms_hand_on(self):
        page = docs_site.reference_page("tfdp_fl")
        for name in (
            "tfdp_fl.keras.model.DPFederatedModel",
            "tfdp_fl.keras.make_private.make_private",
            "tfdp_fl.mechanisms.adaptive_clipping.AdaptiveClipping",
        ):
            self.assertIn(f"::: {name}\n", page)

    def test_links_lead_to_pages(self):
        for page in _PAGES.values():
            for link in re.findall(r"\]\(([^)#:\s]+)", page.read_text("utf-8")):
                if not link.startswith(("reference/", "http")):
                    with self.subTest(f"{page.name}: {link}"):
                        self.assertTrue((page.parent / link).exists())


if __name__ == "__main__":
    absltest.main()
