# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all."""

import os
import secrets
from pathlib import Path

from quadtree_attention.errors import OptionError


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes beside the file and moves it into place: whoever looks finds all of it or nothing.

    Raises:
        OptionError: It cannot be written there; what was there before is unchanged.
    """
    target = Path(path)
    unfinished = target.with_name(f".quadtree-{secrets.token_hex(4)}.tmp")
    try:
        try:
            with unfinished.open("xb") as file:
                file.write(data)
            unfinished.replace(target)
        finally:  # also when interrupted
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise OptionError(
            f"{target} cannot be written: {error.strerror or error}; write elsewhere"
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
