# SPDX-License-Identifier: Apache-2.0
"""Tree order: the memory layout of the reference, the cpu backend and variant C.

At every level the children of cell `i` are the cells `F*i ... F*i + F-1` of the next finer level,
`F = 2**ndim`, and the coarsest level is in row-major order. Pooling is a mean over consecutive
groups of F, and copying a message to the children is a repeat by F. The remaining code does not
depend on the number of grid axes.

Sizes may be symbolic (`torch.export`): index arithmetic uses `//` only, without branches on unknown
sizes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion


def is_known(condition: bool | torch.SymBool) -> bool:
    """Return True if a condition on sizes is known to hold, without a guard on symbolic sizes.

    In an export a condition on symbolic sizes is never known: PyTorch would derive it from guards
    on the sizes of the example, and exported files run without guards.
    """
    if isinstance(condition, bool):
        return condition
    if is_exporting():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


# In these versions, `is_exporting` is also True in torch.compile.
_COMPILING_LOOKS_LIKE_EXPORTING = TorchVersion(torch.__version__) < "2.12"


def is_exporting() -> bool:
    """Return True during an export, for example to ONNX; False for `torch.compile`."""
    if _COMPILING_LOOKS_LIKE_EXPORTING and torch.compiler.is_dynamo_compiling():
        return False
    return torch.compiler.is_exporting()


def grid_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of grid axes as plain integers, except during an export.

    `torch.compile` then creates one graph per grid; guards on a tree of symbolic size would take
    minutes.
    """
    return tuple(sizes) if is_exporting() else tuple(index(s) for s in sizes)


@dataclass(frozen=True)
class Tree:
    """A grid with `num_levels` levels of cells, padded to whole cells of the coarsest level.

    Args:
        grid: Size of the finest map, one entry per axis.
        num_levels: Number of levels; level 0 is the coarsest, `num_levels - 1` the finest.
    """

    grid: tuple[int, ...]
    num_levels: int

    @property
    def ndim(self) -> int:
        return len(self.grid)

    @property
    def num_children(self) -> int:
        return 2**self.ndim

    @property
    def finest(self) -> int:
        return self.num_levels - 1

    def grid_at(self, level: int) -> tuple[int, ...]:
        """Size of the map at `level`: halved and rounded up once per level above the finest."""
        cell = 2 ** (self.finest - level)
        return tuple((size + cell - 1) // cell for size in self.grid)

    def padded_grid_at(self, level: int) -> tuple[int, ...]:
        return tuple(size * 2**level for size in self.grid_at(0))

    def num_cells(self, level: int) -> int:
        return prod(self.grid_at(0)) * self.num_children**level

    @property
    def is_padded(self) -> bool:
        """True if tree order may have padding cells."""
        padded = self.padded_grid_at(self.finest)
        return not all(is_known(a == b) for a, b in zip(self.grid, padded, strict=True))

    def to_tree(self, x: Tensor, level: int, axis: int) -> Tensor:
        """Flatten the grid axes of `x`, which start at `axis`, into tree order, padded with zeros.

        Shapes: (*lead, *grid_at(level), *rest) -> (*lead, num_cells(level), *rest)
        """
        lead, rest = x.shape[:axis], x.shape[axis + self.ndim :]
        x = self._pad(x, level, axis)
        split = [part for size in self.grid_at(0) for part in (size, *(2,) * level)]
        x = x.reshape(*lead, *split, *rest)
        x = x.permute(*self._depth_major(level, axis, x.ndim))
        return x.reshape(*lead, self.num_cells(level), *rest)

    def from_tree(self, x: Tensor, level: int, axis: int) -> Tensor:
        """Undo `to_tree`: (*lead, num_cells(level), *rest) -> (*lead, *grid_at(level), *rest)."""
        lead, rest = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*lead, *self.grid_at(0), *(2,) * (self.ndim * level), *rest)
        order = self._depth_major(level, axis, x.ndim)
        x = x.permute(*(order.index(i) for i in range(x.ndim)))
        x = x.reshape(*lead, *self.padded_grid_at(level), *rest)
        for i, size in enumerate(self.grid_at(level)):
            x = x.narrow(axis + i, 0, size)
        return x

    def visible(self, mask: Tensor | None, batch: int, device: torch.device) -> list[Tensor | None]:
        """Return visible cells of each level, coarse -> fine; None if all are visible.

        Args:
            mask: Boolean (B, *grid), True = visible; None: all visible.
        """
        if mask is None and not self.is_padded:
            return [None] * self.num_levels
        if mask is None:
            mask = torch.ones(self.grid, dtype=torch.bool, device=device)
            mask = mask.expand(batch, *self.grid)
        levels = [self.to_tree(mask, self.finest, axis=1)]  # (B, T)
        for _ in range(self.finest):
            levels.append(group(levels[-1], self.num_children, axis=1).any(dim=-1))
        return list(reversed(levels))

    def coordinates(self, cells: Tensor, level: int) -> Tensor:
        """Grid coordinates (y, x order) of tree-ordered cell indices; -1 stays -1 on every axis.

        Shapes: (...) -> (..., ndim)
        """
        place = cells >> (self.ndim * level)  # cell of level 0, row-major
        axes: list[Tensor] = []
        for size in reversed(self.grid_at(0)):
            axes.insert(0, place % size)
            place = place // size
        for depth in reversed(range(level)):
            child = cells >> (self.ndim * depth)
            for i in range(self.ndim):
                axes[i] = axes[i] * 2 + (child >> (self.ndim - 1 - i) & 1)
        coordinates = torch.stack(axes, dim=-1)
        return torch.where(cells[..., None] < 0, -1, coordinates)

    def _pad(self, x: Tensor, level: int, axis: int) -> Tensor:
        if not self.is_padded:
            return x
        pairs = [0, 0] * (x.ndim - axis - self.ndim)  # F.pad counts axes from the last one
        for size, padded in zip(
            reversed(self.grid_at(level)), reversed(self.padded_grid_at(level)), strict=True
        ):
            pairs += [0, padded - size]
        return F.pad(x, pairs)

    def _depth_major(self, level: int, axis: int, ndim: int) -> list[int]:
        """Axis order from (coarse, half, ... of y; coarse, half, ... of x) to tree order."""
        parts = self.ndim * (level + 1)
        inner = [axis + i * (level + 1) + d for d in range(level + 1) for i in range(self.ndim)]
        return [*range(axis), *inner, *range(axis + parts, ndim)]


def group(x: Tensor, num_children: int, axis: int) -> Tensor:
    """Split `axis` into (parents, children)."""
    return x.unflatten(axis, (x.shape[axis] // num_children, num_children))


def repeat(x: Tensor, num_children: int) -> Tensor:
    """Repeat the row of every cell for its children: (..., T, D) -> (..., T*F, D)."""
    *lead, cells, width = x.shape
    x = x.unsqueeze(-2).expand(*lead, cells, num_children, width)
    return x.reshape(*lead, cells * num_children, width)


def pool(x: Tensor, num_children: int, visible: Tensor | None) -> Tensor:
    """Mean over the visible children of every cell: (B, N, T, D) -> (B, N, T/F, D).

    A cell without visible children becomes 0. `visible` is (B, T) or None.
    """
    groups = group(x, num_children, axis=2)  # (B, N, T/F, F, D)
    accumulate = accumulation_dtype(x.dtype)
    if visible is None:
        return as_dtype(groups.mean(dim=3, dtype=accumulate), x.dtype)
    shown = group(visible, num_children, axis=1).unsqueeze(1).unsqueeze(4)  # (B, 1, T/F, F, 1)
    count = shown.sum(dim=3).clamp(min=1)
    if not is_exporting():  # hidden cells are 0, and NaN only without `hide`
        groups = torch.where(shown, groups, 0)
    total = groups.sum(dim=3, dtype=accumulate)
    return as_dtype(total / count, x.dtype)


def mean_pyramid(x: Tensor, num_children: int, visible: Sequence[Tensor | None]) -> list[Tensor]:
    """Return all levels of `x` (finest, (B, N, T, D)) by masked means, coarse -> fine."""
    levels = [x]
    for shown in reversed(visible[1:]):
        levels.append(pool(levels[-1], num_children, shown))
    return list(reversed(levels))


def pyramid(tree: Tree, x: Tensor, visible: Sequence[Tensor | None]) -> list[Tensor]:
    """Levels of a map in tree order, coarse -> fine: (B, *grid, N, D) -> [(B, N, T_l, D)]."""
    finest = tree.to_tree(x.movedim(-2, 1), tree.finest, axis=2)
    return mean_pyramid(finest, tree.num_children, visible)


def to_tree(tree: Tree, x: Tensor, level: int) -> Tensor:
    """Convert a level to tree order: (B, *grid_at(level), N, D) -> (B, N, T_l, D)."""
    return tree.to_tree(x.movedim(-2, 1), level, axis=2)


def to_grid(tree: Tree, x: Tensor) -> Tensor:
    """Convert the finest level from tree order: (B, N, T, D) -> (B, *grid, N, D)."""
    return tree.from_tree(x.movedim(1, 2), tree.finest, axis=1)


def rows_by_parent(rows: int, columns: int) -> int:
    """Number of cells of an image padded to whole parents; 0 columns: without padding."""
    if columns == 0:
        return rows
    return 4 * ((rows // columns + 1) // 2) * ((columns + 1) // 2)


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set hidden cells to 0, even if NaN: x (*cells, ...), mask (*cells)."""
    if mask is None:
        return x
    return torch.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, 0)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `x`; nothing for the same dtype, which would be an operator of an export."""
    return x if x.dtype == dtype else x.to(dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
