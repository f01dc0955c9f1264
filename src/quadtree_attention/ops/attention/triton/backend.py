# SPDX-License-Identifier: Apache-2.0
"""The triton backend: supported problems, and its attention function."""

import os
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from quadtree_attention.ops.attention.base import Backend, Kept, installed
from quadtree_attention.ops.attention.problem import Problem, needs_grad
from quadtree_attention.ops.attention.tree import Tree, is_exporting
from quadtree_attention.ops.attention.triton import limits
from quadtree_attention.ops.attention.triton.layout import coordinates_of, kept_in, layout_of
from quadtree_attention.ops.attention.triton.operator import WHAT, Attention, Call, count_flops
from quadtree_attention.ops.autograd import apply

TRITON_INSTALLED = installed("triton")


def attend(
    problem: Problem,
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    level_weights: Tensor | None,
    with_selection: bool,
) -> tuple[Tensor, list[Kept]]:
    if not torch.compiler.is_compiling():
        count_flops()
    query_tree, key_tree = problem.query_tree, problem.key_tree
    lists = q, k, v, _shown(query_tree, query_mask), _shown(key_tree, key_mask)
    tensors = [x for part in lists for x in part]
    if level_weights is not None:
        tensors.append(level_weights)
    call = Call(
        tuple(len(part) for part in lists), problem.topk, problem.scale, problem.variant,
        with_selection or problem.variant == "A", with_selection or needs_grad(*tensors),
        with_selection,
    )  # fmt: skip
    found = apply(WHAT, Attention, call, *tensors)
    if not with_selection:
        return found, []
    out, rest = found
    shapes = [[x.shape for x in maps] for maps in (q, k, v)]
    layout = layout_of(shapes, problem.topk, out.itemsize, with_scores=True)
    kept = kept_in(rest, layout, out.dtype)
    lead = problem.batch, problem.num_heads
    bits = limits.bits_of(key_tree.grid)
    selection = []
    for i, topk in enumerate(problem.topk):
        grid = query_tree.grid_at(i)
        size = prod((*lead, *grid, topk))
        places, scores = (
            x[i][:size].view(*lead, *grid, topk).movedim(1, -2) for x in (kept.places, kept.scores)
        )
        cells = torch.stack(coordinates_of(places, bits), dim=-1)
        selection.append(Kept(torch.where(places[..., None] < 0, -1, cells).long(), scores))
    return out, selection


def _shown(tree: Tree, mask: Tensor | None) -> list[Tensor]:
    """Return the visible cells of each level, (B, T_l) in row-major order."""
    if mask is None:
        return []
    levels = tree.visible(mask, mask.shape[0], mask.device)
    return [
        tree.from_tree(shown, i, axis=1).flatten(1).contiguous()
        for i, shown in enumerate(levels)
        if shown is not None
    ]


def _reasons(problem: Problem) -> list[str]:
    reasons = []
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if not TRITON_INSTALLED:
        reasons.append("triton is not installed; it comes with the CUDA builds of torch for Linux")
    if problem.device.type != "cuda" and not interpreted:
        reasons.append(f"it needs a CUDA device, the tensors are on {problem.device}")
    if problem.dtype == torch.float64:
        reasons.append("it computes in float32 at most, the tensors are float64")
    if is_exporting():  # sizes may be symbolic there
        return [*reasons, "exported programs use the reference"]
    return reasons + limits.reasons(problem)


TRITON = Backend("triton", _reasons, attend)
