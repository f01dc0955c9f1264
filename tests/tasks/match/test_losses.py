# SPDX-License-Identifier: Apache-2.0
"""Losses of the matcher, against numbers worked out by hand."""

import math

import pytest
import torch

from quadtree_attention.models.parts.coarse_matching import CoarseMatches
from quadtree_attention.tasks.match.losses import coarse_loss, fine_loss


def pairs(*cells):
    """Matches (sample, cell of map 0, cell of map 1)."""
    columns = torch.tensor(cells, dtype=torch.long).reshape(-1, 3).unbind(dim=1)
    return CoarseMatches(*columns, torch.zeros(len(cells)))


def focal(p):
    return -0.25 * (1 - p) ** 2 * math.log(p)


def test_coarse_loss_by_hand():
    confidence = torch.tensor([[[0.9, 0.2], [0.1, 0.5]]])
    expected = (focal(0.9) + focal(0.5)) / 2 + (focal(0.8) + focal(0.9)) / 2
    true, mask = pairs((0, 0, 0), (0, 1, 1)), torch.tensor([[True, False]])
    assert coarse_loss(confidence, true).item() == pytest.approx(expected, rel=1e-5)
    found = coarse_loss(confidence, true, mask0=mask)  # masked cells do not count
    assert found.item() == pytest.approx(focal(0.9) + focal(0.8), rel=1e-5)
    both = coarse_loss(confidence, true, mask0=mask, mask1=mask)
    assert both.item() == pytest.approx(focal(0.9), rel=1e-5)
    confidence = torch.full((1, 2, 2), 0.3, requires_grad=True)
    loss = coarse_loss(confidence, pairs())
    assert loss.item() == pytest.approx(focal(0.7), rel=1e-5)
    loss.backward()
    assert confidence.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_certainty_of_0_and_1_stays_finite(dtype):
    confidence = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]], dtype=dtype, requires_grad=True)
    loss = coarse_loss(confidence, pairs((0, 0, 0), (0, 1, 1)))
    loss.backward()
    assert loss.isfinite() and confidence.grad.isfinite().all()


def test_fine_loss():
    offset = torch.tensor([[0.5, 0.0], [0.0, 0.2]])
    truth = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    std = torch.tensor([1.0, 0.5])  # certainties 1 and 2: weights 2/3 and 4/3
    expected = (0.25 * 2 / 3 + 0.04 * 4 / 3) / 2
    assert fine_loss(offset, std, truth).item() == pytest.approx(expected)
    offset = torch.tensor([[0.5, 0.0], [0.9, 0.9]], requires_grad=True)
    truth = torch.tensor([[0.0, 0.0], [1.2, 0.0]])
    loss = fine_loss(offset, torch.ones(2), truth)
    assert loss.item() == pytest.approx(0.25)
    loss.backward()
    assert offset.grad[1].tolist() == [0.0, 0.0]
    std = torch.tensor([1.0, 0.5], requires_grad=True)
    offset = torch.zeros(2, 2, requires_grad=True)
    fine_loss(offset, std, torch.full((2, 2), 0.1)).backward()
    assert std.grad is None
    offset = torch.zeros(0, 2, requires_grad=True)
    loss = fine_loss(offset, torch.zeros(0), torch.zeros(0, 2))
    loss.backward()
    assert loss.item() == 0.0 and offset.grad is not None
