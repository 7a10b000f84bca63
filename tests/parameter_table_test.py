"""docs/mechanisms.md has every parameter as it is declared."""

from __future__ import annotations

from absl.testing import absltest

from tools import update_parameter_table


class ParameterTableTest(absltest.TestCase):
    def test_the_page_is_up_to_date(self):
        page = update_parameter_table.PAGE.read_text("utf-8")
        self.assertEqual(
            page,
            update_parameter_table.updated(page),
            "run: python tools/update_parameter_table.py --write",
        )
        self.assertIn("| `FixedClipping` | `fixed` | `clip_norm` |", page)


if __name__ == "__main__":
    absltest.main()
