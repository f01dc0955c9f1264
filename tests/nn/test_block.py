# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

from quadtree_attention import QuadtreeBlock
from quadtree_attention.nn.block import DropPath

OPTIONS = {"num_levels": 2, "topk": 3, "dtype": torch.float64}


def test_padding_does_not_reach_the_map():
    """Neither through attention nor through the convolution in the MLP."""
    block = QuadtreeBlock(16, 2, **OPTIONS, value_pyramid="conv", lepe=True)
    x = torch.randn(1, 5, 6, 16, dtype=torch.float64)
    mask = torch.ones(1, 5, 6, dtype=torch.bool)
    canvas = F.pad(x, (0, 0, 0, 4, 0, 3), value=5.0)
    out = block(canvas, mask=F.pad(mask, (0, 4, 0, 3)))[:, :5, :6]
    torch.testing.assert_close(out, block(x), rtol=0, atol=1e-10)


def test_cross_attention_between_unlike_maps():
    block = QuadtreeBlock(16, 2, **OPTIONS)
    x = torch.randn(2, 5, 6, 16, dtype=torch.float64)
    context = torch.randn(2, 9, 3, 16, dtype=torch.float64, requires_grad=True)
    out = block(x, context)
    assert out.shape == x.shape
    out.sum().backward()
    assert context.grad.any()


def test_every_parameter_gets_a_gradient():
    block = QuadtreeBlock(16, 2, **OPTIONS, value_pyramid="conv", lepe=True, extra_relu=True)
    block(torch.randn(2, 5, 6, 16, dtype=torch.float64)).square().sum().backward()
    assert [n for n, p in block.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(("ndim", "grid"), [(1, (13,)), (3, (3, 4, 5))])
def test_other_numbers_of_axes(ndim, grid):
    x = torch.randn(1, *grid, 16, dtype=torch.float64)
    assert QuadtreeBlock(16, 2, ndim=ndim, **OPTIONS)(x).shape == x.shape


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    x = torch.ones(4000, 2, 3)
    drop = DropPath(0.25)
    out = drop(x)
    per_sample = out.flatten(1)
    assert ((per_sample == per_sample[:, :1]).all(1)).all()
    assert (per_sample[:, 0] == 0).float().mean() == pytest.approx(0.25, abs=0.03)
    assert out.mean() == pytest.approx(1.0, abs=0.04)
    assert torch.equal(drop.eval()(x), x)
