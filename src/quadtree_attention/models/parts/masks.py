# SPDX-License-Identifier: Apache-2.0
"""Masks of maps (B, H, W): True = visible."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quadtree_attention.nn.value_pyramid import visible_levels
from quadtree_attention.ops.attention.tree import Tree


def extent(mask: Tensor) -> Tensor:
    """Rows and columns up to the last visible cell of every sample: (B, H, W) -> (B, 2) int64.

    For a map padded at the bottom and right, this is the size before padding.
    """
    sides = []
    for shown in (mask.any(dim=2), mask.any(dim=1)):  # (B, H), (B, W)
        ordinal = torch.arange(1, shown.shape[1] + 1, device=mask.device)
        sides.append((shown * ordinal).amax(dim=1))
    return torch.stack(sides, dim=1)


def rectangles(
    sizes: Sequence[tuple[int, int]], grid: tuple[int, int], device: torch.device
) -> Tensor:
    """Return masks (B, *grid) whose first rows and columns, given by `sizes`, are visible."""
    counts = torch.tensor(sizes, device=device)  # (B, 2)
    rows, columns = (
        torch.arange(n, device=device) < counts[:, i, None] for i, n in enumerate(grid)
    )
    return rows[:, :, None] & columns[:, None]


def masks_of_maps(mask: Tensor | None, num_maps: int) -> list[Tensor | None]:
    """Return masks at 1, 1/2, 1/4, ... of a mask (B, H, W); a cell needs one visible pixel."""
    if mask is None:
        return [None] * num_maps
    return visible_levels(Tree(tuple(mask.shape[1:]), num_maps), mask)[::-1]


def stack_masks(mask0: Tensor | None, mask1: Tensor | None) -> Tensor | None:
    """Concatenates the masks of two batches of the same shape; None hides no cells."""
    if mask0 is None and mask1 is None:
        return None
    known = mask0 if mask0 is not None else mask1
    assert known is not None
    pair = (torch.ones_like(known) if mask is None else mask for mask in (mask0, mask1))
    return torch.cat(list(pair))
