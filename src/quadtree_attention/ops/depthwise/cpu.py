# SPDX-License-Identifier: Apache-2.0
"""Sum of the maps of all levels along their tree, by Numba kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quadtree_attention.ops.attention.cpu.arrays import flat
from quadtree_attention.ops.attention.cpu.operators import WHAT
from quadtree_attention.ops.attention.cpu.shape import LANES
from quadtree_attention.ops.attention.cpu.threads import run
from quadtree_attention.ops.autograd import apply, backward_pass, operator

DTYPES = (torch.float32, torch.float64)


def can_add(maps: Sequence[Tensor], backend: str) -> bool:
    """Return True if kernels can add these maps (B, *grid, C) in a call of this backend."""
    return (
        backend == "cpu"
        and len(maps) > 2
        and maps[0].ndim <= 4
        and maps[0].shape[-1] >= LANES
        and maps[0].dtype in DTYPES
        and all(x.is_cpu and x.dtype == maps[0].dtype for x in maps)
        and not torch.compiler.is_compiling()
    )


def add_levels(message: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """Add to every cell of a message the values of itself and its ancestors; requires `can_add`.

    Args:
        message: (B, *grid, C)
        maps: (B, *grid_at(level), C), coarse -> fine, at least two.

    Returns:
        (B, *grid, C)
    """
    return apply(WHAT, _AddLevels, message, *maps)


def _sides(x: Tensor) -> list[int]:
    """Return rows and columns; a 1-D grid has one row."""
    return [*(1,) * (4 - x.ndim), *x.shape[1:-1]]


@operator("cpu_add_levels", lambda message, maps: torch.empty_like(message))
def _forward(message: Tensor, maps: list[Tensor]) -> Tensor:
    from quadtree_attention.ops.depthwise.cpu_kernels import add_parents

    total, dtype = maps[0], message.dtype
    for i, x in enumerate(maps[1:], start=2):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        given = message if i == len(maps) else None
        rows, columns = _sides(x)
        run(
            add_parents, x.shape[0] * rows, 2 * x.numel(), flat(x, dtype), flat(total, dtype),
            flat(given, dtype), rows, columns, *_sides(total), x.shape[-1], out.view(-1).numpy(),
        )  # fmt: skip
        total = out
    return total


@operator("cpu_add_levels_backward", lambda dy, shapes: [dy.new_empty(x) for x in _split(shapes)])
def _backward(dy: Tensor, shapes: list[int]) -> list[Tensor]:
    """Gradients of all maps but the finest, whose gradient is `dy`; `shapes` are concatenated."""
    from quadtree_attention.ops.depthwise.cpu_kernels import add_children

    grads = [dy]
    for shape in reversed(_split(shapes)):
        below, out = grads[-1], dy.new_empty(shape)
        rows, columns = _sides(out)
        run(
            add_children, shape[0] * rows, 2 * below.numel(), flat(below, dy.dtype),
            *_sides(below), rows, columns, shape[-1], out.view(-1).numpy(),
        )  # fmt: skip
        grads.append(out)
    return grads[:0:-1]


def _split(shapes: list[int]) -> list[list[int]]:
    """Split concatenated shapes; the first number is the length of each."""
    ndim = shapes[0]
    return [shapes[i : i + ndim] for i in range(1, len(shapes), ndim)]


def _gradients(dy: Tensor, shapes: list[int]) -> tuple[Tensor, ...]:
    """Return the gradients as a tuple, since autograd ignores lists."""
    return tuple(_backward(dy, shapes))


class _AddLevels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: Tensor, *maps: Tensor) -> Tensor:
        ctx.shapes = [message.ndim, *(size for x in maps[:-1] for size in x.shape)]
        return _forward(message, list(maps))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, *backward_pass(WHAT, _gradients, dy, ctx.shapes), dy
