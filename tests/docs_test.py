"""Every code block of README and docs runs, page by page, on the stack it names.

A block of Python runs on every stack, unless the line above it says otherwise:

    <!-- stack: tff -->     it needs TensorFlow Federated
    <!-- shown: why -->     it does not run here; it is only compiled

`<!-- setup ... -->` holds code that runs and is not shown. Links are checked by
`mkdocs build --strict`.
"""

import contextlib
import importlib.util
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator

import pytest

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
    """Runs a page's blocks in the current folder; returns what they print."""
    namespace: dict[str, object] = {}
    # A real file: TFF asks for its number.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        with contextlib.redirect_stdout(out):
            for code in _code(page) if blocks is None else blocks:
                exec(compile(code, page, "exec"), namespace)
        out.seek(0)
        return out.read()


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch, wide_cells):
    monkeypatch.chdir(tmp_path)


_OTHERS = {*_PAGES} - {"README", "data", "auditing"}


@pytest.mark.parametrize("page", sorted(p for p in _OTHERS if any(_code(p))))
def test_blocks_run(page):
    # README's run is as long as the front page's.
    _run(page, (code.replace("rounds=60", "rounds=2") for code in _code(page)))


@pytest.mark.filterwarnings("error::UserWarning")
def test_readme_keeps_its_target_without_a_warning():
    out = _run("README")
    found = re.search(r"accuracy (0\.\d+), epsilon (\d+\.\d+)", out)
    assert float(found[1]) > 0.84  # 0.90 to 0.93; chance is 0.1.
    assert 1.9 <= float(found[2]) <= 2.0
    # What stands below the code is what it prints, but for numbers, which are coarse
    # here.
    (shown,) = re.findall(r"```\n(accuracy .*?)\n\[", _PAGES["README"], re.DOTALL)
    shown, printed = (re.sub(r"\d+(\.\d+)?", "1", text) for text in (shown, out))
    assert " ".join(shown.split()) in " ".join(printed.split())


def test_own_data_learns():
    accuracy, epsilon, mean = map(float, re.findall(r"\d\.\d+", _run("data")))
    assert accuracy > 0.45  # Chance is 1/3; 0.78 to 0.92.
    assert abs(mean - accuracy) < 0.3  # The noise on it is 0.03.
    assert 1.7 <= epsilon <= 2.0


def test_audit_finds_no_more_than_is_claimed():
    claimed, _, low = map(float, re.findall(r"\d+\.\d+", _run("auditing")))
    # By chance it would be above this once in a million runs or less.
    assert low < 1.3 * claimed


_EXAMPLES = docs_site.examples()


@pytest.mark.parametrize("name", sorted(_EXAMPLES.keys() - {"before", "runtimes"}))
def test_examples_of_the_reference_run(name):
    # (Ray's has tests of its own, and takes long to begin.)
    if "(tff)" in name and not _HAS_TFF:
        pytest.skip("TFF is not installed")
    assert len(_EXAMPLES[name].strip().split("\n")) <= 15
    _run(name, (_EXAMPLES["before"], _EXAMPLES[name]))


@pytest.mark.parametrize("page", _PAGES)
def test_commands_name_files_and_flags_that_are_there(page):
    commands = re.findall(
        r"\b((?:scripts|research|tools|tests|colab)/[\w./]+\.\w+)"
        r"((?: .*\\\n)*[^`\n]*)",
        _PAGES[page],
    )
    flags = {*Settings.__dataclass_fields__, "output_dir", "overwrite", "resume"}
    for file, arguments in commands:
        assert (_ROOT / file).exists(), file
        if file == "scripts/train.py":
            given = {*re.findall(r"--(\w+)", arguments)}
            assert not given - flags - {"help", "mechanism_module"}


def test_every_page_and_every_name_of_the_top_level_can_be_found():
    settings = (_ROOT / "mkdocs.yml").read_text("utf-8")
    listed = re.findall(r": ([\w/]+)\.md", settings)
    assert sorted(listed) == sorted(_PAGES.keys() - {"README"})
    pages = "".join(docs_site.reference_page(page) for page in docs_site.PAGES)
    for name, where in docs_site.public_names("tfdp_fl"):
        assert re.search(rf"::: {where}[.\n]", pages), name


def test_no_argument_is_explained_by_a_letter_alone():
    found = [
        f"{path.relative_to(_ROOT)}: {line.strip()}"
        for path in sorted((_ROOT / "tfdp_fl").rglob("*.py"))
        for line in re.findall(r"(?m)^ +\w+: \S{1,3}\.$", path.read_text("utf-8"))
    ]
    assert found == []
