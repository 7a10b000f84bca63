"""Keeps docs/mechanisms.md's table of parameters as the mechanisms declare it.

python tools/update_parameter_table.py            # says whether it is right
python tools/update_parameter_table.py --write    # makes it so
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from tfdp_fl import mechanisms
from tfdp_fl.mechanisms import parameters

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "mechanisms.md"
_BEGIN = "<!-- parameters, by tools/update_parameter_table.py -->\n"
_END = "<!-- end of parameters -->\n"


def table() -> str:
    """Returns a row for each parameter of each registered mechanism."""
    lines = [
        "| `tfdp_fl.` | `--mechanism=` | parameter | default | what it is |",
        "|---|---|---|---|---|",
    ]
    for name in mechanisms.names():
        kind = mechanisms.by_name(name)
        if kind.__module__.split(".")[0] != "tfdp_fl":
            continue
        for field in dataclasses.fields(kind):
            missing = field.default is dataclasses.MISSING
            default = "–" if missing else f"`{field.default!r}`"
            start = parameters.start_of(field)
            if start is not None:
                default += f" (train.py: {start})"
            lines.append(
                f"| `{kind.__name__}` | `{name}` | `{field.name}` | {default} "
                f"| {parameters.help_of(field)} |"
            )
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """Returns a page with the table between its two marks."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return before + _BEGIN + table() + _END + after


def main() -> None:
    """Checks or writes the page."""
    page = PAGE.read_text("utf-8")
    right = updated(page)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(right, "utf-8")
    elif page != right:
        sys.exit(
            "docs/mechanisms.md does not have the parameters as they are "
            "declared; run: python tools/update_parameter_table.py --write"
        )


if __name__ == "__main__":
    main()
