# SPDX-License-Identifier: Apache-2.0
"""Recording of kernel launches without running them.

Grids and arguments of a launch are functions of shapes, strides, dtypes and options. A call on
`meta` tensors therefore records the launches for tensors of any size, and the kernels that Triton
would compile, without a GPU and without memory.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

_recorded: "list[Launch] | None" = None  # by the innermost `record`, in all threads


class Launch(NamedTuple):
    """A recorded launch.

    Attributes:
        kernel: The `kernel.Kernel`.
        grid: Programs along each axis.
        arguments: Arguments by name, including constants of the kernel and compiler options.
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
    """Collect launches; inside, no kernel runs, and results are uninitialised memory.

    Launches of all threads are collected, including backward passes.
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
    """Add a launch to the recorded ones."""
    assert _recorded is not None
    named = dict(zip(kernel.parameters, arguments, strict=False))
    _recorded.append(Launch(kernel, grid, named | constants))
