"""What docs/architecture.md tells of the code is so."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
import threading

from absl.testing import absltest

import tfdp_fl
from tests.keras import toy
from tfdp_fl.keras import round_loop

_PAGE = pathlib.Path(__file__).parents[1] / "docs" / "architecture.md"
_ROOT = pathlib.Path(tfdp_fl.__file__).parent
_ROOMS = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| [^|]+ \|$", re.MULTILINE)
_ROW = re.compile(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", re.MULTILINE)


def _first_calls(function) -> list[tuple[str, str]]:
    """Returns what of the package is called, in the order of first calls."""
    seen: dict[tuple[str, str], None] = {}

    def note(frame, event, argument):
        del argument
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(_ROOT):
            name = path.relative_to(_ROOT).as_posix()
            seen.setdefault((name, frame.f_code.co_name))

    threading.setprofile(note)  # The engine's threads, which start later.
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(seen)


def _rooms_known_in(room: str) -> set[str]:
    """Returns which rooms of the package the files of one import."""
    known = set()
    for path in (_ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                package, _, inner = node.module.partition(".")
                if package == "tfdp_fl":
                    names = [inner] if inner else [n.name for n in node.names]
                    known |= {name.partition(".")[0] for name in names}
    return known


class ArchitectureTest(absltest.TestCase):
    def test_a_room_knows_none_above_it(self):
        rows = _ROOMS.findall(_PAGE.read_text(encoding="utf-8"))
        order = re.findall(r"\w+", " ".join(rows))
        folders = {each.parent.name for each in _ROOT.glob("*/__init__.py")}
        self.assertCountEqual(order, folders)
        for place, room in enumerate(order):
            above = _rooms_known_in(room) & set(order[:place])
            self.assertEmpty(above, f"{room} knows what is above it")

    def test_the_walk_of_an_update_is_as_the_page_says(self):
        told = _ROW.findall(_PAGE.read_text(encoding="utf-8"))
        self.assertLen(told, 20)
        fed = toy.federated(clients_per_round=4)
        found: list[tuple[str, str]] = []
        whole = round_loop.RoundLoop._round

        def followed(self, *arguments):
            result = []
            found.extend(_first_calls(lambda: result.append(whole(self, *arguments))))
            return result[0]

        with absltest.mock.patch.object(round_loop.RoundLoop, "_round", followed):
            fed.fit(toy.clients(8, 4), rounds=1, batch_size=4, verbose=0)
        self.assertEqual([each for each in found if each in told], told)


if __name__ == "__main__":
    absltest.main()
