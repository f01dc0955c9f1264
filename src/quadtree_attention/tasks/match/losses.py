# SPDX-License-Identifier: Apache-2.0
"""Losses of the matcher, as in LoFTR: focal loss of coarse pairs, and fine distances."""

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
    """Focal loss of the confidence of all pairs of cells: loss of true pairs plus loss of others.

    Both are means, so that the few true pairs have the same weight as all others together.

    Args:
        confidence: (B, L0, L1), between 0 and 1.
        truth: The true pairs, without duplicates.
        mask0: Visible cells of map 0, (B, ...) with L0 cells; None: all.
        mask1: The same for map 1.
    """
    p = confidence.float()  # half precision cannot represent 1 - 1e-6
    batch, cells0, cells1 = at = truth.batch_indexes, truth.cells0, truth.cells1
    rows = _weights(mask0, p, 1)
    columns = _weights(mask1, p, 2)
    counts = rows[batch, cells0] * columns[batch, cells1]
    true = p[at]
    gain = -ALPHA * (1 - true).clamp(_SMALLEST) ** GAMMA * true.clamp(_SMALLEST).log()
    # The loss of other pairs is the loss of all pairs with the confidence of true pairs set to 0
    others = p.clamp(max=1 - _SMALLEST)
    others[at] = 0.0
    cost = -ALPHA * others**GAMMA * torch.log1p(-others)
    if mask0 is not None or mask1 is not None:
        cost = cost * rows[:, :, None] * columns[:, None, :]
    true_count = counts.sum()
    other_count = rows.sum(dim=1) @ columns.sum(dim=1) - true_count
    return (gain * counts).sum() / true_count.clamp(min=1) + cost.sum() / other_count.clamp(min=1)


def fine_loss(offset: Tensor, std: Tensor, true_offset: Tensor) -> Tensor:
    """Squared distance of fine offsets from the true ones, weighted by the inverse deviation.

    Matches whose true offset is outside of the window are left out. The weights have no gradient:
    otherwise a large deviation would minimise the loss.

    Args:
        offset: (M, 2) in units of the window's radius.
        std: (M,), same units.
        true_offset: (M, 2), same units.
    """
    within = true_offset.abs().amax(dim=1) < 1
    if not within.any():
        return offset.sum() * 0.0  # keeps the fine stage in the autograd graph of every process
    certainty = 1 / std[within].detach().clamp(min=1e-4)
    weight = certainty / certainty.mean()
    distance = (offset[within] - true_offset[within]).square().sum(dim=1)
    return (distance * weight).mean()


def _weights(mask: Tensor | None, confidence: Tensor, axis: int) -> Tensor:
    """Return 1 for visible cells (B, L), 0 for others."""
    if mask is None:
        return confidence.new_ones(confidence.shape[0], confidence.shape[axis])
    return mask.flatten(1).to(confidence.dtype)
