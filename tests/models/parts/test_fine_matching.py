# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

from quadtree_attention import OptionError
from quadtree_attention.models.parts import fine_matching
from quadtree_attention.models.parts.fine_matching import FineWindows, expected_offset
from tests.support import raises


@pytest.mark.parametrize("size", [3, 5])
def test_windows_are_those_of_unfold(size):
    """At the edges too, where they hold zeros."""
    x = torch.randn(2, 3, 9, 14)
    unfolded = F.unfold(x, size, stride=4, padding=size // 2)  # (B, C*size*size, 3*4)
    unfolded = unfolded.unflatten(1, (3, -1)).permute(0, 3, 2, 1)  # (B, cells, size*size, C)
    batch, rows, columns = torch.meshgrid(
        torch.arange(2), torch.arange(3), torch.arange(4), indexing="ij"
    )
    places = (batch.flatten(), 4 * rows.flatten(), 4 * columns.flatten())
    assert torch.equal(fine_matching.gather_windows(x, *places, size), unfolded.flatten(0, 1))


def test_the_offset_is_x_before_y():
    windows0, windows1 = torch.zeros(2, 4, 25, 8).unbind()
    windows0[:, 12] = 30.0
    cells = torch.tensor([[0, 0], [1, 3], [2, 2], [4, 0]])  # row, column
    windows1[torch.arange(4), 5 * cells[:, 0] + cells[:, 1]] = 30.0
    offset, std = expected_offset(windows0, windows1)
    torch.testing.assert_close(offset, torch.tensor([[-1, -1], [0.5, -0.5], [0, 0], [-1, 1]]))
    torch.testing.assert_close(std, torch.full((4,), 2e-5))


def test_the_deviation_of_a_flat_window():
    flat = torch.zeros(1, 25, 8, requires_grad=True)
    offset, std = expected_offset(flat, flat)
    assert offset.abs().max() < 1e-6
    torch.testing.assert_close(std, torch.tensor([2 * 0.5**0.5]))
    std.sum().backward()
    assert flat.grad.isfinite().all()


def test_gradients_reach_the_maps():
    windows = FineWindows(6, 4, 3, dtype=torch.float64)
    fine = torch.randn(2, 4, 9, 14, dtype=torch.float64, requires_grad=True)
    coarse = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    batch, cells = torch.tensor([0, 1, 1]), torch.tensor([5, 11, 11])
    assert torch.autograd.gradcheck(lambda a, b: windows(a, b, batch, cells), (fine, coarse))


@pytest.mark.parametrize("size", [1, 4])
def test_sizes_without_a_centre_or_neighbours(size):
    message = rf"odd number from 3 on, got {size}; the original has 5"
    raises(OptionError, message, FineWindows, 8, 8, size)
