"""Shakespeare's plays: every speaking role a client, who writes characters."""

from __future__ import annotations

import os
import re

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.datasets.federated_dataset import FederatedDataset

# All characters of the corpus, written down here because a vocabulary that is
# read off the clients' own text would tell what they wrote.
_CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PADDING = 0
_UNKNOWN = 1
_VOCABULARY = ("<pad>", "<unknown>", *_CHARACTERS)
_ID_OF = {
    character: number
    for number, character in enumerate(_VOCABULARY)
    if number > _UNKNOWN
}


def shakespeare_vocabulary() -> tuple[str, ...]:
    """Returns the 67 tokens of `load_shakespeare`; a token's place is its id.

    Id 0 is padding, id 1 stands for every other character, and from 2 come
    the 65 characters of the small Shakespeare corpus: the newline, the space,
    `!$&',-.3:;?`, capital and small letters.
    """
    return _VOCABULARY


def load_shakespeare(
    path: str | os.PathLike[str],
    sequence_length: int = 80,
    clients_per_role: int = 1,
) -> tuple[FederatedDataset, tuple[np.ndarray, np.ndarray]]:
    r"""Loads plays for next-character prediction, a client per speaking role.

    The file has the format of the small Shakespeare corpus: a role's name and
    a colon on a line, its speech on the next ones, an empty line. A client is
    a role, its id the role's name as written, its text all its speeches in
    order, joined by newlines. A role that says nothing anywhere is no client
    (299 speak in the corpus).

    An example is `sequence_length` characters and, for each of them, the one
    that follows; examples of a role do not overlap. What is left at the end of
    a text, or all of a short role's, is padded with 0 in features and labels
    alike. Padding must not count. `Embedding(..., mask_zero=True)` keeps it out
    of the loss and the metrics, `SparseCategoricalCrossentropy(ignore_class=0)`
    out of the loss only.

    Args:
      path: The text, in UTF-8.
      sequence_length: Characters per example, L.
      clients_per_role: How many clients a role is at most, each with the same
        share of its examples, one after another. What is protected is then no
        role any more, but such a part of one. A client's id is the role's
        with "/1", "/2", ... after it; a role of fewer examples is fewer.

    Returns:
      The clients, and `(x_test, y_test)`, the last tenth of each role's text: x
      and y int32[n, L], ids in `shakespeare_vocabulary()`.

    Raises:
      TypeError, ValueError: If an argument is out of its range, or the file
        is of another format.
      OSError: If the file is not there.
    """
    path = os.fspath(path)  # A number would be a file that is open already.
    length = _validate.positive_integer(sequence_length=sequence_length)
    _validate.positive_integer(clients_per_role=clients_per_role)
    clients, test = {}, []
    for role, text in _speeches(path).items():
        ids = np.array([_ID_OF.get(each, _UNKNOWN) for each in text], np.int32)
        end = len(ids) - len(ids) // 10
        x, y = _examples(ids[:end], length)
        parts = min(clients_per_role, max(1, len(x)))
        for part, kept in enumerate(np.array_split(np.arange(len(x)), parts)):
            name = role if clients_per_role == 1 else f"{role}/{part + 1}"
            clients[name] = x[kept], y[kept]
        test.append(_examples(ids[end:], length))
    x_test, y_test = (np.concatenate(arrays) for arrays in zip(*test, strict=True))
    dataset = FederatedDataset.from_client_arrays(clients)
    return dataset, (x_test, y_test)


def _speeches(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns every role's text, in the order of their first appearance."""
    with open(path, encoding="utf-8") as file:
        blocks = re.split(r"\n{2,}", file.read().strip("\n"))
    speeches: dict[str, list[str]] = {}
    for block in blocks:
        role, _, speech = block.partition("\n")
        if not role.endswith(":"):
            raise ValueError(
                "path must be a text of blocks 'ROLE:', speech, empty line, "
                f"got {os.fspath(path)!r} with a block that starts with "
                f"{role[:40]!r}."
            )
        if speech:
            speeches.setdefault(role[:-1], []).append(speech)
    if not speeches:
        raise ValueError(
            f"path must be a text in which somebody speaks, got {os.fspath(path)!r}."
        )
    return {role: "\n".join(parts) for role, parts in speeches.items()}


def _examples(ids: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text into examples (x, y), both int32[n, length]."""
    predicted = max(len(ids) - 1, 0)
    num_examples = -(-predicted // length)
    pairs = np.full((2, num_examples * length), _PADDING, np.int32)
    pairs[0, :predicted] = ids[:predicted]
    pairs[1, :predicted] = ids[1 : predicted + 1]
    x, y = pairs.reshape(2, num_examples, length)
    return x, y
