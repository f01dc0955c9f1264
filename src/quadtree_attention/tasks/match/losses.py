# SPDX-License-Identifier: Apache-2.0
"""What a matcher learns from, as in LoFTR: a focal loss of coarse pairs, and fine distances."""

import torch
from torch import Tensor

from quadtree_attention.models.parts.coarse_matching import CoarseMatches

ALPHA, GAMMA = 0.25, 2.0
_SMALLEST = 1e-6


def coarse_loss(
    confidence: Tensor,
    truth: CoarseMatches,
    mask0: Tensor | None = None,
    mask1: Tensor | None = None,
) -> Tensor:
    """Focal loss of the confidence of all pairs of cells: that of true ones, plus that of others.

    Both are means, so that the few true pairs weigh as much as all others together.

    Args:
        confidence: (B, L0, L1), between 0 and 1.
        truth: The pairs that match.
        mask0: Cells of map 0 that count (B, ..., L0 in all), or None for all.
        mask1: Likewise for map 1.
    """
    # Half precision has nothing between 1 - 1e-6 and 1
    p = confidence.float().clamp(_SMALLEST, 1 - _SMALLEST)
    is_true = torch.zeros_like(p, dtype=torch.bool)
    is_true[truth.batch_indexes, truth.cells0, truth.cells1] = True
    counts = torch.ones_like(is_true)
    if mask0 is not None:
        counts &= mask0.flatten(1)[:, :, None]
    if mask1 is not None:
        counts &= mask1.flatten(1)[:, None, :]
    gain = -ALPHA * (1 - p) ** GAMMA * p.log()
    cost = -ALPHA * p**GAMMA * (1 - p).log()
    return _mean(gain, is_true & counts) + _mean(cost, ~is_true & counts)


def fine_loss(offset: Tensor, std: Tensor, true_offset: Tensor) -> Tensor:
    """Squared distance of fine offsets from the true ones, weighed by how sure the model is.

    Matches whose true offset is outside of the window have nothing to learn from and are left out.
    The weights have no gradient: to be unsure would be the easiest way to a small loss.

    Args:
        offset: (M, 2) in units of the window's radius.
        std: (M,), same units.
        true_offset: (M, 2), same units.
    """
    within = true_offset.abs().amax(dim=1) < 1
    if not within.any():
        return offset.sum() * 0.0  # keeps the fine stage in the graph of every process
    certainty = 1 / std[within].detach().clamp(min=1e-4)
    weight = certainty / certainty.mean()
    distance = (offset[within] - true_offset[within]).square().sum(dim=1)
    return (distance * weight).mean()


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values; 0, with a gradient of 0, where there are none."""
    return torch.where(chosen, values, 0).sum() / chosen.sum().clamp(min=1)
