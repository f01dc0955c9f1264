# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""Gradients of one level. What `forward` says of ranges and of empty arrays holds here too.

With p the share of a candidate and e the gradient of its score (gradient of the message times its
value, or the gradient of the score itself where the cell was kept in variant A), the gradient of
its logit is p * (e - sum of p * e), the sum running over the same softmax. One pass goes query by
query and finds dq and those sums, a second goes key by key and finds dk and dv.
"""

import numpy as np

from quadtree_attention.ops.attention.cpu.kernels.families import (
    hide_candidates,
    list_candidates,
    softmax_of_families,
)
from quadtree_attention.ops.attention.cpu.kernels.rows import (
    clear,
    combine,
    dot,
    exponentials,
    padded,
    products,
    row_of,
    scale_row,
)
from quadtree_attention.ops.attention.cpu.kernels.vectors import (
    add,
    divide,
    exp,
    fma,
    higher,
    inlined,
    kernel,
    load,
    multiply,
    replace,
    splat,
    store,
    subtract,
    zeros,
)
from quadtree_attention.ops.attention.cpu.shape import BLOCK, LANES

CHUNK = 256  # queries of a key that are looked at together


@kernel
def backward_queries(
    first, last, shape, scale, weight, grad, grad_scores, q, k, v, visible, parents, parent_scores,
    positions, lse, dq, dots, shares, dparent_scores, dinherited,
):  # fmt: skip
    """Gradients of some families of queries, of their parents' scores and messages.

    Args:
        dots: Output, for each query the sum of p * e.
        shares: Output, for each query its part of the gradient of `weight`.
    """
    children, topk, value_width = shape.children, shape.topk, shape.value_width
    stride = padded(shape.kept * children)
    logits = np.empty(BLOCK * stride, q.dtype)
    slopes = np.empty(BLOCK * stride, q.dtype)
    message = np.empty(BLOCK * shape.width, q.dtype)
    listed = np.empty(shape.kept, np.int32)
    places = np.empty(shape.kept, np.int32)
    hidden = np.empty(shape.kept * children, np.int32)
    by_family = parent_scores.size > 0
    for family in range(first, last):
        keys = family // shape.families * shape.key_families * children
        above = family * shape.kept
        number, dark = list_candidates(family, shape, parents, visible, listed, hidden, places)
        count = number * children
        if by_family:
            for place in range(shape.kept):
                dparent_scores[above + place] = 0
        if dinherited.size > 0:
            _sum_of_children(grad, family, children, value_width, dinherited)
        for query in range(family * children, (family + 1) * children, BLOCK):
            size = min(BLOCK, (family + 1) * children - query)
            end = query + size - 1
            products(
                q, query, end, k, keys, listed, number, children, shape.width, scale, logits,
                stride, -q.dtype.type(np.inf), v, value_width,
            )  # fmt: skip
            products(
                grad, query, end, v, keys, listed, number, children, value_width, q.dtype.type(1),
                slopes, stride, q.dtype.type(0), k, shape.width,
            )  # fmt: skip
            hide_candidates(logits, stride, hidden, dark)
            for i in range(size):
                start = i * stride
                out = (query + i) * topk
                if by_family:
                    softmax_of_families(logits, start, number, children)
                else:
                    exponentials(logits, start, count, lse[query + i])
                if positions.size > 0:
                    _override(slopes, start, positions, out, topk, grad_scores[:0])
                if by_family:
                    shares[query + i] = _share_of_families(
                        logits, slopes, start, number, children, parent_scores, above, places
                    )
                else:
                    shares[query + i] = dot(logits, slopes, start, count)
                scale_row(slopes, start, count, weight)
                if grad_scores.size > 0 and positions.size > 0:
                    _override(slopes, start, positions, out, topk, grad_scores)
                if by_family:
                    _slopes_of_families(
                        logits, slopes, start, number, children, parent_scores, dparent_scores,
                        above, places, scale,
                    )  # fmt: skip
                else:
                    dots[query + i] = dot(logits, slopes, start, count)
                    _slopes(logits, slopes, start, count, dots[query + i], scale)
            clear(message)
            combine(logits, stride, k, keys, listed, number, children, shape.width, message)
            for i in range(0, size * shape.width, LANES):
                store(dq, query * shape.width + i, load(message, i))


@inlined
def _sum_of_children(grad, family, children, width, out):
    for d in range(0, width, LANES):
        x = zeros(grad)
        for child in range(children):
            x = add(x, load(grad, (family * children + child) * width + d))
        store(out, family * width + d, x)


@inlined
def _override(slopes, start, positions, out, topk, numbers):
    """Writes numbers, or zeros if there are none, to where the kept cells are."""
    for i in range(out, out + topk):
        if positions[i] >= 0:
            slopes[start + positions[i]] = numbers[i] if numbers.size > 0 else 0


@inlined
def _slopes(weights, slopes, start, count, sums, scale):
    """Shares become gradients of logits."""
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
    """As `_slopes`, each kept cell by itself; also adds to the gradients of their scores."""
    for n in range(number):
        begin = start + n * children
        place = above + places[n]
        sums = _dot_of_family(weights, slopes, begin, children)
        dparent_scores[place] += sums
        factor = parent_scores[place] * scale
        for j in range(begin, begin + children):
            weights[j] *= (slopes[j] - sums) * factor


@kernel
def invert(first, last, selection, size, cells, offsets, entries):
    """For every cell the entries of the selection that name it, in order, by counting sort.

    Args:
        first, last: Range of heads.
        selection: `size` numbers of cells per head.
        cells: Cells per head.
        offsets: Output (heads, cells + 1): where the entries of a cell begin, within its head.
        entries: Output (heads, size): positions in the selection of that head.
    """
    for head in range(first, last):
        begin = head * (cells + 1)
        base = head * size
        for i in range(begin, begin + cells + 1):
            offsets[i] = 0
        for i in range(size):
            cell = selection[base + i]
            if 0 <= cell < cells:
                offsets[begin + cell + 1] += 1
        for i in range(begin, begin + cells):
            offsets[i + 1] += offsets[i]
        for i in range(size):  # afterwards offsets[cell] is where the next cell begins
            cell = selection[base + i]
            if 0 <= cell < cells:
                entries[base + offsets[begin + cell]] = i
                offsets[begin + cell] += 1
        for i in range(begin + cells, begin, -1):
            offsets[i] = offsets[i - 1]
        offsets[begin] = 0


@kernel
def backward_keys(
    first, last, shape, scale, weight, grad, grad_scores, q, k, v, visible, parent_scores, lse,
    dots, family_offsets, family_entries, cell_offsets, cell_entries, dk, dv,
):  # fmt: skip
    """Gradients of the keys and values of some families, from the queries that looked at them.

    Args:
        family_offsets, family_entries: `invert` of the parents; empty at level 0.
        cell_offsets, cell_entries: `invert` of what this level kept; empty for variant B.
    """
    children, width, value_width = shape.children, shape.width, shape.value_width
    height = (children + BLOCK - 1) // BLOCK * BLOCK
    logits = np.empty(height * CHUNK, q.dtype)
    slopes = np.empty(height * CHUNK, q.dtype)
    weights = np.empty(height * CHUNK, q.dtype)
    key_sums = np.empty(height * width, q.dtype)
    value_sums = np.empty(height * value_width, q.dtype)
    listed = np.empty(CHUNK // 2, np.int32)
    factors = np.empty(CHUNK, q.dtype)  # log-sum-exp, or the score of the parent in variant A
    sums = np.empty(CHUNK, q.dtype)
    cursor = np.empty(children, np.int64)
    by_family = parent_scores.size > 0
    for family in range(first, last):
        head = family // shape.key_families
        cell = family % shape.key_families * children
        keys = shape.key_families * children
        shown = head // shape.heads * keys + cell
        queries = head * shape.families * children
        if cell_offsets.size > 0:
            for i in range(children):
                cursor[i] = cell_offsets[head * (keys + 1) + cell + i]
        clear(key_sums)
        clear(value_sums)
        position, end = 0, shape.families
        if family_offsets.size > 0:
            begin = family + head
            position, end = family_offsets[begin], family_offsets[begin + 1]
        while position < end:
            looking = min(end - position, CHUNK // children)
            _list_queries(
                head, position, looking, shape, parent_scores, lse, dots, family_entries, listed,
                factors, sums,
            )  # fmt: skip
            position += looking
            count = looking * children
            for i in range(0, children, BLOCK):
                row = family * children + i
                end_row = min(row + BLOCK, (family + 1) * children) - 1
                products(
                    k, row, end_row, q, queries, listed, looking, children, width, scale,
                    logits[i * CHUNK :], CHUNK, -q.dtype.type(np.inf), grad, value_width,
                )  # fmt: skip
                products(
                    v, row, end_row, grad, queries, listed, looking, children, value_width,
                    q.dtype.type(1), slopes[i * CHUNK :], CHUNK, q.dtype.type(0), q, width,
                )  # fmt: skip
            for i in range(children):
                if visible.size > 0 and not visible[shown + i]:
                    logits[i * CHUNK : i * CHUNK + count] = -np.inf
            if by_family:
                _shares_of_keys(logits, children, count)
            for i in range(children):
                _weigh(logits, slopes, weights, i * CHUNK, count, factors, weight, by_family)
                if cell_offsets.size > 0:
                    cursor[i] = _override_kept(
                        weights, slopes, i * CHUNK, listed, count, cell_entries, queries, cursor[i],
                        cell_offsets[head * (keys + 1) + cell + i + 1], shape, grad_scores,
                    )  # fmt: skip
            if by_family:
                _sums_of_keys(logits, slopes, children, count, sums)
            for i in range(children):
                _key_slopes(logits, slopes, i * CHUNK, count, factors, sums, scale, by_family)
            for i in range(0, children, BLOCK):
                combine(
                    logits[i * CHUNK :], CHUNK, q, queries, listed, looking, children, width,
                    key_sums[i * width :],
                )  # fmt: skip
                combine(
                    weights[i * CHUNK :], CHUNK, grad, queries, listed, looking, children,
                    value_width, value_sums[i * value_width :],
                )  # fmt: skip
        for i in range(children):
            is_hidden = visible.size > 0 and not visible[shown + i]
            _store_row(key_sums, i, width, dk, family * children + i, is_hidden)
            _store_row(value_sums, i, value_width, dv, family * children + i, is_hidden)


@inlined
def _store_row(sums, i, width, out, row, is_hidden):
    for d in range(0, width, LANES):
        x = zeros(sums) if is_hidden else load(sums, i * width + d)
        store(out, row * width + d, x)


@inlined
def _list_queries(
    head, position, looking, shape, parent_scores, lse, dots, entries, listed, factors, sums
):
    """Lists some of the families of queries that look at a family of keys."""
    children = shape.children
    base = head * shape.families
    for n in range(looking):
        family = position + n
        entry = 0
        if entries.size > 0:
            entry = base * shape.kept + entries[base * shape.kept + family]
            family = entry // shape.kept - base
        listed[n] = family
        for i in range(children):
            query = (base + family) * children + i
            if parent_scores.size > 0:
                factors[n * children + i] = parent_scores[entry]
            else:
                factors[n * children + i] = lse[query]
                sums[n * children + i] = dots[query]
    for j in range(looking * children, padded(looking * children)):
        factors[j] = 0
        sums[j] = 0


@inlined
def _shares_of_keys(logits, children, count):
    """Variant A: softmax over the keys of a family, for each query of a list."""
    nothing = splat(-logits.dtype.type(np.inf))
    zero = splat(logits.dtype.type(0))
    one = splat(logits.dtype.type(1))
    for j in range(0, padded(count), LANES):
        high = nothing
        for i in range(children):
            high = higher(high, load(logits, i * CHUNK + j))
        high = replace(high, nothing, zero)
        total = zero
        for i in range(children):
            x = exp(subtract(load(logits, i * CHUNK + j), high))
            store(logits, i * CHUNK + j, x)
            total = add(total, x)
        total = divide(one, replace(total, zero, one))
        for i in range(children):
            store(logits, i * CHUNK + j, multiply(load(logits, i * CHUNK + j), total))


@inlined
def _weigh(logits, slopes, weights, start, count, factors, weight, by_family):
    """Weights of the values of one key, and the gradients of its scores where it was not kept."""
    weight = splat(weight)
    for j in range(0, padded(count), LANES):
        x = load(logits, start + j)
        if by_family:
            score = multiply(x, load(factors, j))
        else:
            score = exp(subtract(x, load(factors, j)))
            store(logits, start + j, score)
        store(weights, start + j, multiply(score, weight))
        store(slopes, start + j, multiply(load(slopes, start + j), weight))


@inlined
def _override_kept(
    weights, slopes, start, listed, count, entries, queries, cursor, end, shape, grad_scores
):
    """A kept key did not speak to the query that kept it; its score has a gradient of its own."""
    j = 0
    base = queries * shape.topk
    while cursor < end:
        entry = entries[base + cursor]
        query = entry // shape.topk
        while j < count and row_of(listed, j, shape.children) < query:
            j += 1
        if j == count:
            break
        if row_of(listed, j, shape.children) == query:
            weights[start + j] = 0
            slopes[start + j] = grad_scores[base + entry] if grad_scores.size > 0 else 0
        cursor += 1
    return cursor


@inlined
def _sums_of_keys(logits, slopes, children, count, sums):
    for j in range(0, padded(count), LANES):
        total = zeros(sums)
        for i in range(children):
            total = fma(load(logits, i * CHUNK + j), load(slopes, i * CHUNK + j), total)
        store(sums, j, total)


@inlined
def _key_slopes(logits, slopes, start, count, factors, sums, scale, by_family):
    """Gradients of the logits of one key."""
    scale = splat(scale)
    for j in range(0, padded(count), LANES):
        x = subtract(load(slopes, start + j), load(sums, j))
        x = multiply(multiply(x, scale), load(logits, start + j))
        if by_family:
            x = multiply(x, load(factors, j))
        store(logits, start + j, x)
