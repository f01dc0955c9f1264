# SPDX-License-Identifier: Apache-2.0
"""The fused norms against torch's, in Triton's interpreter here and for real on a GPU."""

from functools import partial
from itertools import repeat

import pytest
import torch
import torch.nn.functional as F

from quadtree_attention import use_backend
from quadtree_attention.nn import QuadtreeBlock
from quadtree_attention.nn.norm import TokenNorm
from quadtree_attention.nn.value_pyramid import by_parent
from quadtree_attention.ops.norms.functional import can_fuse, layer_norm, map_norm
from tests.interpreter import kernels
from tests.ops.cases import compare

SHAPES = ((2, 5, 6, 24), (1, 3, 7, 8), (3, 1, 1, 5))
LARGE_SHAPES = ((64, 56, 56, 64), (1, 201, 335, 32), (2, 14, 14, 512), (2, 25, 42, 1000))
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}
FLOATS = [torch.float32] * 3


def numbers(shape, device, offset=5.0):
    """Far from zero, so that statistics made from plain squares would be off."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=rng) * 2 + offset
    weight, bias = torch.randn(2, shape[-1], generator=rng).unbind()
    return [t.to(device) for t in (x, weight, bias)]


def check_layer_norm(shape, device):
    compare(
        lambda x, w, b: layer_norm(x, w, b, 1e-6, torch.float32),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-6),
        numbers(shape, device),
        FLOATS,
        of_gradients=3e-5,
    )


def check_map_norm(shape, device):
    _, height, width, _ = shape

    def plain(x, weight, bias, act, gather):
        normed = F.group_norm(x.movedim(-1, 1), 1, weight, bias, 1e-5).movedim(1, -1)
        y = ACTIVATIONS[act](normed)
        return by_parent(y, ((height + 1) // 2, (width + 1) // 2)).flatten(-2) if gather else y

    for act in ACTIVATIONS:
        for gather in (False, True):
            fused = partial(map_norm, eps=1e-5, activation=act, by_parent=gather)
            plainly = partial(plain, act=act, gather=gather)
            compare(fused, plainly, numbers(shape, device), FLOATS, of_gradients=3e-5)


def check_block(device):
    """A whole block by fused kernels against the same block in float64 by plain PyTorch."""
    torch.manual_seed(0)
    options = {"num_levels": 2, "topk": 2, "value_pyramid": "conv", "lepe": True, "mlp_ratio": 2}
    block = QuadtreeBlock(16, 2, **options).to(device)
    x = torch.randn(1, 3, 4, 16, device=device)
    assert can_fuse(x)
    y = block(x)
    grads = torch.autograd.grad(y.square().sum(), list(block.parameters()))
    exact = block.double()
    with use_backend("reference"):
        truth = exact(x.double())
    true = torch.autograd.grad(truth.square().sum(), list(exact.parameters()))
    for x, like, tolerance in ((y, truth, 1e-5), *zip(grads, true, repeat(1e-4))):
        assert (x - like).abs().max() < tolerance * like.abs().max().clamp(min=1e-6)


@kernels(check_layer_norm, zip(SHAPES), zip(SHAPES + LARGE_SHAPES))
def test_layer_norm(run):
    run()


@kernels(check_map_norm, zip(SHAPES), zip(SHAPES + LARGE_SHAPES))
def test_map_norm(run):
    run()


@kernels(check_block)
def test_block(run):
    run()


def test_a_cpu_does_without():
    assert not can_fuse(torch.zeros(2, 3))


def test_token_norm_is_a_layer_norm():
    x = torch.randn(2, 5, 24)
    norm = TokenNorm(24, 1e-6)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (24,), norm.weight, norm.bias, 1e-6))
    assert set(norm.state_dict()) == {"weight", "bias"}


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [True, False])
def test_dtype_under_autocast(wide):
    norm = TokenNorm(24, before_linear=not wide).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        y = norm(torch.randn(2, 5, 24, device="cuda"))
    assert y.dtype == (torch.float32 if wide else torch.bfloat16)


@pytest.mark.gpu
def test_no_fused_norm_where_the_reference_is_asked_for():
    x = torch.zeros(2, 8, device="cuda")
    assert can_fuse(x)
    with use_backend("reference"):
        assert not can_fuse(x)
    assert not can_fuse(x.double())
