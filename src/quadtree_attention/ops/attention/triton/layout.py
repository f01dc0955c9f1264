# SPDX-License-Identifier: Apache-2.0
"""Memory layout of maps, averages and selections; independent of Triton."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops.attention.tree import Tree
from quadtree_attention.ops.attention.triton.limits import Grid, bits_of

Shape = tuple[int, ...]
Strides = tuple[int, int, int]  # of batch, heads and rows

ENTRIES = 256  # entries of a selection per program of `users.py`


class Layout(NamedTuple):
    """Memory saved by forward for backward, one float32 buffer; sizes are multiples of 64.

    Attributes:
        floats: Sizes of: message of level 0, log-sum-exp of level 0, scores of every level but the
            finest. The message is empty with one level, scores are if not needed.
        places: Sizes of the selections of every level but the finest, int32.
        pooled: Sizes of the averaged levels of q, k and v in their own dtype, fine -> coarse, and
            last the padding. Empty for maps that are given at all levels.
    """

    floats: tuple[int, ...]
    places: tuple[int, ...]
    pooled: tuple[tuple[int, ...], ...]
    itemsize: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Sizes of the three, in float32."""
        pooled = sum(map(sum, self.pooled)) * self.itemsize // 4
        return sum(self.floats), sum(self.places), pooled


class Grids(NamedTuple):
    """The grids of all levels of a map, coarse -> fine."""

    sizes: tuple[Grid, ...]
    cells: Shape
    is_padded: bool
    bits: Grid  # of the axes in places, see `limits.bits_of`

    @property
    def ndim(self) -> int:
        return len(self.sizes[0])


@lru_cache(maxsize=1024)
def grids_of(grid: Grid, num_levels: int) -> Grids:
    tree = Tree(grid, num_levels)
    levels = tuple(tree.grid_at(level) for level in range(num_levels))
    return Grids(levels, tuple(prod(level) for level in levels), tree.is_padded, bits_of(grid))


def rounded(size: int) -> int:
    """Round up to a size that keeps the following tensor aligned, which saves a compilation."""
    return (size + 63) // 64 * 64


def row_strides(shape: Sequence[int], stride: Sequence[int]) -> Strides | None:
    """Return strides of a map (B, *grid, N, D) as rows (B, N, T, D); None: a copy is needed."""
    if stride[-1] != 1 and shape[-1] != 1:
        return None
    step = cells = 0
    for size, axis in zip(reversed(shape[1:-2]), reversed(stride[1:-2]), strict=True):
        if size == 1:
            continue
        if cells and axis != step * cells:
            return None
        step, cells = (step, cells * size) if cells else (axis, size)
    return stride[0], stride[-2], step if cells else shape[-2] * shape[-1]


def dense_strides(shape: Sequence[int]) -> Strides:
    """Return `row_strides` of a dense map."""
    heads, dim = shape[-2:]
    return prod(shape[1:]), dim, heads * dim


def layout_of(
    shapes: Sequence[Sequence[Shape]], topk: Sequence[int], itemsize: int, *, with_scores: bool
) -> Layout:
    """Return the layout for maps of these shapes; `shapes` as `Look.maps`."""
    finest, value_dim, num_levels = shapes[0][-1], shapes[2][-1][-1], len(topk) + 1
    heads = finest[0] * finest[-2]
    cells = grids_of(tuple(finest[1:-2]), num_levels).cells
    rows = [heads * n for n in cells]
    floats = [rounded(rows[0] * value_dim) if topk else 0, rounded(rows[0])]
    kept = [n * k for n, k in zip(rows, topk, strict=False)]
    floats += [rounded(n) if with_scores else 0 for n in kept]
    places = tuple((n + ENTRIES - 1) // ENTRIES * ENTRIES for n in kept)
    pooled: list[tuple[int, ...]] = []
    for maps in shapes:
        if len(maps) == num_levels:
            pooled.append(())
            continue
        shape = maps[0]
        above = grids_of(tuple(shape[1:-2]), num_levels).cells[-2::-1]
        sizes = [heads * n * shape[-1] for n in above]
        pooled.append((*sizes, rounded(sum(sizes)) - sum(sizes)))
    return Layout(tuple(floats), places, tuple(pooled), itemsize)


class Kept(NamedTuple):
    """Tensors saved for backward: views of one buffer, see `Layout`.

    Attributes:
        message: Unweighted message of level 0, float32 (B, N, T_0, Dv); empty with one level.
        lse: Log-sum-exp of level 0, float32 (B, N, T_0).
        scores: (B, N, T_l, K_l) float32 of every level but the finest; empty if not needed.
        places: Selections (B, N, T_l, K_l) int32 of every level but the finest.
        pooled: The averaged levels of q, k and v, fine -> coarse, and last the padding.
    """

    message: Tensor
    lse: Tensor
    scores: list[Tensor]
    places: list[Tensor]
    pooled: list[list[Tensor]]


def kept_in(buffer: Tensor, layout: Layout, dtype: torch.dtype) -> Kept:
    floats, places, pooled = buffer.split_with_sizes(layout.parts)
    message, lse, *scores = floats.split_with_sizes(layout.floats)
    return Kept(
        message,
        lse,
        scores,
        list(places.view(torch.int32).split_with_sizes(layout.places)) if layout.places else [],
        pooled_in(pooled, layout, dtype),
    )


def pooled_in(buffer: Tensor, layout: Layout, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the averaged levels of q, k and v."""
    sizes = [size for part in layout.pooled for size in part]
    if not sizes:
        return [[], [], []]
    levels = iter(buffer.view(dtype).split_with_sizes(sizes))
    return [[next(levels) for _ in part] for part in layout.pooled]


class Cells(NamedTuple):
    """A grid, and the number of bits of each axis in places."""

    grid: Grid
    bits: Grid


def packed(rows: Tensor, cells: Cells) -> Tensor:
    """Return places of row indices, as `places.place_of`."""
    places, shift = torch.zeros_like(rows), 0
    for size, bits in zip(reversed(cells.grid), reversed(cells.bits), strict=True):
        places |= (rows % size) << shift
        rows = rows // size
        shift += bits
    return places.int()


def coordinates_of(places: Tensor, bits: Grid) -> list[Tensor]:
    """Unpack places of `places.place_of`, one tensor per axis; places are not negative."""
    axes: list[Tensor] = []
    for count in reversed(bits):
        axes.insert(0, places & (2**count - 1))
        places = places >> count
    return axes
