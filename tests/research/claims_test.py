"""What the pages say is what the commands of research/ printed."""

from __future__ import annotations

import json
import pathlib
import re

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


class ClaimsTest(absltest.TestCase):
    def test_pages_say_what_was_measured(self):
        claims = json.loads((_ROOT / "research" / "claims.json").read_text("utf-8"))
        for claim in claims:
            with self.subTest(page=claim["page"], text=claim["text"]):
                page = (_ROOT / claim["page"]).read_text("utf-8")
                self.assertIn(claim["text"], page)
                shown = re.search(r"\d+(\.(\d+))?", claim["text"])
                value = f"{claim['value']:.{len(shown[2] or '')}f}"
                self.assertEqual(shown[0], value)
                program = claim["command"].split()[1]
                self.assertTrue((_ROOT / program).is_file())
