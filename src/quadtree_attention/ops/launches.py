# SPDX-License-Identifier: Apache-2.0
"""Kernel launches, recorded in place of being run.

Grids and arguments of a launch follow from shapes, strides, dtypes and options. So a call on `meta`
tensors says what it would launch on tensors of any size, and what Triton would compile for it,
without a GPU and without memory.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

_recorded: "list[Launch] | None" = None  # by the innermost `record`, in all threads


class Launch(NamedTuple):
    """A launch that was recorded.

    Attributes:
        kernel: What was to be launched, a `kernel.Kernel`.
        grid: Programs along each axis.
        arguments: By name, those that are constants of the kernel or options of the compiler, too.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def variant(self) -> Hashable:
        """Specialisation key of a kernel; launches with the same key share their code."""
        kernel = self.kernel
        varying = set(kernel.parameters) - kernel.constants
        return self.name, tuple(
            (name, _specialized(value, name in kernel.sizes) if name in varying else value)
            for name, value in sorted(self.arguments.items())
        )


def _specialized(value: Any, is_size: bool) -> Hashable:
    """Properties of an argument that Triton specialises on at run time; of sizes, only the type."""
    if isinstance(value, Tensor):
        offset = value.storage_offset() * value.itemsize + (0 if value.is_meta else _start(value))
        return str(value.dtype), offset % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        bits = 32 if -(2**31) <= value < 2**31 else 64
        if is_size:
            return bits
        return 1 if value == 1 else (bits, value % 16 == 0)
    return type(value).__name__


def _start(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Collects launches; inside, no kernel runs, and results hold what memory held before.

    Launches of all threads are collected, those of backward passes among them.
    """
    global _recorded
    before, launches = _recorded, []  # type: ignore[var-annotated]
    _recorded = launches
    try:
        yield launches
    finally:
        _recorded = before


def is_recording() -> bool:
    return _recorded is not None


def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Adds a launch to those that are recorded."""
    assert _recorded is not None
    named = dict(zip(kernel.parameters, arguments, strict=False))
    _recorded.append(Launch(kernel, grid, named | constants))
