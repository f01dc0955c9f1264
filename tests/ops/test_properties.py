# SPDX-License-Identifier: Apache-2.0
"""What must hold for every problem, whatever computes it."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from quadtree_attention import quadtree_attention
from tests.ops.problems import Drawn, problems

pytestmark = pytest.mark.usefixtures("each_backend")
EVERYTHING = 10**6
examples = settings(max_examples=50, deadline=None, derandomize=True)


def dense(q, k, v, key_mask):
    """Attention over all tokens, grids flattened: (B, *grid, N, D) -> (B, T, N, D)"""
    q, k, v = (x.flatten(1, -3).transpose(1, 2) for x in (q, k, v))
    mask = None if key_mask is None else key_mask.flatten(1)[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


@examples
@given(problems())
def test_constant_values_come_back(drawn: Drawn):
    q, k, v = drawn.tensors()
    constant = v[:, *(0,) * len(drawn.key_grid)]  # one vector per batch entry and head
    v = constant.reshape(drawn.batch, *(1,) * len(drawn.key_grid), drawn.heads, -1).expand_as(v)
    out = quadtree_attention(q, k, v, **drawn.options())
    expected = constant.reshape(drawn.batch, *(1,) * len(drawn.grid), drawn.heads, -1)
    torch.testing.assert_close(out, expected.expand_as(out), rtol=0, atol=1e-12)


@examples
@given(problems())
def test_one_level_is_dense_attention(drawn: Drawn):
    drawn = dataclasses.replace(drawn, num_levels=1, topk=())
    q, k, v = drawn.tensors()
    out = quadtree_attention(q, k, v, **drawn.options()).flatten(1, -3)
    torch.testing.assert_close(out, dense(q, k, v, drawn.key_mask), rtol=0, atol=1e-12)


@examples
@given(problems())
def test_finest_message_of_b_is_dense_attention_when_all_is_kept(drawn: Drawn):
    drawn = dataclasses.replace(drawn, variant="B")
    q, k, v = drawn.tensors()
    finest_only = torch.full((drawn.num_levels,), -1e9, dtype=torch.float64)
    finest_only[-1] = 0
    options = drawn.options(topk=EVERYTHING, level_weights=finest_only)
    out = quadtree_attention(q, k, v, **options).flatten(1, -3)
    torch.testing.assert_close(out, dense(q, k, v, drawn.key_mask), rtol=0, atol=1e-12)


@examples
@given(problems(), st.booleans())
def test_weights_of_a_sum_to_one(drawn: Drawn, keep_all: bool):
    drawn = dataclasses.replace(drawn, variant="A")
    q, k, _ = drawn.tensors()
    keys = k[0, ..., 0, 0].numel()
    one_hot = torch.eye(keys, dtype=torch.float64).reshape(*drawn.key_grid, 1, keys)
    v = one_hot.expand(drawn.batch, *drawn.key_grid, drawn.heads, keys)
    topk = EVERYTHING if keep_all else drawn.topk
    weights = quadtree_attention(q, k, v, **drawn.options(topk=topk))  # (B, *grid, N, keys)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    if drawn.key_mask is not None:
        hidden = ~drawn.key_mask.flatten(1)
        hidden = hidden.reshape(drawn.batch, *(1,) * (weights.ndim - 2), keys)
        assert (weights.masked_select(hidden) == 0).all()


@examples
@given(problems())
def test_permuting_batch_and_heads_permutes_the_result(drawn: Drawn):
    drawn = dataclasses.replace(drawn, batch=2)
    q, k, v = drawn.tensors()
    options = drawn.options()
    out = quadtree_attention(q, k, v, **options)
    heads = torch.randperm(drawn.heads, generator=torch.Generator().manual_seed(drawn.seed))
    for name in ("query_mask", "key_mask"):
        options[name] = None if options[name] is None else options[name].flip(0)
    swapped = quadtree_attention(*(x.flip(0)[..., heads, :] for x in (q, k, v)), **options)
    torch.testing.assert_close(swapped, out.flip(0)[..., heads, :], rtol=0, atol=1e-12)


def embed(x: torch.Tensor, ndim: int, before: list[int], after: list[int], fill: float):
    """Puts the map (B, *grid, ...) into a larger canvas."""
    pads = [0, 0] * (x.ndim - 1 - ndim)
    for a, b in zip(reversed(before), reversed(after), strict=True):
        pads += [a, b]
    return F.pad(x, pads, value=fill)


@settings(examples, max_examples=80)
@given(problems(), st.data())
def test_a_larger_masked_canvas_changes_nothing(drawn: Drawn, data: st.DataObject):
    ndim, cell = len(drawn.grid), 2 ** (drawn.num_levels - 1)
    whole_cells = st.lists(st.integers(0, 2), min_size=ndim, max_size=ndim)
    anything = st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim)
    q_offset, k_offset = ([cell * o for o in data.draw(whole_cells)] for _ in range(2))
    q_after, k_after = data.draw(anything), data.draw(anything)

    small = [x.requires_grad_() for x in drawn.tensors()]
    ones = torch.ones(drawn.batch, *drawn.grid, dtype=torch.bool)
    key_ones = torch.ones(drawn.batch, *drawn.key_grid, dtype=torch.bool)
    query_mask = ones if drawn.query_mask is None else drawn.query_mask
    key_mask = key_ones if drawn.key_mask is None else drawn.key_mask
    out, selection = quadtree_attention(*small, **drawn.options(), return_selection=True)
    q, k, v = (x.detach() for x in small)
    big = [embed(q, ndim, q_offset, q_after, 7.0)]  # a hidden query still asks for itself: no NaN
    big += [embed(x, ndim, k_offset, k_after, torch.nan) for x in (k, v)]
    big = [x.requires_grad_() for x in big]
    options = drawn.options(
        query_mask=embed(query_mask, ndim, q_offset, q_after, fill=False),
        key_mask=embed(key_mask, ndim, k_offset, k_after, fill=False),
    )
    big_out, big_selection = quadtree_attention(*big, **options, return_selection=True)
    window, key_window = (
        (slice(None), *(slice(o, o + s) for o, s in zip(offset, grid, strict=True)))
        for offset, grid in ((q_offset, drawn.grid), (k_offset, drawn.key_grid))
    )
    torch.testing.assert_close(big_out[window], out, rtol=0, atol=1e-10)

    rng = torch.Generator().manual_seed(drawn.seed)
    cotangent = torch.randn(out.shape, dtype=out.dtype, generator=rng)
    grads = torch.autograd.grad(out, small, cotangent)
    big_grads = torch.autograd.grad(big_out[window], big, cotangent)
    windows = (window, key_window, key_window)
    for grad, big_grad, where in zip(grads, big_grads, windows, strict=True):
        torch.testing.assert_close(big_grad[where], grad, rtol=0, atol=1e-10)
        assert big_grad.isfinite().all()

    for level, (kept, big_kept) in enumerate(zip(selection, big_selection, strict=True)):
        shift = torch.tensor([o >> (drawn.num_levels - 1 - level) for o in k_offset])
        start = [o >> (drawn.num_levels - 1 - level) for o in q_offset]
        cells = big_kept.cells
        for axis, (o, s) in enumerate(zip(start, kept.cells.shape[1 : 1 + ndim], strict=True)):
            cells = cells.narrow(1 + axis, o, s)
        cells = torch.where(cells < 0, -1, cells - shift)
        # The canvas may have room for more cells, but they are all hidden.
        assert torch.equal(cells[..., : kept.cells.shape[-2], :], kept.cells)
        assert (cells[..., kept.cells.shape[-2] :, :] == -1).all()


@examples
@given(problems())
def test_a_hidden_key_influences_nothing(drawn: Drawn):
    drawn = dataclasses.replace(drawn, hide_keys=0.5)
    q, k, v = drawn.tensors()
    hidden = ~drawn.key_mask[..., None, None]
    out = quadtree_attention(q, k, v, **drawn.options())
    k2 = k.masked_fill(hidden, torch.nan).requires_grad_()
    v2 = v.masked_fill(hidden, torch.inf).requires_grad_()
    q2 = q.clone().requires_grad_()
    changed = quadtree_attention(q2, k2, v2, **drawn.options())
    torch.testing.assert_close(changed, out, rtol=0, atol=0)
    grads = torch.autograd.grad(changed.sum(), (q2, k2, v2))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1].masked_select(hidden) == 0).all()
    assert (grads[2].masked_select(hidden) == 0).all()


@examples
@given(problems())
def test_nothing_visible_gives_zeros(drawn: Drawn):
    q, k, v = (x.requires_grad_() for x in drawn.tensors())
    nothing = torch.zeros(drawn.batch, *drawn.key_grid, dtype=torch.bool)
    options = drawn.options(key_mask=nothing, return_selection=True)
    out, selection = quadtree_attention(q, k, v, **options)
    assert (out == 0).all()
    assert all((kept.cells == -1).all() and (kept.scores == 0).all() for kept in selection)
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@examples
@given(problems())
def test_more_topk_than_cells_keeps_all(drawn: Drawn):
    q, k, v = drawn.tensors()
    keys = 8 ** (drawn.num_levels - 1) * k[0, ..., 0, 0].numel()
    all_cells = quadtree_attention(q, k, v, **drawn.options(topk=keys))
    more = quadtree_attention(q, k, v, **drawn.options(topk=EVERYTHING))
    torch.testing.assert_close(all_cells, more, rtol=0, atol=0)


@examples
@given(problems())
def test_selection_is_what_the_scores_say(drawn: Drawn):
    """Kept cells lie on the grid, are distinct, visible, best first, and children of kept ones."""
    q, k, v = drawn.tensors()
    _, selection = quadtree_attention(q, k, v, **drawn.options(), return_selection=True)
    for level, (cells, scores) in enumerate(selection):
        sides = [-(-s // 2 ** (drawn.num_levels - 1 - level)) for s in drawn.key_grid]
        there = cells[..., 0] >= 0
        assert ((cells < torch.tensor(sides)) | ~there[..., None]).all()
        assert (scores.diff(dim=-1) <= 1e-12).all()
        assert (scores[~there] == 0).all()
        for row, shown in zip(cells.flatten(0, -3), there.flatten(0, -2), strict=True):
            kept = [tuple(c) for c in row[shown].tolist()]
            assert len(set(kept)) == len(kept) > 0
    for above, below in itertools.pairwise(selection):
        parents = above.cells
        for axis, side in enumerate(below.cells.shape[1 : 1 + len(drawn.grid)]):
            index = torch.arange(side) // 2
            parents = parents.index_select(1 + axis, index)
        found = (below.cells[..., :, None, :] >> 1) == parents[..., None, :, :]
        found = found.all(-1).any(-1) | (below.cells[..., 0] < 0)
        assert found.all()


@pytest.mark.parametrize("num_levels", [1, 3])
def test_empty_batch(num_levels):
    leaves = [torch.randn(0, 9, 14, 2, 16, requires_grad=True) for _ in range(3)]
    out = quadtree_attention(*leaves, num_levels=num_levels, topk=3)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert [x.shape for x in (out, *gradients)] == [(0, 9, 14, 2, 16)] * 4


@pytest.mark.parametrize("variant", ["A", "B"])
def test_inputs_need_not_be_contiguous(variant):
    q, k, v = (x.permute(0, 3, 2, 4, 1)[:, :, ::2] for x in torch.randn(3, 2, 4, 10, 6, 3))
    views = q, k[:1].expand(2, -1, -1, -1, -1), v[..., 1:3]
    results = []
    for maps in (views, [x.contiguous() for x in views]):
        leaves = [x.detach().requires_grad_() for x in maps]
        out = quadtree_attention(*leaves, num_levels=2, topk=4, variant=variant)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results)


def test_scale_zero_is_not_the_default():
    q, k, v = torch.randn(3, 1, 4, 6, 1, 4).unbind()
    out = quadtree_attention(q, k, v, num_levels=1, topk=1, scale=0.0)
    torch.testing.assert_close(out, v.mean((1, 2), keepdim=True).expand_as(out))


@pytest.mark.parametrize("variant", ["A", "B"])
def test_hidden_cells_come_after_visible_ones_whose_scores_underflow(variant):
    """Scores of logits hundreds below the best are 0, as are those of hidden cells."""
    q, v = torch.ones(1, 8, 1, 2), torch.randn(1, 10, 1, 2)
    level = torch.tensor([500.0, 0, -300, -600, 300]).repeat_interleave(2)
    k = level[None, :, None, None].expand(1, 10, 1, 2)
    shown = (torch.arange(10) > 3)[None]  # cells 2, 3 and 4 of the coarser level are visible
    options = {"num_levels": 2, "variant": variant, "scale": 0.5, "key_mask": shown}
    for topk, expected in ((3, [4, 2, 3]), (4, [4, 2, 3, -1])):
        _, (kept,) = quadtree_attention(q, k, v, topk=topk, return_selection=True, **options)
        assert kept.scores[..., 0].eq(1).all() and kept.scores[..., 1:].eq(0).all()
        assert kept.cells.flatten(0, 2).squeeze(-1).tolist() == [expected] * 4


@pytest.mark.parametrize("how", ["A", "B", "C", "C exact", "C lookahead"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("grid", "key_grid", "levels"), [((7,), (9,), 3), ((3, 5), (4, 2), 2)])
def test_gradcheck(how, masked, grid, key_grid, levels):
    leaf = {"dtype": torch.float64, "requires_grad": True}
    variant, own = how[0], {"level_weights": torch.randn(levels, **leaf)} if how == "B" else {}
    if variant == "C":
        names = ("prefix_queries", "prefix_keys", "prefix_values")
        own = {x: torch.randn(2, 2, 2, d, **leaf) for x, d in zip(names, (3, 3, 2), strict=True)}
    options = {"num_levels": levels, "topk": 2, "variant": variant, "return_lse": variant == "C"}
    options |= {"exact_queries": True} if "exact" in how else {}
    options |= {"lookahead": True} if "lookahead" in how else {}
    if masked:
        options["query_mask"] = torch.rand(2, *grid) > 0.3
        options["key_mask"] = torch.rand(2, *key_grid) > 0.3
    sizes = ((grid, 3), (key_grid, 3), (key_grid, 2))
    maps = [torch.randn(2, *size, 2, dim, **leaf) for size, dim in sizes]

    def run(q, k, v, *rest):
        return quadtree_attention(q, k, v, **options, **dict(zip(own, rest, strict=True)))

    assert torch.autograd.gradcheck(run, (*maps, *own.values()), fast_mode=variant == "C")
