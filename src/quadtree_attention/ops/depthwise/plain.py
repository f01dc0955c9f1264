# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions in plain PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.ops.attention.tree import is_known

_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


def depthwise(
    x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool = False, activation: str | None = None
) -> Tensor:
    """As `functional.depthwise`."""
    maps = (F.relu(x) if relu else x).movedim(-1, 1)
    out: Tensor = _CONVOLUTIONS[x.ndim - 2](maps, weight, bias, padding=1, groups=x.shape[-1])
    out = out.movedim(1, -1)
    return out if activation is None else ACTIVATIONS[activation](out)


def add_positions(
    message: Tensor,
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    logits: Tensor,
) -> Tensor:
    """As `functional.add_positions`."""
    total: Tensor | None = None
    shares = logits.softmax(dim=0)
    for value, weight, bias, share in zip(values, weights, biases, shares, strict=True):
        local = depthwise(value, weight * share, bias * share)  # few numbers, not the whole map
        total = local if total is None else plus_parents(local, total)
    assert total is not None
    return message + total


def plus_parents(x: Tensor, above: Tensor) -> Tensor:
    """Add to every cell what its parent has: x (B, *grid, C), above (B, *parents, C)."""
    (batch, *grid, channels), parents = x.shape, above.shape[1:-1]

    def apart(siblings: int) -> list[int]:
        """(B, p0, siblings, p1, siblings, ..., C)"""
        return [batch, *(side for size in parents for side in (size, siblings)), channels]

    is_whole = all(is_known(size == 2 * over) for size, over in zip(grid, parents, strict=True))
    if is_whole and not x.is_cpu:
        return (x.reshape(apart(2)) + above.reshape(apart(1))).reshape(x.shape)
    # Axis by axis: a CPU takes ten times as long for the backward pass of one broadcast over all.
    for axis, size in enumerate(grid, start=1):
        above = torch.stack([above, above], axis + 1).flatten(axis, axis + 1).narrow(axis, 0, size)
    return x + above
