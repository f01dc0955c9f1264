# SPDX-License-Identifier: Apache-2.0
"""Several grids in one sequence, as concatenated trees.

In tree order the children of cell i start at index F * i. This also holds for trees that are
concatenated level by level, so that a forest uses the same kernels as a tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from quadtree_attention.ops.attention.tree import Tree


@dataclass(frozen=True)
class Forest(Tree):
    """Trees of equal depth whose finest cells are one axis of tokens.

    Args:
        grid: Number of tokens, as a grid of one axis.
        num_levels: Number of levels of every tree.
        trees: One tree per grid, in the order of the tokens.
    """

    trees: tuple[Tree, ...] = field(default=())

    @classmethod
    def of(cls, grids: Sequence[Sequence[int]], num_levels: int) -> "Forest":
        trees = tuple(Tree(tuple(grid), num_levels) for grid in grids)
        return cls((sum(prod(tree.grid) for tree in trees),), num_levels, trees)

    @property
    def num_children(self) -> int:
        return self.trees[0].num_children

    def num_cells(self, level: int) -> int:
        return sum(tree.num_cells(level) for tree in self.trees)

    @property
    def is_padded(self) -> bool:
        return any(tree.is_padded for tree in self.trees)

    def to_tree(self, x: Tensor, level: int, axis: int) -> Tensor:
        """(*lead, tokens, *rest) -> (*lead, num_cells(finest), *rest); the finest level only."""
        assert level == self.finest
        parts = x.split([prod(tree.grid) for tree in self.trees], dim=axis)
        cells = [
            tree.to_tree(part.unflatten(axis, tree.grid), level, axis)
            for tree, part in zip(self.trees, parts, strict=True)
        ]
        return cells[0] if len(cells) == 1 else torch.cat(cells, dim=axis)

    def from_tree(self, x: Tensor, level: int, axis: int) -> Tensor:
        """Undo `to_tree`: (*lead, num_cells(finest), *rest) -> (*lead, tokens, *rest)."""
        assert level == self.finest
        parts = x.split([tree.num_cells(level) for tree in self.trees], dim=axis)
        tokens = [
            tree.from_tree(part, level, axis).flatten(axis, axis + tree.ndim - 1)
            for tree, part in zip(self.trees, parts, strict=True)
        ]
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=axis)
