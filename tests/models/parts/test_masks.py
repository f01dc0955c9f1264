# SPDX-License-Identifier: Apache-2.0
import torch

from quadtree_attention.models.parts.masks import extent, stack_masks


def test_extent_is_up_to_the_last_visible_cell():
    mask = torch.zeros(3, 5, 7, dtype=torch.bool)
    mask[0, :4, :6] = True
    mask[1, 2, 3] = True
    assert extent(mask).tolist() == [[4, 6], [3, 4], [0, 0]]


def test_a_missing_mask_hides_nothing():
    mask = torch.rand(2, 5, 7) > 0.5
    assert stack_masks(None, None) is None
    assert torch.equal(stack_masks(None, mask), torch.cat([torch.ones_like(mask), mask]))
    assert torch.equal(stack_masks(mask, None), torch.cat([mask, torch.ones_like(mask)]))
