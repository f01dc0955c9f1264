# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""Gradients of one level. Empty arrays are as in `forward`.

With p the share of a candidate and e the gradient of its score (gradient of the message times its
value, or the gradient of the score itself if the cell was kept in variant A), the gradient of its
logit is p * (e - sum of p * e), with the sum over the same softmax.

One pass over the queries adds to the gradients of their candidate keys and values. The families of
queries of a head are divided into parts, each with its own sums of dk and dv; the caller adds them.
Results depend on the number of parts, not on the number of threads.
"""

import numpy as np

from quadtree_attention.ops.attention.cpu.kernels.families import (
    hide_candidates,
    list_candidates,
    softmax_of_families,
)
from quadtree_attention.ops.attention.cpu.kernels.rows import (
    clear,
    clear_range,
    combine,
    dot,
    exponentials,
    padded,
    products,
    scale_row,
    scatter,
)
from quadtree_attention.ops.attention.cpu.kernels.vectors import (
    add,
    inlined,
    kernel,
    load,
    multiply,
    splat,
    store,
    subtract,
    zeros,
)
from quadtree_attention.ops.attention.cpu.shape import BLOCK, LANES


@kernel
def backward(
    first, last, shape, parts, scale, weight, grad, grad_scores, q, k, v, visible, parents,
    parent_scores, positions, lse, dq, dk, dv, shares, dparent_scores, dinherited,
):  # fmt: skip
    """Gradients of the parts `first` ... `last - 1` of the queries, `parts` of each head.

    Args:
        dk, dv: Outputs, sums of each part.
        shares: Output, the part of each query in the gradient of `weight`.
    """
    children, width, value_width = shape.children, shape.width, shape.value_width
    stride = padded(shape.kept * children)
    key_rows = shape.key_families * children
    logits = np.empty(BLOCK * stride, q.dtype)
    slopes = np.empty(BLOCK * stride, q.dtype)
    weights = np.zeros(BLOCK * stride, q.dtype)  # of the values in the message
    message = np.empty(BLOCK * width, q.dtype)
    listed = np.empty(shape.kept, np.int32)
    places = np.empty(shape.kept, np.int32)
    hidden = np.empty(shape.kept * children, np.int32)
    for part in range(first, last):
        head = part // parts
        begin = head * shape.families + shape.families * (part % parts) // parts
        end = head * shape.families + shape.families * (part % parts + 1) // parts
        clear_range(dk, part * key_rows * width, key_rows * width)
        clear_range(dv, part * key_rows * value_width, key_rows * value_width)
        for family in range(begin, end):
            number, dark = list_candidates(family, shape, parents, visible, listed, hidden, places)
            if parent_scores.size > 0:
                for place in range(shape.kept):
                    dparent_scores[family * shape.kept + place] = 0
            if dinherited.size > 0:
                _sum_of_children(grad, family, children, value_width, dinherited)
            for query in range(family * children, (family + 1) * children, BLOCK):
                size = min(BLOCK, (family + 1) * children - query)
                products(
                    q, query, query + size - 1, k, head * key_rows, listed, number, children,
                    width, scale, logits, stride, -q.dtype.type(np.inf), v, value_width,
                )  # fmt: skip
                products(
                    grad, query, query + size - 1, v, head * key_rows, listed, number, children,
                    value_width, q.dtype.type(1), slopes, stride, q.dtype.type(0), dk, width,
                )  # fmt: skip
                hide_candidates(logits, stride, hidden, dark)
                for i in range(size):
                    _slopes_of_query(
                        logits, slopes, weights, i * stride, number, shape, scale, weight, lse,
                        query + i, parent_scores, family * shape.kept, places, positions,
                        grad_scores, shares, dparent_scores,
                    )  # fmt: skip
                clear_range(logits, size * stride, (BLOCK - size) * stride)
                clear(message)
                combine(
                    logits, stride, k, head * key_rows, listed, number, children, width, message
                )
                for i in range(0, size * width, LANES):
                    store(dq, query * width + i, load(message, i))
                scatter(
                    logits, stride, q, query, query + size - 1, dk, part * key_rows, listed, number,
                    children, width,
                )  # fmt: skip
                scatter(
                    weights, stride, grad, query, query + size - 1, dv, part * key_rows, listed,
                    number, children, value_width,
                )  # fmt: skip


@inlined
def _slopes_of_query(
    logits, slopes, weights, start, number, shape, scale, weight, lse, query, parent_scores, above,
    places, positions, grad_scores, shares, dparent_scores,
):  # fmt: skip
    """Replace logits by their gradients; write the weights of the values to `weights`."""
    count = number * shape.children
    out = query * shape.topk
    if parent_scores.size > 0:
        softmax_of_families(logits, start, number, shape.children)
        _weigh_families(
            weights, logits, start, number, shape.children, parent_scores, above, places
        )
        scale_row(weights, start, count, weight)
    else:
        exponentials(logits, start, count, lse[query])
        _weigh(weights, logits, start, count, weight)
    if positions.size > 0:
        _override(weights, start, positions, out, shape.topk, grad_scores[:0])
        _override(slopes, start, positions, out, shape.topk, grad_scores[:0])
    if parent_scores.size > 0:
        shares[query] = _share_of_families(
            logits, slopes, start, number, shape.children, parent_scores, above, places
        )
    else:
        shares[query] = dot(logits, slopes, start, count)
    scale_row(slopes, start, count, weight)
    if grad_scores.size > 0 and positions.size > 0:
        _override(slopes, start, positions, out, shape.topk, grad_scores)
    if parent_scores.size > 0:
        _slopes_of_families(
            logits, slopes, start, number, shape.children, parent_scores, dparent_scores, above,
            places, scale,
        )  # fmt: skip
    else:
        _slopes(logits, slopes, start, count, dot(logits, slopes, start, count), scale)


@inlined
def _weigh(weights, shares, start, count, weight):
    factor = splat(weight)
    for j in range(start, start + padded(count), LANES):
        store(weights, j, multiply(load(shares, j), factor))


@inlined
def _weigh_families(weights, shares, start, number, children, parent_scores, above, places):
    for n in range(number):
        score = parent_scores[above + places[n]]
        for j in range(start + n * children, start + (n + 1) * children):
            weights[j] = shares[j] * score


@inlined
def _sum_of_children(grad, family, children, width, out):
    for d in range(0, width, LANES):
        x = zeros(grad)
        for child in range(children):
            x = add(x, load(grad, (family * children + child) * width + d))
        store(out, family * width + d, x)


@inlined
def _override(slopes, start, positions, out, topk, numbers):
    """Write numbers, or zeros if there are none, to the positions of kept cells."""
    for i in range(out, out + topk):
        if positions[i] >= 0:
            slopes[start + positions[i]] = numbers[i] if numbers.size > 0 else 0


@inlined
def _slopes(weights, slopes, start, count, sums, scale):
    """Compute gradients of logits from shares."""
    sums = splat(sums)
    scale = splat(scale)
    for j in range(start, start + padded(count), LANES):
        x = multiply(subtract(load(slopes, j), sums), scale)
        store(weights, j, multiply(load(weights, j), x))


@inlined
def _dot_of_family(a, b, start, children):
    total = a.dtype.type(0)
    for j in range(start, start + children):
        total += a[j] * b[j]
    return total


@inlined
def _share_of_families(weights, slopes, start, number, children, parent_scores, above, places):
    share = weights.dtype.type(0)
    for n in range(number):
        part = _dot_of_family(weights, slopes, start + n * children, children)
        share += part * parent_scores[above + places[n]]
    return share


@inlined
def _slopes_of_families(
    weights, slopes, start, number, children, parent_scores, dparent_scores, above, places, scale
):
    """Run `_slopes` per kept cell; also add to the gradients of their scores."""
    for n in range(number):
        begin = start + n * children
        place = above + places[n]
        sums = _dot_of_family(weights, slopes, begin, children)
        dparent_scores[place] += sums
        factor = parent_scores[place] * scale
        for j in range(begin, begin + children):
            weights[j] *= (slopes[j] - sums) * factor
