"""A file format for a federated dataset: NumPy's `.npz`, without pickles.

Arrays of the file: `lengths` int64[N], the clients' numbers of examples;
`rows` int32[sum of lengths], their rows, or nothing where the examples lie in
the order of the clients; `array_0`, `array_1`, ... the flat examples; and
`header`, a JSON text with the nests' structure and the clients' ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _files
from tfdp_fl.datasets import nests, sources

_FORMAT = "tfdp_fl.FederatedDataset/1"


def save(
    path: str | os.PathLike[str],
    source: sources.IndexedSource,
    client_ids: Sequence[Any],
) -> None:
    """Writes the clients and the examples that they have.

    Raises:
      TypeError: If there is something that the format does not hold.
    """
    rows, lengths = source.rows(np.arange(source.num_clients))
    stored = nests.common_length(source.x, source.y)
    used = np.zeros(stored, bool)
    used[rows] = True
    # Other clients' examples are nobody's business here.
    rows = (np.cumsum(used) - 1).astype(np.int32)[rows]
    arrays: list[np.ndarray] = []
    structure = [_encode(source.x, arrays), _encode(source.y, arrays)]
    contents: dict[str, Any] = {
        f"array_{place}": array if used.all() else array[used]
        for place, array in enumerate(arrays)
    }
    if not np.array_equal(rows, np.arange(used.sum())):
        contents["rows"] = rows
    header: dict[str, Any] = {"format": _FORMAT, "structure": structure}
    if isinstance(client_ids, range) and client_ids == range(len(client_ids)):
        header["client_ids"] = None
    else:
        header["client_ids"] = [_encode_id(client) for client in client_ids]
    contents["header"] = np.array(json.dumps(header))
    contents["lengths"] = lengths
    with _files.replacing(path) as file:
        np.savez(file, **contents)


def load(
    path: str | os.PathLike[str],
) -> tuple[sources.IndexedSource, Sequence[Any] | None]:
    """Reads what `save` wrote; returns the source and the clients' ids.

    Raises:
      OSError: If there is no such file.
      ValueError: If it is another kind of file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            contents = dict(file)
        header = json.loads(str(contents["header"]))
        if header["format"] != _FORMAT:
            raise ValueError(f"unknown format {header['format']!r}")
        lengths = contents["lengths"]
        x, y = (_decode(part, contents) for part in header["structure"])
        source = sources.IndexedSource(
            nests.as_tensors(x, "x"),
            sources.as_labels(y, nests.as_tensors),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            table=contents.get("rows"),
        )
        return source, header["client_ids"]
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"path must be a file that save_npz wrote, got {os.fspath(path)!r} "
            f"({error})."
        ) from error


def _encode(nest: nests.Nest, arrays: list[np.ndarray]) -> Any:
    """Appends a nest's arrays to a list and returns its structure for JSON."""
    if isinstance(nest, tf.Tensor):
        if nest.dtype in (tf.string, tf.bfloat16):
            raise TypeError(
                "save_npz must be given numbers that NumPy stores, got "
                f"{nest.dtype.name}."
            )
        arrays.append(nests.view(nest))
        return len(arrays) - 1
    if isinstance(nest, nests.Weighted):
        return {"weighted": [_encode(part, arrays) for part in nest]}
    if isinstance(nest, dict):
        if not all(isinstance(key, str) for key in nest):
            raise TypeError(
                f"save_npz must be given dicts with keys that are strings, got "
                f"{list(nest)}."
            )
        return {"dict": {key: _encode(part, arrays) for key, part in nest.items()}}
    if type(nest) in (tuple, list):
        return {type(nest).__name__: [_encode(part, arrays) for part in nest]}
    raise TypeError(
        "save_npz must be given nests of dicts, tuples and lists, got a "
        f"{type(nest).__name__}."
    )


def _decode(structure: Any, contents: dict[str, np.ndarray]) -> nests.Nest:
    if isinstance(structure, int):
        return contents[f"array_{structure}"]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: _decode(part, contents) for key, part in parts.items()}
    made = [_decode(part, contents) for part in parts]
    if kind == "weighted":
        return nests.Weighted(*made)
    return tuple(made) if kind == "tuple" else made


def _encode_id(client_id: Any) -> int | str:
    if isinstance(client_id, np.integer):
        return int(client_id)
    if isinstance(client_id, int | str) and not isinstance(client_id, bool):
        return client_id
    raise TypeError(
        "save_npz must be given client ids that are integers or strings, got "
        f"{client_id!r}."
    )
