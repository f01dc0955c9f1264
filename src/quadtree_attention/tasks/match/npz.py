# SPDX-License-Identifier: Apache-2.0
"""Safe reading of npz files of unknown origin, including arrays of objects.

NumPy stores arrays of objects as pickles, and a pickle can call any function by its name. Here,
only the names in NumPy's own pickles of arrays and numbers are accepted. They are resolved to
classes of this module, which check all arguments; NumPy's own classes accept any memory layout.
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

_CODE = re.compile(r"[biufSU]\d+|O8?")  # dtypes without fields: numbers, strings, objects


def read_npz(path: Path, names: Iterable[str] | None = None) -> dict[str, Array]:
    """Read arrays of a file by name; without names, all arrays.

    Arrays of objects may hold None, bools, numbers, strings, bytes, arrays, lists and tuples.

    Raises:
        DataError: The file is missing or damaged, lacks an array, or contains other objects.
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
        }.get(version)  # later versions only add names of fields; NumPy reads them
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
    """A pickle contains a name that is not allowed; the message is the name."""


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
    """An array in a pickle; created when its contents are known."""

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
    """Encode bytes as in pickle protocol 2, which NumPy used until 1.16."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes are not stored as latin1")
    return text.encode("latin1")


def _plain(value: Any) -> Any:
    """Replace placeholders by arrays."""
    if isinstance(value, _Made):
        return value.array
    if isinstance(value, tuple | list):
        return type(value)(_plain(part) for part in value)
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        return value
    raise pickle.UnpicklingError(f"an array of objects holds {type(value).__name__}")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,  # argument of _reconstruct, unused
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
