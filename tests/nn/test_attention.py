# SPDX-License-Identifier: Apache-2.0
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from quadtree_attention import (
    DTypeError,
    OptionError,
    QuadtreeAttention,
    ShapeError,
    quadtree_attention,
)
from tests.support import raises

KINDS = {
    "plain": {},
    "variant A": {"variant": "A"},
    "backbone": {"value_pyramid": "conv", "lepe": True, "qkv_bias": True},
    "relu": {"value_pyramid": "conv", "value_act": "relu"},
}


def build(kind: str, dim=16, heads=2, **changes) -> QuadtreeAttention:
    options = {"num_levels": 3, "topk": 3, "dtype": torch.float64} | KINDS[kind] | changes
    return QuadtreeAttention(dim, heads, **options)


@pytest.mark.parametrize(("ndim", "grid"), [(1, (13,)), (2, (7, 9)), (3, (3, 4, 5))])
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind, ndim, grid):
    module, x = build(kind, ndim=ndim), torch.randn(2, *grid, 16, dtype=torch.float64)
    out = module(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    without = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("kind", ["plain", "variant A"])
def test_is_the_op_between_projections(kind):
    module = build(kind)
    x = torch.randn(1, 6, 9, 16, dtype=torch.float64)
    context = torch.randn(1, 5, 4, 16, dtype=torch.float64)
    projected = module.q_proj(x), module.k_proj(context), module.v_proj(context)
    options = {"variant": module.variant, "level_weights": module.level_logits}
    maps = (y.unflatten(-1, (2, 8)) for y in projected)
    out = quadtree_attention(*maps, num_levels=3, topk=3, **options)
    torch.testing.assert_close(module(x, context), module.proj(out.flatten(-2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [(0, 0), (4, 8)])
def test_a_larger_masked_canvas_changes_nothing(kind, before):
    module = build(kind)
    x = torch.randn(2, 5, 7, 16, dtype=torch.float64)
    mask = torch.rand(2, 5, 7) > 0.2
    pads = (0, 0, before[1], 3, before[0], 6)
    canvas = F.pad(x, pads, value=torch.nan)
    canvas_mask = F.pad(mask, pads[2:], value=False)
    out = module(x, mask=mask)
    big = module(canvas, mask=canvas_mask)
    window = big[:, before[0] : before[0] + 5, before[1] : before[1] + 7]
    shown = mask[..., None].expand_as(out)
    torch.testing.assert_close(window[shown], out[shown], rtol=0, atol=1e-10)
    assert not torch.allclose(module(x)[shown], out[shown])  # the mask does something


@pytest.mark.parametrize("kind", ["plain", "variant A", "relu"])
def test_a_context_with_hidden_columns_is_a_narrower_context(kind):
    module = build(kind)
    x, context = torch.randn(2, 1, 6, 9, 16, dtype=torch.float64).unbind()
    mask = (torch.arange(9) < 5).expand(1, 6, 9)
    got = module(x, context.masked_fill(~mask[..., None], torch.nan), context_mask=mask)
    torch.testing.assert_close(got, module(x, context[:, :, :5]), rtol=0, atol=1e-10)
    assert not torch.allclose(module(x, context), got)


def test_dropout_drops_in_training_only():
    module = build("plain", proj_drop=0.5)
    x = torch.randn(1, 6, 9, 16, dtype=torch.float64)
    assert (module(x) == 0).any()
    assert not (module.eval()(x) == 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_as_exact_as_plain_attention(kind, dtype):
    """Twice the error of the same projections around PyTorch's attention, all cells kept."""
    module = build(kind, dim=32, heads=4, num_levels=2, topk=10**6, dtype=torch.float32)
    x = torch.randn(1, 10, 14, 32)

    def plain(m: QuadtreeAttention, x: torch.Tensor) -> torch.Tensor:
        heads = (p(x).flatten(1, 2).unflatten(-1, (4, 8)).transpose(1, 2)
                 for p in (m.q_proj, m.k_proj, m.v_proj))  # fmt: skip
        out = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return m.proj(out)

    with torch.autocast("cpu", dtype=dtype):
        got, got_plain = module(x), plain(module, x)
    assert got.dtype == dtype
    module, x = module.double(), x.double()
    truth, truth_plain = module(x), plain(module, x)
    floor = (got_plain - truth_plain).norm() / truth_plain.norm()
    assert (got - truth).norm() / truth.norm() <= 2 * floor


def test_meta_device_and_repr():
    module = build("backbone", device="meta")
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert "num_levels=3, topk=(3, 3), variant='B'" in repr(module)
    assert module(torch.empty(1, 5, 6, module.dim, device="meta")).shape == (1, 5, 6, module.dim)


BAD = [
    ({"dim": 15}, "dim must be a positive multiple of num_heads, got dim=15, num_heads=2"),
    ({"heads": 0}, "dim must be a positive multiple of num_heads, got dim=16, num_heads=0"),
    ({"ndim": 4}, "ndim must be 1, 2 or 3, got ndim=4"),
    ({"num_levels": 0}, "num_levels must be an integer of at least 1"),
    ({"topk": [1, 2, 3]}, "topk must have one entry per level that selects"),
    ({"variant": "b"}, "variant must be 'A', 'B' or 'C', got variant='b'"),
    ({"value_pyramid": "max"}, "value_pyramid must be 'mean' or 'conv', got value_pyramid='max'"),
    ({"value_act": "relu"}, "value_act belongs to value_pyramid='conv', got value_act='relu'"),
    ({"value_act": "silu", "value_pyramid": "conv"}, "value_act must be one of gelu, relu, got"),
    ({"variant": "A", "lepe": True}, "lepe=True weighs the position encoding by the level weights"),
]


@pytest.mark.parametrize(("options", "text"), BAD, ids=[t[:40] for _, t in BAD])
def test_bad_options(options, text):
    raises(OptionError, re.escape(text), build, "plain", **options)


def test_bad_inputs():
    module = build("plain")
    x = torch.randn(2, 5, 6, 16, dtype=torch.float64)
    mask = torch.ones(2, 5, 6, dtype=torch.bool)
    text = "x must be (batch, *, *, 16), channels last, with at least one cell, got x.shape=(2, 16"
    raises(ShapeError, re.escape(text), module, x.permute(0, 3, 1, 2))
    raises(DTypeError, "x must be a torch.Tensor, got NoneType", module, None)
    raises(DTypeError, "context must be a torch.Tensor, got list", module, x, x.tolist())
    raises(ShapeError, "x and context must have the same batch size", module, x, x[:1])
    raises(OptionError, "needs a context, got context=None", module, x, context_mask=mask)
    raises(ShapeError, r"mask must be \(batch, \*grid\) of x, that", module, x, mask=mask[:, :4])
    raises(OptionError, "adds the value map of x to its own cells", build("backbone"), x, x)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("variant", ["A", "B"])
def test_checkpointing_gives_the_same_gradients(backend, variant):
    """Recomputed tensors can be read once only."""
    if backend == "cpu":
        pytest.importorskip("numba", reason="the cpu backend needs numba")
    kind = "backbone" if variant == "B" else "variant A"
    layer = build(kind, backend=backend, dtype=torch.float32)
    grads = []
    for run in (layer, partial(checkpoint, layer, use_reentrant=False)):
        torch.manual_seed(1)
        x = torch.randn(1, 9, 12, 16, requires_grad=True)
        layer.zero_grad()
        run(x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)
