# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files, and locks on folders."""

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

from quadtree_attention.errors import OptionError

StrPath = str | os.PathLike[str]


@contextmanager
def replacing(path: StrPath) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` when it is complete, and is removed on error.

    A reader sees the complete new file or the previous one. A link stays a link, to the new file,
    and the new file has the mode of the previous one.

    Raises:
        OptionError: It exists and is no regular file: a device, a pipe.
    """
    _check_regular(path)
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f".quadtree-{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            unfinished.chmod(stat.S_IMODE(target.stat().st_mode))
        unfinished.replace(target)
    finally:  # also when interrupted
        unfinished.unlink(missing_ok=True)


def _check_regular(path: StrPath) -> None:
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "a directory" if os.path.isdir(path) else "a device or a pipe"
        raise OptionError(f"{os.fspath(path)!r} is {kind}; write to another name")


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Writes several files; none is replaced before all are on disk.

    Raises:
        OptionError: One cannot be written; existing files are unchanged.
    """
    try:
        with contextlib.ExitStack() as stack:
            for path, data in contents.items():
                file = stack.enter_context(replacing(path))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(", ".join(map(str, contents)), error) from error


def write_whole(path: StrPath, data: bytes) -> None:
    """Writes a file atomically.

    Raises:
        OptionError: It cannot be written; an existing file is unchanged.
    """
    write_all({Path(path): data})


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents if they do not exist.

    Raises:
        OptionError: It cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"the folder {folder} cannot be made: {error.strerror or error}; write elsewhere"
        ) from error


def _unwritable(what: str, error: OSError) -> OptionError:
    return OptionError(
        f"{what} cannot be written: {error.strerror or error}; what was there before is unchanged; "
        "make room or write elsewhere"
    )


def check_writable(path: StrPath, *inputs: StrPath) -> None:
    """Raises `OptionError` where writing would fail, or would replace one of the inputs."""
    target = Path(path)
    if not os.path.isdir(target.parent):
        raise OptionError(
            f"there is no directory {str(target.parent)!r} to write to; make it first"
        )
    _check_regular(target)
    if not os.access(target.parent, os.W_OK):
        raise OptionError(f"{str(target.parent)!r} may not be written to; write elsewhere")
    for source in inputs:
        if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
            raise OptionError(
                f"{str(target)!r} is an input, it must not be replaced; write elsewhere"
            )


def file_sha256(path: StrPath) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_held: set[BinaryIO] = set()  # files of the locks of this process


def _forget_locks() -> None:
    """Closes inherited lock files: a forked process must not outlive its parent with a lock."""
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


class Lock:
    """Exclusive lock on a folder, released when the process ends for any reason.

    Args:
        folder: An existing folder.
        what: The owner, for the error message: "a training run".

    Raises:
        OptionError: Another process holds it.
    """

    NAME = ".lock"

    def __init__(self, folder: Path, what: str) -> None:
        self.folder = folder
        self.what = what
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            file = (self.folder / self.NAME).open("ab")
        except OSError as error:
            raise _unwritable(f"the folder {self.folder}", error) from error
        if not _locked(file):
            file.close()
            raise OptionError(
                f"{self.folder} is in use by {self.what} of another process; wait for its end, or "
                "write elsewhere"
            )
        self._file = file
        _held.add(file)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        (self.folder / self.NAME).unlink(missing_ok=True)
        _held.discard(self._file)
        self._file.close()
        self._file = None


def _locked(file: BinaryIO) -> bool:
    """Returns True if this process acquired the lock of an open file."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    # Another process may have removed the file between opening and locking it
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False
