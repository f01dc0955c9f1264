# SPDX-License-Identifier: Apache-2.0
"""The loss of stereo networks: worked out by hand, and what it leaves out."""

import math

import pytest
import torch

from quadtree_attention.models.stereo import StereoOutput
from quadtree_attention.tasks.stereo.losses import stereo_losses


def output(**changes: torch.Tensor) -> StereoOutput:
    zeros, cells = torch.zeros(1, 4, 4), torch.zeros(1, 2, 2)
    parts = {"disparity": zeros, "occlusion_logits": zeros, "raw_disparity": cells}
    parts |= {"raw_occlusion": cells, "log_true": cells, "log_none": cells}
    return StereoOutput(**{**parts, **changes})


def batch(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    yes, no = torch.ones(1, 4, 4, dtype=torch.bool), torch.zeros(1, 4, 4, dtype=torch.bool)
    truth = {"disparity0": torch.zeros(1, 4, 4), "known0": yes, "visible0": yes, "occluded0": no}
    return {**truth, **changes}


def half(x: torch.Tensor) -> torch.Tensor:
    return x[:, ::2, ::2]


def where(*pixels: tuple[int, int]) -> torch.Tensor:
    mask = torch.zeros(1, 4, 4, dtype=torch.bool)
    for row, column in pixels:
        mask[0, row, column] = True
    return mask


def test_by_hand():
    occluded = where((0, 0), (1, 1))
    truth = batch(disparity0=torch.full((1, 4, 4), 3.0), occluded0=occluded, visible0=~occluded)
    found = output(
        disparity=torch.full((1, 4, 4), 3.5),
        raw_disparity=torch.tensor([[[100.0, 3.0], [1.0, 3.0]]]),
        log_true=torch.tensor([[[-100.0, -1.0], [-2.0, -3.0]]]),
        log_none=torch.tensor([[[-0.5, -100.0], [-100.0, -100.0]]]),
    )
    losses = stereo_losses(found, truth, half)
    assert losses["assignment"].item() == pytest.approx(2.0 + 0.5)
    assert losses["raw"].item() == pytest.approx((0 + 1.5 + 0) / 3)  # the occluded cell is left out
    assert losses["disparity"].item() == pytest.approx(0.125)
    assert losses["occlusion"].item() == pytest.approx(math.log(2))


def test_what_is_left_out():
    known = where((0, 1), (2, 2))
    truth = batch(known0=known, visible0=known, disparity0=torch.where(known, 2.0, 0.0))
    disparity = torch.full((1, 4, 4), 50.0)
    disparity[known] = 2.0
    losses = stereo_losses(output(disparity=disparity), truth, half)
    assert losses["disparity"].item() == 0
    assert losses["raw"].item() == pytest.approx(1.5)  # of the cell at (2, 2)
    truth = batch(disparity0=torch.full((1, 4, 4), 9.0))
    losses = stereo_losses(output(log_true=torch.full((1, 2, 2), -4.0)), truth, half, 8.0)
    assert losses["assignment"].item() == losses["raw"].item() == 0
    assert losses["disparity"].item() > 0  # the refinement may find them
    none = where()
    raw = torch.ones(1, 2, 2, requires_grad=True)
    losses = stereo_losses(output(raw_disparity=raw), batch(known0=none, visible0=none), half)
    total = sum(losses.values())
    total.backward()
    assert total.item() == 0 and not raw.grad.any()
