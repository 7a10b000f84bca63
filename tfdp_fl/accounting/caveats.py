"""What an epsilon does not cover: the sentences that statements end with."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

# Full sentences that stand by themselves, by their keys.
_TEXT = pathlib.Path(__file__).with_name("caveats.txt").read_text("utf-8")

CAVEATS: dict[str, str] = {
    key: " ".join(sentence.split())
    for key, sentence in re.findall(r"^(\w+): (.*(?:\n .*)*)", _TEXT, re.MULTILINE)
}


def add_caveats(sentences: Mapping[str, str]) -> None:
    """Adds what a mechanism declares to `CAVEATS`.

    Args:
      sentences: Full sentences by key.

    Raises:
      ValueError: A key has another sentence already.
    """
    for key, sentence in sentences.items():
        if CAVEATS.setdefault(key, sentence) != sentence:
            raise ValueError(
                f"own_caveats must have new keys, got {key!r}, which stands "
                f"for: {CAVEATS[key]}"
            )
