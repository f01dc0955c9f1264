# SPDX-License-Identifier: Apache-2.0
"""Value pyramids: what modules of several levels are made of."""

import pytest
import torch

from quadtree_attention.nn.value_pyramid import norm_of_maps, plus_parents


@pytest.mark.parametrize("grid", [(6, 8), (5, 8), (5, 7), (1, 1), (7,), (3, 4, 6)])
@pytest.mark.parametrize("channels_first", [False, True])
def test_cells_get_what_their_parents_have(grid, channels_first):
    """And parents the gradients of their children."""
    x = torch.randn(2, *grid, 3, dtype=torch.float64)
    parents = [-(-size // 2) for size in grid]
    above = torch.randn(2, *parents, 3, dtype=torch.float64, requires_grad=True)
    expected = above
    for axis, size in enumerate(grid, start=1):
        expected = expected.repeat_interleave(2, axis).narrow(axis, 0, size)
    expected = x + expected
    if channels_first:  # as a convolution may leave it in memory
        x = x.movedim(-1, 1).contiguous().movedim(1, -1)
    got, dy = plus_parents(x, above), torch.randn_like(x)
    assert torch.equal(got, expected)
    gradients = (torch.autograd.grad(y, above, dy) for y in (got, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("grid", [(6, 9), (1, 1), (11,), (3, 4, 5)])
def test_the_norm_is_that_of_its_formula(grid, dtype):
    """With and without a mask that hides nothing, values and gradients, also far from zero."""
    x = (torch.randn(2, *grid, 16, dtype=torch.float64) + 20).to(dtype)
    weight, bias, dy = torch.randn(16), torch.randn(16), torch.randn(x.shape, dtype=torch.float64)
    inputs = [t.to(dtype).double().requires_grad_() for t in (x, weight, bias)]

    wide, scale, shift = inputs
    axes = tuple(range(1, x.ndim))
    deviation = wide - wide.mean(dim=axes, keepdim=True)
    variance = deviation.square().mean(dim=axes, keepdim=True)
    expected = deviation / (variance + 1e-5).sqrt() * scale + shift
    expected_grads = torch.autograd.grad(expected, inputs, dy)

    tolerance = {torch.float32: 2e-4, torch.float64: 1e-10, torch.bfloat16: 4e-2}[dtype]
    for visible in (None, torch.ones(x.shape[:-1], dtype=torch.bool)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        got = norm_of_maps(leaves[0], visible, *leaves[1:], 1e-5)
        assert got.dtype == dtype
        grads = torch.autograd.grad(got, leaves, dy.to(dtype))
        for a, b in zip((got, *grads), (expected, *expected_grads), strict=True):
            atol = tolerance * float(b.detach().abs().max())
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=atol)
