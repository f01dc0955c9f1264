# SPDX-License-Identifier: Apache-2.0
"""Value pyramids: what modules of several levels are made of."""

import pytest
import torch

from quadtree_attention.nn.value_pyramid import plus_parents


@pytest.mark.parametrize("grid", [(6, 8), (5, 8), (5, 7), (1, 1), (7,), (3, 4, 6)])
@pytest.mark.parametrize("channels_first", [False, True])
def test_cells_get_what_their_parents_have(grid, channels_first):
    x = torch.randn(2, *grid, 3)
    above = torch.randn(2, *(-(-size // 2) for size in grid), 3)
    expected = above
    for axis, size in enumerate(grid, start=1):
        expected = expected.repeat_interleave(2, axis).narrow(axis, 0, size)
    expected = x + expected
    if channels_first:  # as a convolution may leave it in memory
        x = x.movedim(-1, 1).contiguous().movedim(1, -1)
    assert torch.equal(plus_parents(x, above), expected)
