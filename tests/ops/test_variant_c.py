# SPDX-License-Identifier: Apache-2.0
"""Variant C against dense attention and merged parts of it, on each backend."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quadtree_attention import (
    DTypeError,
    OptionError,
    ShapeError,
    merge_attentions,
    quadtree_attention,
    quadtree_sdpa,
)
from tests.support import raises

pytestmark = pytest.mark.usefixtures("each_backend")


def dense(q, k, v, mask=None):
    """PyTorch's own attention on maps (B, *grid, N, D)."""
    grid = q.shape[1:-2]
    q, k, v = (x.flatten(1, -3).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask.flatten(1)[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).unflatten(1, grid)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize(
    ("grid", "key_grid", "levels"),
    [((9, 14), (6, 11), 3), ((37,), (29,), 4), ((3, 5, 4), (2, 4, 3), 2)],
)
def test_keeping_all_is_dense_attention(grid, key_grid, levels, dtype, tolerance, exact):
    q = torch.randn(2, *grid, 3, 16).to(dtype)
    k, v = (torch.randn(2, *key_grid, 3, 16).to(dtype) for _ in range(2))
    mask = torch.rand(2, *key_grid) > 0.4
    for masks in ({}, {"key_mask": mask}):
        options = {"num_levels": levels, "topk": 10**6, "variant": "C", "exact_queries": exact}
        out, lse = quadtree_attention(q, k, v, **options, **masks, return_lse=True)
        expected = dense(q.double(), k.double(), v.double(), masks.get("key_mask"))
        assert out.dtype == dtype
        assert (out.double() - expected).abs().max() <= tolerance
        tokens = (x.double().flatten(1, -3) for x in (q, k))
        logits = torch.einsum("btnd,bsnd->bnts", *tokens) / 4  # D ** -0.5
        if masks:
            logits = logits.masked_fill(~mask.flatten(1)[:, None, None], -torch.inf)
        expected = logits.logsumexp(-1).transpose(1, 2).reshape(lse.shape)
        assert (lse.double() - expected).abs().max() <= max(tolerance, 1e-12)


def test_constant_keys_give_the_mean_of_all_values():
    """Every token has the same score; cells past the edge and hidden tokens count for nothing."""
    q, v = torch.randn(1, 5, 7, 2, 8), torch.randn(1, 9, 6, 2, 8)
    mask = torch.rand(1, 9, 6) > 0.3
    k, options = torch.ones(1, 9, 6, 2, 8), {"num_levels": 3, "topk": 3, "variant": "C"}
    out = quadtree_attention(q, k, v, **options, key_mask=mask, scale=0.0)
    mean = v[mask[..., None, None].expand_as(v)].reshape(-1, 2, 8).mean(0)
    torch.testing.assert_close(out, mean.expand_as(out))


def test_an_empty_prefix_changes_nothing():
    q, k, v = torch.randn(3, 1, 4, 6, 2, 8).unbind()
    empty, options = q.new_zeros(1, 0, 2, 8), {"num_levels": 2, "topk": 2, "variant": "C"}
    expected = quadtree_attention(q, k, v, **options)
    keys = {"prefix_keys": empty, "prefix_values": empty}
    assert torch.equal(quadtree_attention(q, k, v, **options, **keys), expected)
    out, prefix_out = quadtree_attention(q, k, v, **options, **keys, prefix_queries=empty)
    assert torch.equal(out, expected) and prefix_out.shape == (1, 0, 2, 8)


def test_grouped_queries_share_key_heads():
    q = torch.randn(1, 6, 9, 6, 8)
    k, v = torch.randn(2, 1, 6, 9, 2, 8).unbind()
    options = {"num_levels": 2, "topk": 3, "variant": "C"}
    shared = [x.repeat_interleave(3, dim=-2) for x in (k, v)]
    expected = quadtree_attention(q, *shared, **options)
    torch.testing.assert_close(quadtree_attention(q, k, v, **options), expected)
    other = (x[..., :1, :].expand(1, 6, 9, 4, 8) for x in (k, v))
    raises(ShapeError, "multiple", quadtree_attention, q, *other, **options)


def test_merging_is_associative():
    q = torch.randn(1, 5, 6, 2, 8, dtype=torch.float64)
    parts = [torch.randn(2, 1, 4, n, 2, 8, dtype=torch.float64) for n in (3, 5, 2)]
    options = {"num_levels": 2, "topk": 10**6, "variant": "C", "return_lse": True}
    outs, lses = zip(*(quadtree_attention(q, *part, **options) for part in parts), strict=True)
    whole = quadtree_attention(q, *torch.cat(parts, dim=3), **options)
    first, last = merge_attentions(outs[:2], lses[:2]), merge_attentions(outs[1:], lses[1:])
    left = merge_attentions(*zip(first, (outs[2], lses[2]), strict=True))
    right = merge_attentions(*zip((outs[0], lses[0]), last, strict=True))
    for merged in (left, right, merge_attentions(outs, lses)):
        torch.testing.assert_close(merged, whole, rtol=0, atol=1e-12)


def test_a_part_that_saw_nothing_counts_for_nothing():
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2)
    empty = (torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    merged = merge_attentions(*zip((out, lse), empty, strict=True))
    torch.testing.assert_close(merged, (out, lse))
    out.requires_grad_()  # dense attention gives NaN for a fully masked row
    nan = merge_attentions((out, torch.full_like(out, torch.nan)), (lse, empty[1]))[0]
    torch.testing.assert_close(nan, out)
    torch.testing.assert_close(torch.autograd.grad(nan.sum(), out)[0], torch.ones_like(out))
    both = merge_attentions(*zip(empty, empty, strict=True))
    assert both[0].eq(0).all() and both[1].eq(-torch.inf).all()


def test_parts_that_are_not_of_floating_point():
    out, lse = torch.randn(1, 2, 4), torch.randn(1, 2)
    for part in ((out.int(), lse), (out, lse.int()), (out.tolist(), lse), (out, None)):
        raises(DTypeError, "floating-point", merge_attentions, *zip((out, lse), part, strict=True))


@pytest.mark.parametrize("variant", ["A", "B"])
def test_lse_of_one_level_of_the_other_variants(variant):
    q, k, v = torch.randn(3, 1, 5, 6, 2, 8).unbind()
    options = {"topk": 1, "return_lse": True}
    one = quadtree_attention(q, k, v, num_levels=1, variant=variant, **options)
    other = quadtree_attention(q, k, v, num_levels=1, variant="C", **options)
    torch.testing.assert_close(one, other)
    options |= {"num_levels": 2, "variant": variant}
    raises(OptionError, "return_lse needs variant 'C'", quadtree_attention, q, k, v, **options)


def test_sdpa_is_the_same_function_on_sequences():
    grid, key_grid = (6, 9), (5, 8)
    q = torch.randn(2, *grid, 4, 8)
    k, v = torch.randn(2, 2, *key_grid, 4, 8).unbind()
    mask = torch.rand(2, *key_grid) > 0.3
    options = {"num_levels": 3, "topk": 3}
    expected = quadtree_attention(q, k, v, variant="C", key_mask=mask, return_lse=True, **options)
    flat = [x.flatten(1, 2).transpose(1, 2) for x in (q, k, v)]
    options |= {"grid": grid, "key_grid": key_grid, "key_mask": mask.flatten(1)}
    found = quadtree_sdpa(*flat, return_lse=True, **options)
    for x, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(x, wanted.flatten(1, 2).transpose(1, 2))


@pytest.mark.parametrize("masked", [False, True])
def test_forest_that_keeps_all_is_dense_attention(masked):
    grids, key_grids = [(3, 5), (4, 2), (1, 7)], [(2, 6), (5, 3)]
    leaf = {"dtype": torch.float64, "requires_grad": True}
    q = torch.randn(2, 4, 2 + 15 + 8 + 7, 8, **leaf)
    k, v = (torch.randn(2, 2, 2 + 12 + 15, 8, **leaf) for _ in range(2))
    mask = torch.rand(2, 29) > 0.3 if masked else None
    options = {"num_levels": 3, "topk": 10**6, "prefix": 2, "key_mask": mask, "return_lse": True}
    out, lse = quadtree_sdpa(q, k, v, grid=grids, key_grid=key_grids, **options)
    shown = None if mask is None else mask[:, None, None]
    expected = F.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)
    assert lse.shape == out.shape[:-1]


def test_queries_of_a_forest_choose_among_all_grids():
    """A forest of the halves of a map has the cells of the map, if they lie one after the other."""
    q, k, v = torch.randn(3, 1, 2, 8 * 4, 8).unbind()
    options = {"num_levels": 2, "topk": 2}
    whole = quadtree_sdpa(q, k, v, grid=(8, 4), **options)
    halves = quadtree_sdpa(q, k, v, grid=[(4, 4), (4, 4)], **options)
    torch.testing.assert_close(halves, whole)


def test_default_levels_of_sequences():
    q = torch.randn(1, 1, 32 * 32, 4)
    assert quadtree_sdpa(q, q, q, grid=(32, 32), topk=4).shape == q.shape
    assert quadtree_sdpa(q, q, q, grid=np.array([32, 32]), topk=4).shape == q.shape
    few = (q[:, :, :12],) * 3  # one level, which is dense attention
    found, expected = quadtree_sdpa(*few, grid=(3, 4)), F.scaled_dot_product_attention(*few)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ShapeError, r"0 \+ 3x4 = 12 tokens, got 20", {"grid": (3, 4)}),
        (ShapeError, r"2 \+ 4x5 = 22 tokens", {"grid": (4, 5), "prefix": 2}),
        (OptionError, "size of a grid", {"grid": (4, 5, 1, 1)}),
        (OptionError, "size of a grid", {"grid": [(4, 5), (3,)]}),
        (OptionError, "size of a grid", {"grid": "28"}),
        (OptionError, "size of a grid", {"grid": [(4.5, 5)]}),
        (OptionError, "same number of axes", {"grid": (4, 5), "key_grid": (20,)}),
        (OptionError, "topk must be an int", {"grid": (4, 5), "topk": None}),
        (OptionError, "topk must be an int", {"grid": (4, 5), "topk": 1.5}),
        (OptionError, "topk must be an int", {"grid": (4, 5), "topk": "8"}),
        (OptionError, "prefix must be", {"grid": (4, 5), "prefix": -1}),
        (OptionError, "prefix must be", {"grid": [(19,)], "prefix": True}),
        (OptionError, "scale must be", {"grid": (4, 5), "scale": True}),
        (OptionError, "num_levels must be at most", {"grid": (4, 5), "num_levels": 9}),
        (DTypeError, "key_mask", {"grid": (4, 5), "key_mask": torch.ones(1, 20)}),
        (ShapeError, "key_mask", {"grid": (4, 5), "key_mask": torch.ones(1, 19).bool()}),
    ],
)  # fmt: skip
def test_bad_sequences(error, match, options):
    raises(error, match, quadtree_sdpa, *torch.randn(3, 1, 2, 20, 4), **options)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (OptionError, "belong to variant 'B'", {"level_weights": torch.zeros(2)}),
        (OptionError, "belong together", {"prefix_keys": torch.randn(1, 2, 2, 8)}),
        (ShapeError, r"\(1, P, 2, 8\)", {"prefix_queries": torch.randn(1, 2, 2, 4)}),
        (ShapeError, "same tokens", {
            "prefix_keys": torch.randn(1, 2, 2, 8), "prefix_values": torch.randn(1, 3, 2, 8)}),
        (DTypeError, "prefix_queries", {"prefix_queries": torch.randn(1, 2, 2, 8).double()}),
        (DTypeError, "prefix_keys must be", {"prefix_keys": [1], "prefix_values": [1]}),
        (OptionError, "belong to variant 'C'", {"variant": "B", "exact_queries": True}),
    ],
)  # fmt: skip
def test_bad_options(error, match, options):
    options = {"num_levels": 2, "topk": 2, "variant": "C"} | options
    raises(error, match, quadtree_attention, *torch.randn(3, 1, 4, 6, 2, 8), **options)


@pytest.mark.parametrize("wrong", [None, [1], torch.randn(4)])
def test_bad_tensors(wrong):
    x, options = torch.randn(1, 4, 6, 2, 8), {"num_levels": 2, "topk": 2}
    for tensors in ((wrong, x, x), (x, wrong, x), (x, x, wrong)):
        for variant in "ABC":
            call = partial(quadtree_attention, *tensors, **options, variant=variant)
            raises((DTypeError, ShapeError), "must be", call)
