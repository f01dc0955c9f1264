# SPDX-License-Identifier: Apache-2.0
"""Losses of the stereo network, as in STTR: assignment, disparities, and occlusion."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.models.stereo import StereoOutput


def stereo_losses(
    output: StereoOutput,
    batch: Mapping[str, Any],
    at_cells: Callable[[Tensor], Tensor],
    max_disparity: float | None = None,
) -> dict[str, Tensor]:
    """Return the four parts of the loss; each is a mean over its valid pixels.

    Args:
        output: Output of the network, which was called with the true disparity.
        batch: `disparity0`, `known0`, `visible0` and `occluded0` (B, H, W).
        at_cells: Function from maps of pixels to maps of cells, `STTR.at_cells`.
        max_disparity: Maximum disparity of the network; larger ones are left out.

    Returns:
        assignment: Negative log-likelihood of the true match, or of the dustbin if occluded.
        raw: Distance of disparities before refinement, for non-occluded pixels.
        disparity: Distance after refinement, for all known pixels, including occluded ones.
        occlusion: Binary cross entropy of occlusion.
    """
    truth, known = batch["disparity0"], batch["known0"]
    visible, occluded = batch["visible0"], batch["occluded0"]
    within = visible & known if max_disparity is None else visible & (truth <= max_disparity)
    seen, hidden = at_cells(within), at_cells(occluded)
    judged = visible | occluded
    crosses = F.binary_cross_entropy_with_logits(
        output.occlusion_logits.float(), occluded.float(), reduction="none"
    )
    return {
        "assignment": _mean(-output.log_true, seen) + _mean(-output.log_none, hidden),
        "raw": _distance(output.raw_disparity, at_cells(truth), seen),
        "disparity": _distance(output.disparity, truth, known),
        "occlusion": _mean(crosses, judged),
    }


def _distance(disparity: Tensor, truth: Tensor, where: Tensor) -> Tensor:
    """Smooth L1 distance: quadratic below one pixel, linear above."""
    return _mean(F.smooth_l1_loss(disparity.float(), truth, reduction="none"), where)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values; 0, with a gradient of 0, if there are none."""
    return torch.where(chosen, values, 0).sum() / chosen.sum().clamp(min=1)
