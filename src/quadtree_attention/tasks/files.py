# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quadtree_attention.errors import OptionError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file beside `path`, moved there when all of it is on the disk, and gone if it fails.

    Whoever looks finds all of the new file, or what was there before.
    """
    target = Path(path)
    unfinished = target.with_name(f".quadtree-{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:  # also when interrupted
        unfinished.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Makes a folder, unless it is there.

    Raises:
        OptionError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise OptionError(
            f"the folder {folder} cannot be made: {reason}; write elsewhere"
        ) from error


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file, all or nothing.

    Raises:
        OptionError: It cannot be written there; what was there before is unchanged.
    """
    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written: {error.strerror or error}; write elsewhere"
        ) from error


def check_writable(path: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> None:
    """Raises `OptionError` where writing would fail, or would replace one of the inputs."""
    target = Path(path)
    if not os.path.isdir(target.parent):
        raise OptionError(
            f"there is no directory {str(target.parent)!r} to write to; make it first"
        )
    if os.path.isdir(target):
        raise OptionError(f"{str(target)!r} is a directory; write to another name")
    if not os.access(target.parent, os.W_OK):
        raise OptionError(f"{str(target.parent)!r} may not be written to; write elsewhere")
    for source in inputs:
        if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
            raise OptionError(
                f"{str(target)!r} is an input, it must not be replaced; write elsewhere"
            )
