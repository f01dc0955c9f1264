# SPDX-License-Identifier: Apache-2.0
"""Attention along rows: against full attention, and what position and other rows do."""

import pytest
import torch

from quadtree_attention.errors import OptionError
from quadtree_attention.models.parts import row_attention
from quadtree_attention.models.parts.row_attention import RowAttention, RowTransformer, turned
from tests.support import raises

pytestmark = pytest.mark.usefixtures("one_thread")


def maps(*widths: int, dim: int = 16, height: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, height, width, dim, dtype=torch.float64) for width in widths]


@pytest.mark.parametrize("variant", ["quadtree_a", "quadtree_b"])
@pytest.mark.parametrize("width", [1, 7, 24, 37])
def test_all_kept_is_full_attention(variant, width):
    """The finest message sees every cell if every cell is kept; A hands all its weight down."""
    x, context = maps(width, width + 3)
    full = RowAttention(16, 2, "full", dtype=torch.float64)
    ours = RowAttention(16, 2, variant, num_levels=3, topk=1000, dtype=torch.float64)
    ours.load_state_dict(full.state_dict(), strict=False)
    if variant == "quadtree_b":  # the finest level alone
        with torch.no_grad():
            ours.level_logits.copy_(torch.tensor([-1e3, -1e3, 0.0]))
        assert torch.allclose(ours(x, context), full(x, context), atol=1e-12)
        assert torch.allclose(ours(x), full(x), atol=1e-12)
    else:  # its levels multiply; with one level they are full attention
        ours.num_levels = 1
        assert torch.allclose(ours(x, context), full(x, context), atol=1e-12)


@pytest.mark.parametrize("attention", ["full", "quadtree_a", "quadtree_b"])
def test_rows_do_not_see_each_other(attention):
    x, context = maps(20, 20)
    module = RowAttention(16, 2, attention, num_levels=3, topk=2, dtype=torch.float64)
    before = module(x, context)
    context[:, 1] += 1
    after = module(x, context)
    changed = (before - after).abs().amax(dim=(0, 2, 3)) > 1e-9
    assert changed.tolist() == [False, True, False]


@pytest.mark.parametrize("attention", ["full", "quadtree_a", "quadtree_b"])
def test_a_cpu_takes_a_few_rows_at_a_time(attention, monkeypatch):
    x, context = maps(20, 23, height=5)
    module = RowAttention(16, 2, attention, dtype=torch.float64)
    taken = []
    module.q_proj.register_forward_hook(lambda _, inputs, __: taken.append(len(inputs[0])))
    whole = module(x, context)
    monkeypatch.setattr(row_attention, "CPU_NUMBERS", 20 * 16 * 4 + 1)
    assert torch.equal(module(x, context), whole) and taken == [10, 10]  # gradients need all
    with torch.no_grad():
        few = module(x, context)
        with torch.autocast("cpu", torch.bfloat16):
            half = module.float()(x.float(), context.float())
    assert torch.allclose(few, whole, atol=1e-12) and taken[2:] == [4, 4, 2] * 2
    assert half.dtype == torch.bfloat16
    monkeypatch.setattr(row_attention, "CPU_NUMBERS", 1)
    with torch.no_grad():
        module(x.float(), context.float())
    assert taken[8:] == [1] * 10


def test_both_views_are_treated_alike():
    (x,) = maps(24)
    options = {"mlp_ratio": 2.0, "options": {"num_levels": 3, "topk": 2}}
    model = RowTransformer(16, 2, 2, **options, dtype=torch.float64)
    swapped = torch.cat(x.chunk(2)[::-1])
    assert torch.allclose(model(swapped), torch.cat(model(x).chunk(2)[::-1]))
    model.grad_checkpointing = True
    assert torch.allclose(model(x), model.eval()(x))


@pytest.mark.parametrize("attention", ["full", "quadtree_a", "quadtree_b"])
def test_gradients(attention):
    x, context = maps(6, 6, dim=8, height=1)
    module = RowAttention(8, 2, attention, num_levels=2, topk=2, dtype=torch.float64)
    inputs = x[:1].requires_grad_(), context[:1].requires_grad_()
    assert torch.autograd.gradcheck(module, inputs)


def test_what_is_refused():
    message = r"multiple of 4 for the position.*dim=12, num_heads=2"
    raises(OptionError, message, RowAttention, 12, 2)
    message = "one of full, quadtree_a, quadtree_b, got"
    raises(OptionError, message, RowAttention, 16, 2, "linear")


@pytest.mark.parametrize("dim", [4, 8, 24])
def test_turned_is_a_rotation_by_the_column(dim):
    """By waves of 1 to 256 cells per radian in equal ratios; half of the channels stay."""
    torch.manual_seed(0)
    x = torch.randn(2, 37, 3, dim, dtype=torch.float64)
    pairs = dim // 4
    expected = x.clone()
    for i in range(pairs):
        wave = 256 ** (i / max(1, pairs - 1))
        number = torch.complex(x[..., i], x[..., pairs + i])
        angle = torch.arange(37, dtype=torch.float64)[:, None] / wave
        number = number * torch.polar(torch.ones_like(angle), angle)
        expected[..., i], expected[..., pairs + i] = number.real, number.imag
    assert torch.allclose(turned(x), expected, atol=1e-12)


@torch.no_grad()
def test_views_go_through_the_mlp_one_by_one_on_a_cpu(monkeypatch):
    block = row_attention.RowBlock(16, 2, 2.0, {"attention": "full"})
    x, sizes = torch.randn(4, 5, 6, 16), []
    assert block.mlp is not None
    block.mlp.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    together = block(x)
    monkeypatch.setattr(row_attention, "CPU_NUMBERS", 1)
    torch.testing.assert_close(block(x), together)
    assert sizes == [4, 2, 2]
