"""Every code block of README and docs runs, page by page, on the stack it names.

A block of Python runs on every stack, unless the line above it says otherwise:

    <!-- stack: tff -->     it needs TensorFlow Federated
    <!-- shown: why -->     it does not run here; it is only compiled

`<!-- setup ... -->` holds code that runs and is not shown. Links are checked by
`mkdocs build --strict`.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator

from absl.testing import parameterized

from tfdp_fl.experiments import Settings
from tools import docs_site

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGES = {
    page.stem: page.read_text("utf-8")
    for page in (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
}
_BLOCK = re.compile(
    r"(?:<!-- (stack|shown): ([^\n]*) -->\n)?```python\n(.*?)```"
    r"|<!-- setup\n(.*?)-->",
    re.DOTALL,
)
_HAS_TFF = importlib.util.find_spec("tensorflow_federated") is not None


def _code(page: str) -> Iterator[str]:
    """Yields what runs here; compiles the rest."""
    for kind, what, block, setup in _BLOCK.findall(_PAGES[page]):
        code = block or setup
        compile(code, page, "exec")
        if kind != "shown" and (kind != "stack" or what != "tff" or _HAS_TFF):
            yield code


def _run(page: str, blocks: Iterable[str] | None = None) -> str:
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
                for code in _code(page) if blocks is None else blocks:
                    exec(compile(code, page, "exec"), namespace)
        finally:
            os.chdir(before)
        out.seek(0)
        return out.read()


class DocsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (page, page)
        for page in _PAGES
        if page not in ("README", "data", "auditing") and any(_code(page))
    )
    def test_blocks_run(self, page):
        # README's run is as long as the front page's.
        _run(page, (code.replace("rounds=60", "rounds=2") for code in _code(page)))

    def test_readme_keeps_its_target_without_a_warning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            out = _run("README")
        found = re.search(r"accuracy (0\.\d+), epsilon (\d+\.\d+)", out)
        self.assertGreater(float(found[1]), 0.84)  # 0.90 to 0.93; chance is 0.1.
        self.assertBetween(float(found[2]), 1.9, 2.0)
        self.assertIn("differentially private", out)

    def test_own_data_learns(self):
        accuracy, epsilon, mean = map(float, re.findall(r"\d\.\d+", _run("data")))
        self.assertGreater(accuracy, 0.45)  # Chance is 1/3; 0.78 to 0.92.
        # The noise on it is 0.03.
        self.assertAlmostEqual(mean, accuracy, delta=0.3)
        self.assertBetween(epsilon, 1.7, 2.0)

    def test_audit_finds_no_more_than_is_claimed(self):
        claimed, _, low = map(float, re.findall(r"\d+\.\d+", _run("auditing")))
        # By chance it would be above this once in a million runs or less.
        self.assertLess(low, 1.3 * claimed)

    @parameterized.named_parameters(
        (name, name)
        for name in docs_site.examples()
        # Ray's has tests of its own, and takes long to begin.
        if name not in ("before", "runtimes") and (_HAS_TFF or "(tff)" not in name)
    )
    def test_examples_of_the_reference_run(self, name):
        examples = docs_site.examples()
        self.assertLessEqual(len(examples[name].strip().split("\n")), 15)
        _run(name, (examples["before"], examples[name]))

    @parameterized.named_parameters((page, page) for page in _PAGES)
    def test_commands_name_files_and_flags_that_are_there(self, page):
        commands = re.findall(
            r"\b((?:scripts|research|tools|tests|colab)/[\w./]+\.\w+)"
            r"((?: .*\\\n)*[^`\n]*)",
            _PAGES[page],
        )
        flags = {*Settings.__dataclass_fields__, "output_dir", "overwrite", "resume"}
        for file, arguments in commands:
            self.assertTrue((_ROOT / file).exists(), file)
            if file == "scripts/train.py":
                given = {*re.findall(r"--(\w+)", arguments)}
                self.assertEqual(given - flags - {"help", "mechanism_module"}, set())

    def test_every_page_and_every_name_of_the_top_level_can_be_found(self):
        settings = (_ROOT / "mkdocs.yml").read_text("utf-8")
        listed = re.findall(r": ([\w/]+)\.md", settings)
        self.assertCountEqual(listed, {*_PAGES} - {"README"})
        pages = "".join(docs_site.reference_page(page) for page in docs_site.PAGES)
        for name, where in docs_site.public_names("tfdp_fl"):
            self.assertRegex(pages, rf"::: {where}[.\n]", name)
