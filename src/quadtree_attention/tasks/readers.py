# SPDX-License-Identifier: Apache-2.0
"""Shared code of readers: unreadable samples, class names, npz files."""

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quadtree_attention.checks import few
from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.files import StrPath
from quadtree_attention.images import Array

SHOWN = 5  # reasons in a summary


def summary(reasons: Sequence[str]) -> str:
    """Join the first reasons, and the number of the others."""
    more = f", and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return "; ".join(reasons[:SHOWN]) + more


def data_root(root: StrPath | None, source: str) -> Path:
    """Return the root of data of a `data.source`; raise `OptionError` if there is none."""
    if root is None:
        raise OptionError(
            f"data from a {source!r} source need a root, got none; pass --data.root FOLDER, or "
            "--data.source generated to try things out without data"
        )
    return Path(root)


def check_folder(folder: Path, advice: str) -> None:
    """Raise `DataError` if a folder of data does not exist."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; {advice}")


def refuse_if(strict: bool, error: Exception, advice: str = "fix it, or leave out --strict") -> str:
    """Return the message of an error of one sample; raise it, with advice, if `strict`."""
    if strict:
        raise DataError(f"{error}; {advice}") from error
    return str(error)


def class_names(
    card: Mapping[str, Any], count: int, path: Path | None, *, first: int = 0
) -> list[str]:
    """Return the class names of a network from its card; numbers from `first` if it has none.

    Raises `CheckpointError` if the card has another number of names.
    """
    names = card.get("classes")
    if names is None:
        return [str(label) for label in range(first, first + count)]
    if not isinstance(names, list) or len(names) != count:
        got = f"{len(names)} names" if isinstance(names, list) else "no list"
        raise CheckpointError(
            f"the card of {path} must have names of the {count} classes of the model, got {got}; "
            "restore the card, or delete it to use numbers"
        )
    return [str(name) for name in names]


def match_classes(theirs: Sequence[str], ours: Sequence[str]) -> list[int]:
    """Return the index in the model's classes of every class of the data.

    Classes are matched by name, or in order if one of the two has numbers instead of names.
    Raises `CheckpointError` if a class of the data is missing in the model.
    """
    if list(theirs) == list(ours):
        return list(range(len(ours)))
    place = {name: label for label, name in enumerate(ours)}
    unknown = [name for name in theirs if name not in place]
    if not unknown and len(place) == len(ours):
        return [place[name] for name in theirs]
    if (_numbered(theirs) and len(theirs) <= len(ours)) or (
        _numbered(ours) and len(theirs) == len(ours)
    ):
        return list(range(len(theirs)))
    raise CheckpointError(
        f"the data have {len(theirs)} classes, {few(theirs)}; the model has {len(ours)}, "
        f"{few(ours)}; it does not know {few(unknown)}, or has a name twice; use weights and data "
        "of the same classes"
    )


def _numbered(names: Sequence[str]) -> bool:
    return any(
        [str(i) for i in range(first, first + len(names))] == list(names) for first in (0, 1)
    )


@contextmanager
def reading(path: StrPath, advice: str) -> Iterator[None]:
    """Turn errors while a file is read into a `DataError` with its path."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no file {str(path)!r}; {advice}") from error
    except Exception as error:  # many kinds of errors for damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"there is no {reason}" if isinstance(error, KeyError) else reason
        reason = getattr(error, "strerror", None) or reason
        if "allow_pickle" in reason:
            reason = "it is damaged, or holds Python objects"
        raise DataError(f"cannot read {path}: {reason}; {advice}") from error


def read_npz(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Array]:
    """Read arrays of an npz file; missing optional arrays are skipped. Pickles are not read.

    Raises:
        DataError: The file does not exist, is damaged, or lacks an array.
    """
    with reading(path, "check the path, or write it again"):
        if path.is_file() and not zipfile.is_zipfile(path):
            raise ValueError("it is not an npz file, or it is damaged")
        with np.load(path, allow_pickle=False) as stored:
            if missing := [name for name in required if name not in stored]:
                raise DataError(
                    f"{path} must hold the arrays {', '.join(required)}, got no "
                    f"{', '.join(missing)}; write it again"
                )
            names = [*required, *(name for name in optional if name in stored)]
            return {name: stored[name] for name in names}


def npz_bytes(**arrays: Any) -> bytes:
    """Encode arrays as an npz file."""
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()
