# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""One level of variant C, on flat arrays in tree order.

Ranges, threads and empty arrays are as in the kernels of variants A and B. `bias` (B, S) is the
logarithm of the number of tokens in a key cell, -inf for hidden cells; without it, `number` is the
bias of all cells, and is added to log-sum-exps only. `positions` are the positions of the kept
cells of a query cell among its candidates.

A family consists of `cells` query cells with common candidates and `group` rows each. Rows are the
queries of the message: the queries of the cells (group 1), or of their tokens.
"""

import math

import numpy as np

from quadtree_attention.ops.attention.cpu.kernels.choose import best, normal_guess
from quadtree_attention.ops.attention.cpu.kernels.rows import (
    clear,
    combine,
    exponentials,
    maximum,
    padded,
    products,
    row_of,
)
from quadtree_attention.ops.attention.cpu.kernels.vectors import (
    add,
    at,
    exp,
    fma,
    inlined,
    kernel,
    load,
    multiply,
    splat,
    store,
    subtract,
    total,
    zeros,
)
from quadtree_attention.ops.attention.cpu.shape import BLOCK, LANES

CHUNK = 256  # rows of a key that are processed at a time


@inlined
def _list(family, shape, parents, listed):
    """List the families of keys that are candidates of a family of queries; return their number."""
    count = 0
    for place in range(shape.kept):
        cell = at(parents, family * shape.kept + place) if parents.size > 0 else place
        if 0 <= cell < shape.key_families:
            listed[count] = cell
            count += 1
    return count


@inlined
def _bias_of(bias, start, listed, count, children, out):
    """Write the bias of all candidates, padded to whole vectors; return how many are visible."""
    shown = count
    if bias.size == 0:
        return shown
    for j in range(count):
        out[j] = bias[start + row_of(listed, j, children)]
        shown -= out[j] == -np.inf
    for j in range(count, padded(count)):
        out[j] = 0
    return shown


@inlined
def _add_bias(logits, start, count, biases):
    for j in range(0, padded(count), LANES):
        store(logits, start + j, add(load(logits, start + j), load(biases, j)))


@inlined
def _exclude(logits, start, positions, out, topk):
    """Exclude the kept cells of a query from its softmax."""
    for i in range(out, out + topk):
        if positions[i] >= 0:
            logits[start + positions[i]] = -np.inf


@kernel
def flat_forward(
    first, last, shape, scale, number, next_number, q, rows, k, v, bias, parents, next_k, next_bias,
    inherited, inherited_lse, out, lse, selection, positions, scores,
):  # fmt: skip
    """Compute the query families `first` ... `last - 1`, counted over batch and heads.

    Args:
        out, lse: Outputs, the state after this level; empty if not requested.
        selection, positions: Outputs, the kept cells and their positions among the candidates.
        scores: Output, the softmax over all candidates of this level, for the kept ones.
    """
    children, topk = shape.children, shape.topk
    stride = padded(shape.kept * children)
    logits = np.empty(BLOCK * stride, q.dtype)
    rank = np.empty(stride, q.dtype)
    biases = np.empty(stride, q.dtype)
    message = np.empty(BLOCK * shape.value_width, q.dtype)
    listed = np.empty(shape.kept, np.int32)
    found = np.empty(topk + LANES, np.int32)
    values = np.empty(topk, q.dtype)
    guess = normal_guess(shape.kept * children, topk, q)
    width = padded(shape.kept * children * shape.next_children)
    ahead = np.empty(BLOCK * width, q.dtype)
    cells = np.empty(shape.kept * children if next_k.size > 0 else 0, np.int32)
    nothing = -q.dtype.type(np.inf)
    for family in range(first, last):
        head = family // shape.families
        keys = head * shape.key_families * children
        shown_keys = head // shape.heads * shape.key_families * children
        listed_count = _list(family, shape, parents, listed)
        count = listed_count * children
        shown = _bias_of(bias, shown_keys, listed, count, children, biases)
        for query in range(family * shape.cells, (family + 1) * shape.cells, BLOCK):
            if topk == 0 and shape.group > 1:
                break
            size = min(BLOCK, (family + 1) * shape.cells - query)
            products(
                q, query, query + size - 1, k, keys, listed, listed_count, children, shape.width,
                scale, logits, stride, nothing, v, shape.value_width,
            )  # fmt: skip
            if bias.size > 0:
                for i in range(size):
                    _add_bias(logits, i * stride, count, biases)
            if topk > 0:
                if next_k.size > 0:
                    for j in range(count):
                        cells[j] = row_of(listed, j, children)
                    products(
                        q, query, query + size - 1, next_k, keys * shape.next_children, cells,
                        count, shape.next_children, shape.width, scale, ahead, width, nothing,
                        next_k, shape.width,
                    )  # fmt: skip
                for i in range(size):
                    start = i * stride
                    if next_k.size > 0:
                        _mass_of_children(
                            ahead, i * width, count, shape.next_children, next_bias, next_number,
                            shown_keys * shape.next_children, cells, logits, start, rank,
                        )  # fmt: skip
                        kept, _ = best(rank, 0, count, shown, topk, guess, found, values)
                    else:
                        kept, _ = best(logits, start, count, shown, topk, guess, found, values)
                    _keep(
                        found, kept, logits, start, count, listed, shape, (query + i) * topk,
                        selection, positions, scores, rank,
                    )  # fmt: skip
                    if shape.group == 1:
                        _exclude(logits, start, positions, (query + i) * topk, topk)
            if shape.group == 1 and out.size > 0:
                _message(
                    logits, stride, count, v, keys, listed, listed_count, shape, query, size,
                    number, inherited, inherited_lse, message, out, lse,
                )  # fmt: skip
        if shape.group == 1 or out.size == 0:
            continue
        length = shape.cells * shape.group
        for row in range(family * length, (family + 1) * length, BLOCK):
            size = min(BLOCK, (family + 1) * length - row)
            products(
                rows, row, row + size - 1, k, keys, listed, listed_count, children, shape.width,
                scale, logits, stride, nothing, v, shape.value_width,
            )  # fmt: skip
            for i in range(size):
                if bias.size > 0:
                    _add_bias(logits, i * stride, count, biases)
                _exclude(logits, i * stride, positions, (row + i) // shape.group * topk, topk)
            _message(
                logits, stride, count, v, keys, listed, listed_count, shape, row, size, number,
                inherited, inherited_lse, message, out, lse,
            )  # fmt: skip


@inlined
def _mass_of_children(
    ahead, start, count, children, next_bias, next_number, first, cells, logits, own, rank
):
    """Compute the log-sum-exp of the children of every candidate; -inf for hidden candidates."""
    for j in range(count):
        begin = start + j * children
        high = -rank.dtype.type(np.inf)
        for i in range(children):
            x = next_number
            if next_bias.size > 0:
                x = next_bias[first + cells[j] * children + i]
            ahead[begin + i] += x
            high = max(high, ahead[begin + i])
        sums = rank.dtype.type(0)
        if high != -np.inf:
            for i in range(children):
                sums += math.exp(ahead[begin + i] - high)
        hidden = logits[own + j] == -np.inf or high == -np.inf
        rank[j] = -rank.dtype.type(np.inf) if hidden else high + rank.dtype.type(math.log(sums))
    for j in range(count, padded(count)):
        rank[j] = -np.inf


@inlined
def _keep(
    found, size, logits, start, count, listed, shape, out, selection, positions, scores, spare
):
    """Write the kept cells of one query cell."""
    high = logits.dtype.type(0)
    sums = logits.dtype.type(1)
    if scores.size > 0:
        for j in range(0, padded(count), LANES):
            store(spare, j, load(logits, start + j))
        high = maximum(spare, 0, count)
        if high != -np.inf:
            sums = exponentials(spare, 0, count, high)
    kept = 0
    for i in range(size):
        position = at(found, i)
        if logits[start + position] == -np.inf:
            continue
        selection[out + kept] = row_of(listed, position, shape.children)
        positions[out + kept] = position
        if scores.size > 0:
            scores[out + kept] = math.exp(logits[start + position] - high) / sums
        kept += 1
    for i in range(out + kept, out + shape.topk):
        selection[i] = -1
        positions[i] = -1
        if scores.size > 0:
            scores[i] = 0


@inlined
def _message(
    logits, stride, count, v, keys, listed, listed_count, shape, row, size, number,
    inherited, inherited_lse, message, out, lse,
):  # fmt: skip
    """Add the terms of up to four rows to the states that they inherit."""
    width = shape.value_width
    one = v.dtype.type(1)
    zero = v.dtype.type(0)
    clear(message)
    f0 = f1 = f2 = f3 = zero
    s0 = s1 = s2 = s3 = zero
    for i in range(size):
        start = i * stride
        high = maximum(logits, start, count)
        above = -v.dtype.type(np.inf)
        if inherited.size > 0:
            above = inherited_lse[(row + i) // shape.shared] - number
        shift = max(high, above)
        if shift == -np.inf:
            shift = zero
        sums = exponentials(logits, start, count, shift)
        share = v.dtype.type(math.exp(above - shift))
        sums += share
        factor = zero
        lse[row + i] = -np.inf
        if sums != 0:
            factor = one / sums
            lse[row + i] = shift + math.log(sums) + number
        share *= factor
        if i == 0:
            f0, s0 = factor, share
        elif i == 1:
            f1, s1 = factor, share
        elif i == 2:
            f2, s2 = factor, share
        else:
            f3, s3 = factor, share
    combine(logits, stride, v, keys, listed, listed_count, shape.children, width, message)
    for i in range(size):
        factor, share = f0, s0
        if i == 1:
            factor, share = f1, s1
        elif i == 2:
            factor, share = f2, s2
        elif i == 3:
            factor, share = f3, s3
        factors, shares = splat(factor), splat(share)
        base = 0
        if inherited.size > 0:
            base = (row + i) // shape.shared * width
        for d in range(0, width, LANES):
            x = multiply(load(message, i * width + d), factors)
            if inherited.size > 0:
                x = fma(load(inherited, base + d), shares, x)
            store(out, (row + i) * width + d, x)


# ---- backward ------------------------------------------------------------------------------------


@inlined
def _dot_of_rows(a, i, b, j, width):
    sums = zeros(a)
    for d in range(0, width, LANES):
        sums = fma(load(a, i * width + d), load(b, j * width + d), sums)
    return total(sums)


@inlined
def _dot(a, b, start, count):
    sums = zeros(a)
    for j in range(start, start + padded(count), LANES):
        sums = fma(load(a, j), load(b, j), sums)
    return total(sums)


@kernel
def flat_backward_rows(
    first, last, shape, scale, number, grad, grad_lse, rows, k, v, bias, parents, positions, lse,
    inherited, inherited_lse, dq, dots, dinherited, dinherited_lse,
):  # fmt: skip
    """Compute gradients of the rows of some query families, and of their inherited states.

    Args:
        dots: Output, for each row the product of result and gradient, minus the gradient of `lse`.
            It is computed as the mean over the terms of the softmax, not from the result: if one
            term has all the weight, it equals that term, and the gradient of the logit is 0.
            Division by the sum of weights removes the rounding of `lse`, which grows with logits.
    """
    children, topk, value_width = shape.children, shape.topk, shape.value_width
    stride = padded(shape.kept * children)
    logits = np.empty(BLOCK * stride, rows.dtype)
    slopes = np.empty(BLOCK * stride, rows.dtype)
    biases = np.empty(stride, rows.dtype)
    message = np.empty(BLOCK * shape.width, rows.dtype)
    listed = np.empty(shape.kept, np.int32)
    length = shape.cells * shape.group
    for family in range(first, last):
        head = family // shape.families
        keys = head * shape.key_families * children
        shown_keys = head // shape.heads * shape.key_families * children
        listed_count = _list(family, shape, parents, listed)
        count = listed_count * children
        _bias_of(bias, shown_keys, listed, count, children, biases)
        for row in range(family * length, (family + 1) * length, BLOCK):
            size = min(BLOCK, (family + 1) * length - row)
            end = row + size - 1
            products(
                rows, row, end, k, keys, listed, listed_count, children, shape.width, scale, logits,
                stride, -rows.dtype.type(np.inf), v, value_width,
            )  # fmt: skip
            products(
                grad, row, end, v, keys, listed, listed_count, children, value_width,
                rows.dtype.type(1), slopes, stride, rows.dtype.type(0), k, shape.width,
            )  # fmt: skip
            for i in range(size):
                start = i * stride
                if bias.size > 0:
                    _add_bias(logits, start, count, biases)
                if topk > 0:
                    _exclude(logits, start, positions, (row + i) // shape.group * topk, topk)
                sums = exponentials(logits, start, count, lse[row + i] - number)
                dot = _dot(logits, slopes, start, count)
                if inherited.size > 0:
                    above = (row + i) // shape.shared
                    share = rows.dtype.type(math.exp(inherited_lse[above] - lse[row + i]))
                    sums += share
                    dot += share * _dot_of_rows(grad, row + i, inherited, above, value_width)
                if sums != 0:
                    dot /= sums
                if grad_lse.size > 0:
                    dot -= grad_lse[row + i]
                dots[row + i] = dot
                lanes, factor = splat(dot), splat(scale)
                for j in range(start, start + padded(count), LANES):
                    x = multiply(subtract(load(slopes, j), lanes), factor)
                    store(logits, j, multiply(load(logits, j), x))
            clear(message)
            combine(logits, stride, k, keys, listed, listed_count, children, shape.width, message)
            for i in range(0, size * shape.width, LANES):
                store(dq, row * shape.width + i, load(message, i))
        if inherited.size == 0:
            continue
        for above in range(family * length // shape.shared, (family + 1) * length // shape.shared):
            _inherited(
                above, shape, grad, lse, dots, inherited, inherited_lse, dinherited, dinherited_lse
            )


@inlined
def _inherited(above, shape, grad, lse, dots, inherited, inherited_lse, dinherited, dinherited_lse):
    """Compute the gradient of one inherited state from the rows that inherit it."""
    width = shape.value_width
    for d in range(0, width, LANES):
        store(dinherited, above * width + d, zeros(grad))
    sums = grad.dtype.type(0)
    for row in range(above * shape.shared, (above + 1) * shape.shared):
        share = grad.dtype.type(math.exp(inherited_lse[above] - lse[row]))
        if share == 0:
            continue
        sums += share * (_dot_of_rows(grad, row, inherited, above, width) - dots[row])
        lanes = splat(share)
        for d in range(0, width, LANES):
            x = load(dinherited, above * width + d)
            store(dinherited, above * width + d, fma(load(grad, row * width + d), lanes, x))
    dinherited_lse[above] = sums


@kernel
def flat_backward_keys(
    first, last, shape, scale, number, grad, rows, k, v, bias, lse, dots, family_offsets,
    family_entries, cell_offsets, cell_entries, dk, dv,
):  # fmt: skip
    """Compute gradients of the keys and values of some families, from the rows of their queries.

    Args:
        family_offsets, family_entries: `invert` of the parents; empty at level 0.
        cell_offsets, cell_entries: `invert` of the kept cells; empty at the finest level.
    """
    children, width, value_width = shape.children, shape.width, shape.value_width
    height = (children + BLOCK - 1) // BLOCK * BLOCK
    logits = np.empty(height * CHUNK, rows.dtype)
    slopes = np.empty(height * CHUNK, rows.dtype)
    key_sums = np.empty(height * width, rows.dtype)
    value_sums = np.empty(height * value_width, rows.dtype)
    listed = np.empty(CHUNK // 2, np.int32)
    sums = np.empty(CHUNK, rows.dtype)
    weights = np.empty(CHUNK, rows.dtype)
    cursor = np.empty(children, np.int64)
    units = shape.cells * shape.group // children  # families of rows in a family of queries
    for family in range(first, last):
        head = family // shape.key_families
        cell = family % shape.key_families * children
        keys = shape.key_families * children
        shown = head // shape.heads * keys + cell
        queries = head * shape.families * units * children
        if cell_offsets.size > 0:
            for i in range(children):
                cursor[i] = cell_offsets[head * (keys + 1) + cell + i]
        clear(key_sums)
        clear(value_sums)
        position, end = 0, shape.families * units
        if family_offsets.size > 0:
            begin = family + head
            position, end = family_offsets[begin] * units, family_offsets[begin + 1] * units
        while position < end:
            looking = min(end - position, CHUNK // children)
            for n in range(looking):
                one = (position + n) // units
                if family_entries.size > 0:
                    entry = family_entries[head * shape.families * shape.kept + one]
                    one = entry // shape.kept
                listed[n] = one * units + (position + n) % units
                for i in range(children):
                    row = queries + listed[n] * children + i
                    weights[n * children + i] = lse[row]
                    sums[n * children + i] = dots[row]
            position += looking
            count = looking * children
            for j in range(count, padded(count)):
                weights[j] = 0
                sums[j] = 0
            for i in range(0, children, BLOCK):
                row = family * children + i
                end_row = min(row + BLOCK, (family + 1) * children) - 1
                products(
                    k, row, end_row, rows, queries, listed, looking, children, width, scale,
                    logits[i * CHUNK :], CHUNK, -rows.dtype.type(np.inf), grad, value_width,
                )  # fmt: skip
                products(
                    v, row, end_row, grad, queries, listed, looking, children, value_width,
                    rows.dtype.type(1), slopes[i * CHUNK :], CHUNK, rows.dtype.type(0), rows, width,
                )  # fmt: skip
            for i in range(children):
                x = bias[shown + i] if bias.size > 0 else number
                if cell_offsets.size > 0:
                    cursor[i] = _exclude_kept(
                        logits, i * CHUNK, listed, count, cell_entries,
                        head * shape.families * shape.cells * shape.topk, cursor[i],
                        cell_offsets[head * (keys + 1) + cell + i + 1], shape,
                    )  # fmt: skip
                _shares(logits, slopes, i * CHUNK, count, weights, sums, x, scale)
            for i in range(0, children, BLOCK):
                combine(
                    logits[i * CHUNK :], CHUNK, grad, queries, listed, looking, children,
                    value_width, value_sums[i * value_width :],
                )  # fmt: skip
                combine(
                    slopes[i * CHUNK :], CHUNK, rows, queries, listed, looking, children, width,
                    key_sums[i * width :],
                )  # fmt: skip
        for i in range(children):
            for d in range(0, width, LANES):
                store(dk, (family * children + i) * width + d, load(key_sums, i * width + d))
            for d in range(0, value_width, LANES):
                x = load(value_sums, i * value_width + d)
                store(dv, (family * children + i) * value_width + d, x)


@inlined
def _exclude_kept(logits, start, listed, count, entries, base, cursor, end, shape):
    """Exclude a kept key from the softmax of the rows of the query cell that kept it."""
    j = 0
    while cursor < end:
        cell = entries[base + cursor] // shape.topk
        while j < count and row_of(listed, j, shape.children) // shape.group < cell:
            j += 1
        while j < count and row_of(listed, j, shape.children) // shape.group == cell:
            logits[start + j] = -np.inf
            j += 1
        if j == count:  # the cell may have more rows in the next chunk
            break
        cursor += 1
    return cursor


@inlined
def _shares(logits, slopes, start, count, lses, sums, bias, scale):
    """Replace logits of one key by shares, and slopes by the gradients of its logits."""
    bias, scale = splat(bias), splat(scale)
    for j in range(0, padded(count), LANES):
        x = exp(subtract(add(load(logits, start + j), bias), load(lses, j)))
        store(logits, start + j, x)
        y = multiply(subtract(load(slopes, start + j), load(sums, j)), scale)
        store(slopes, start + j, multiply(x, y))
