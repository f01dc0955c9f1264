# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""Attention of one level, on flat arrays in tree order.

A kernel computes a range of query families, or of key families, and releases the GIL; the caller
divides the ranges among threads. Ranges write to disjoint memory, and the result of a cell does not
depend on the division, so that results are the same for any number of threads.

Arrays that are not needed are empty: `visible` without a mask, `parents` and `inherited` at level
0, `parent_scores` except for variant A below level 0, `positions` except for variant A at selecting
levels. Rows of hidden keys and values are zeros; their logits are set to -inf.
"""

import numpy as np

from quadtree_attention.ops.attention.cpu.kernels.choose import best, normal_guess
from quadtree_attention.ops.attention.cpu.kernels.families import (
    hide_candidates,
    list_candidates,
    softmax_of_families,
)
from quadtree_attention.ops.attention.cpu.kernels.rows import (
    clear,
    combine,
    copy_row,
    maximum,
    padded,
    products,
    row_of,
    scale_row,
    softmax,
)
from quadtree_attention.ops.attention.cpu.kernels.vectors import (
    at,
    fma,
    inlined,
    kernel,
    load,
    splat,
    store,
    zeros,
)
from quadtree_attention.ops.attention.cpu.shape import BLOCK, LANES


@kernel
def forward(
    first, last, shape, scale, weight, q, k, v, visible, parents, parent_scores, inherited, total,
    selection, scores, positions, lse,
):  # fmt: skip
    """Compute the query families `first` ... `last - 1`, counted over batch and heads.

    Args:
        total, selection, scores: Outputs, see `base.Level`.
        positions: Output, positions of the kept cells among the candidates.
        lse: Output, log-sum-exp of each query.
    """
    children, topk, value_width = shape.children, shape.topk, shape.value_width
    stride = padded(shape.kept * children)
    logits = np.empty(BLOCK * stride, q.dtype)
    rank = np.empty(stride, q.dtype)
    factors = np.empty(BLOCK, q.dtype)
    message = np.empty(BLOCK * value_width, q.dtype)
    listed = np.empty(shape.kept, np.int32)
    places = np.empty(shape.kept, np.int32)
    hidden = np.empty(shape.kept * children, np.int32)
    found = np.empty(topk + LANES, np.int32)
    values = np.empty(topk, q.dtype)
    guess = normal_guess(shape.kept * children, topk, q)
    number = dark = 0  # number of listed families, of hidden cells
    batch = -1
    for family in range(first, last):
        head = family // shape.families
        keys = head * shape.key_families * children
        if parents.size > 0 or head // shape.heads != batch:
            batch = head // shape.heads
            number, dark = list_candidates(family, shape, parents, visible, listed, hidden, places)
        shown = batch * shape.key_families * children
        count = number * children
        for query in range(family * children, (family + 1) * children, BLOCK):
            size = min(BLOCK, (family + 1) * children - query)
            products(
                q, query, query + size - 1, k, keys, listed, number, children, shape.width, scale,
                logits, stride, -q.dtype.type(np.inf), v, value_width,
            )  # fmt: skip
            hide_candidates(logits, stride, hidden, dark)
            for i in range(size):
                start = i * stride
                kept = 0
                factor = q.dtype.type(1)
                if shape.is_a:
                    copy_row(logits, start, count, rank)
                    if parent_scores.size > 0:
                        _scores_of_families(
                            logits, start, number, children, parent_scores, family * shape.kept,
                            places,
                        )  # fmt: skip
                    else:
                        high = maximum(logits, start, count)
                        factor, lse[query + i] = softmax(logits, start, count, high)
                        scale_row(logits, start, count, factor)
                        factor = q.dtype.type(1)
                    if topk > 0:
                        _rank_by_score(rank, logits, start, count)
                        kept, _ = best(rank, 0, count, count - dark, topk, guess, found, values)
                else:
                    if topk > 0:
                        kept, high = best(
                            logits, start, count, count - dark, topk, guess, found, values
                        )
                    else:
                        high = maximum(logits, start, count)
                    factor, lse[query + i] = softmax(logits, start, count, high)
                if topk > 0:
                    _keep(
                        found, kept, logits, start, factor, listed, shape, visible, shown,
                        (query + i) * topk, selection, scores, positions,
                    )  # fmt: skip
                factors[i] = factor * weight
            clear(message)
            combine(logits, stride, v, keys, listed, number, children, value_width, message)
            for i in range(size):
                factor = splat(factors[i])
                for d in range(0, value_width, LANES):
                    x = zeros(v)
                    if inherited.size > 0:
                        x = load(inherited, family * value_width + d)
                    x = fma(load(message, i * value_width + d), factor, x)
                    store(total, (query + i) * value_width + d, x)


@inlined
def _scores_of_families(logits, start, number, children, parent_scores, above, places):
    softmax_of_families(logits, start, number, children)
    for n in range(number):
        score = parent_scores[above + places[n]]
        for j in range(start + n * children, start + (n + 1) * children):
            logits[j] *= score


@inlined
def _rank_by_score(rank, weights, start, count):
    """Variant A: replace logits by scores; hidden cells keep a rank below a score of 0."""
    for j in range(count):
        rank[j] = weights[start + j] if rank[j] != -np.inf else -1


@inlined
def _keep(
    found, size, weights, start, factor, listed, shape, visible, shown, out, selection, scores,
    positions,
):  # fmt: skip
    """Write the kept cells of one query; in variant A, remove them from the message."""
    kept = 0
    for i in range(size):
        position = at(found, i)
        cell = row_of(listed, position, shape.children)
        if visible.size > 0 and not visible[shown + cell]:
            continue
        selection[out + kept] = cell
        if scores.size > 0:
            scores[out + kept] = weights[start + position] * factor
        if positions.size > 0:
            positions[out + kept] = position
            weights[start + position] = 0
        kept += 1
    for i in range(out + kept, out + shape.topk):
        selection[i] = -1
        if scores.size > 0:
            scores[i] = 0
        if positions.size > 0:
            positions[i] = -1
