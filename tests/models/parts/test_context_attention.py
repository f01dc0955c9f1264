# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from quadtree_attention import OptionError, QuadtreeAttention
from quadtree_attention.models.parts import context_attention
from quadtree_attention.models.parts.context_attention import ATTENTIONS, build_context_attention
from tests.support import raises

pytestmark = pytest.mark.usefixtures("only_reference")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, 16, dtype=torch.float64)


def by_hand(attn, x, context, weigh) -> torch.Tensor:
    """Attention with weights (B, N, T, S) from scores, one head after the other."""
    q, k, v = attn.q_proj(x), attn.k_proj(context), attn.v_proj(context)
    q, k, v = (t.flatten(1, 2).unflatten(-1, (attn.num_heads, -1)) for t in (q, k, v))
    heads = []
    for n in range(attn.num_heads):
        heads.append(weigh(q[:, :, n], k[:, :, n]) @ v[:, :, n])
    return attn.proj(torch.cat(heads, -1)).unflatten(1, x.shape[1:3])


def softmax(q, k):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def kernel(q, k):
    scores = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    return scores / (scores.sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(("name", "weigh"), [("full", softmax), ("linear", kernel)])
def test_against_the_formula(name, weigh):
    attn = build_context_attention(name, 16, 4, {}, dtype=torch.float64)
    x, context = draw(5, 6), draw(3, 7)
    torch.testing.assert_close(attn(x, context), by_hand(attn, x, context, weigh))
    torch.testing.assert_close(attn(x), by_hand(attn, x, x, weigh))


def test_spatial_reduction_is_full_attention_to_the_pooled_map():
    attn = context_attention.PooledAttention(16, 4, pool_size=3, dtype=torch.float64)
    x, context = draw(5, 6), draw(7, 10)
    pooled = torch.nn.functional.adaptive_avg_pool2d(context.movedim(-1, 1), 3).movedim(1, -1)
    expected = by_hand(attn, x, pooled, softmax)
    torch.testing.assert_close(attn(x, context), expected)
    everything = torch.ones(2, 7, 10, dtype=torch.bool)
    torch.testing.assert_close(attn(x, context, context_mask=everything), expected)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_hidden_cells_are_not_seen(name):
    attn = build_context_attention(name, 16, 4, {}, dtype=torch.float64)
    x, context = draw(5, 6), draw(9, 7)
    mask = torch.rand(2, 9, 7) > 0.4
    poisoned = torch.where(mask[..., None], context, torch.nan)
    shown = attn(x, context, context_mask=mask)
    torch.testing.assert_close(attn(x, poisoned, context_mask=mask), shown)
    assert (shown - attn(x, context)).abs().max() > 1e-3


def test_topk_doubles_towards_the_coarse_levels():
    attn = build_context_attention("quadtree_a", 16, 4, {"num_levels": 4})
    assert isinstance(attn, QuadtreeAttention)
    assert (attn.topk, attn.variant) == ((32, 16, 8), "A")


def test_options_an_attention_does_not_have():
    for message, name, heads, options in (
        (r"'linear' accepts no options, got topk=3; leave it out", "linear", 4, {"topk": 3}),
        (r"pool_size, got backend='cpu'; leave", "spatial_reduction", 4, {"backend": "cpu"}),
        (r"did you mean 'quadtree_b'\?", "quadtree_bb", 4, {}),
        (r"got dim=16, num_heads=3; change", "full", 3, {}),
        (r"pool_size must be at least 1, got 0", "spatial_reduction", 4, {"pool_size": 0}),
    ):
        raises(OptionError, message, build_context_attention, name, 16, heads, options)
