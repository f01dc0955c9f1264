# SPDX-License-Identifier: Apache-2.0
"""Reads npz files of unknown origin, also those with arrays of objects, and never runs their code.

NumPy stores arrays of objects as pickles, and a pickle can call whatever it names. Here it can name
what NumPy's own pickles of arrays and numbers name, and nothing else; and what these names stand
for are classes of this file, which look at everything they are given. NumPy's own would take the
word of a pickle for what lies in memory.
"""

import pickle
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from quadtree_attention.errors import DataError
from quadtree_attention.images import Array
from quadtree_attention.tasks.readers import reading

_CODE = re.compile(r"[biufSU]\d+|O8?")  # numbers, strings, objects; what has no parts


def read_npz(path: Path, names: Iterable[str] | None = None) -> dict[str, Array]:
    """Arrays of a file by name; all of them if no names are given.

    Arrays of objects may hold None, bools, numbers, strings, bytes, arrays, lists and tuples.

    Raises:
        DataError: The file is missing or damaged, lacks an array, or holds something else.
    """
    with reading(path, "get the file again"), zipfile.ZipFile(path) as file:
        there = [name.removesuffix(".npy") for name in file.namelist()]
        wanted = there if names is None else list(names)
        if missing := [name for name in wanted if name not in there]:
            raise DataError(
                f"{path} must hold {', '.join(wanted)}, got {', '.join(there) or 'nothing'}; "
                f"{', '.join(missing)} is missing, get the file again"
            )
        return {name: _read(file, f"{name}.npy", path) for name in wanted}


def _read(file: zipfile.ZipFile, member: str, path: Path) -> Array:
    with file.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)  # later versions are for names of fields only, and are left to NumPy
        if read is None or not read(stream)[2].hasobject:
            stream.seek(0)
            return np.lib.format.read_array(stream, allow_pickle=False)
        try:
            made = _Reader(stream).load()
        except _RefusedError as error:
            raise DataError(
                f"{path} wants to run {error} when {member} is read, which data never need; "
                "do not use the file"
            ) from None
    if not isinstance(made, _Made):
        raise DataError(f"{member} of {path} is no array but {type(made).__name__}; get it again")
    return made.array


class _RefusedError(pickle.UnpicklingError):
    """A pickle named what it must not; the message is the name."""


class _DType:
    """The dtype of an array or number in a pickle."""

    def __init__(self, code: str, *_: object) -> None:
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            raise pickle.UnpicklingError(f"the dtype {code!r} is none of numbers and strings")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *parts = state
        if order not in ("<", ">", "|", "=") or any(part is not None for part in parts[:3]):
            raise pickle.UnpicklingError("a dtype has fields")
        self.dtype = self.dtype.newbyteorder(order)


class _Made:
    """An array in a pickle; made when its contents are known."""

    array: Array

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, _DType):
            raise pickle.UnpicklingError("an array has no dtype")
        if kind.dtype.hasobject:
            if not isinstance(content, list):
                raise pickle.UnpicklingError("an array of objects holds no list")
            flat = np.empty(len(content), object)
            for i, value in enumerate(content):
                flat[i] = _plain(value)
        else:
            flat = np.frombuffer(content, kind.dtype).astype(kind.dtype.newbyteorder("="))
        self.array = flat.reshape(shape, order="F" if by_columns else "C")


def _reconstruct(*_: object) -> _Made:
    return _Made()


def _scalar(kind: _DType, content: bytes) -> Any:
    if not isinstance(kind, _DType) or kind.dtype.hasobject:
        raise pickle.UnpicklingError("a number has no dtype")
    return np.frombuffer(content, kind.dtype, count=1)[0]


def _bytes(text: str, encoding: str) -> bytes:
    """Encoding of bytes in pickle protocol 2, which NumPy wrote until 1.16."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes are not stored as latin1")
    return text.encode("latin1")


def _plain(value: Any) -> Any:
    """The value with arrays in the place of what stands for them."""
    if isinstance(value, _Made):
        return value.array
    if isinstance(value, tuple | list):
        return type(value)(_plain(part) for part in value)
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        return value
    raise pickle.UnpicklingError(f"an array of objects holds {type(value).__name__}")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,  # handed to _reconstruct, which needs no telling
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _bytes,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _RefusedError(f"{module}.{name}")
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError("what another file holds")
