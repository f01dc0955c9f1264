# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""Conversion between grid and tree order, and means over children.

Rows have at least `LANES` numbers. If the width is not a multiple of `LANES`, the last vector
overlaps the previous one. `order` is the grid index of every finest cell, or -1; `visible` is empty
if all cells are visible. `cells` is the number of parents per batch entry and head.
"""

from quadtree_attention.ops.attention.cpu.kernels.rows import LINE
from quadtree_attention.ops.attention.cpu.kernels.vectors import (
    add,
    at,
    fma,
    inlined,
    kernel,
    load,
    multiply,
    prefetch,
    splat,
    store,
    zeros,
)
from quadtree_attention.ops.attention.cpu.shape import LANES

AHEAD = 2  # parents whose rows on the grid are prefetched


@inlined
def _share(like, visible, first, children):
    """Return the weight of a visible child in the mean of its parent."""
    count = children
    if visible.size > 0:
        count = 0
        for child in range(first, first + children):
            count += visible[child]
    return splat(like.dtype.type(1) / like.dtype.type(max(count, 1)))


@inlined
def _is_shown(visible, child):
    return visible.size == 0 or visible[child]


@kernel
def grid_to_tree(first, last, x, order, cells, places, heads, children, width, out):
    """Convert a map (B, places, N, D) to tree order (B, N, T, D).

    The range counts parents of all batch entries; padding cells become zeros.
    """
    for i in range(first, last):
        batch, parent = i // cells, i % cells
        for child in range(children):
            place = at(order, parent * children + child)
            soon = at(order, min(parent + AHEAD, cells - 1) * children + child)
            for d in range(0, heads * width, LINE):
                prefetch(x, (batch * places + max(soon, 0)) * heads * width + d)
            for head in range(heads):
                row = (batch * heads + head) * cells + parent
                source = ((batch * places + place) * heads + head) * width
                target = (row * children + child) * width
                for column in range(0, width, LANES):
                    d = min(column, width - LANES)
                    store(out, target + d, load(x, source + d) if place >= 0 else zeros(x))


@kernel
def tree_to_grid(
    first, last, own, above, order, visible, cells, places, heads, children, width, out
):
    """Undo `grid_to_tree`; add the gradients of means (B, N, T/F, D) if there are any."""
    for i in range(first, last):
        batch, parent = i // cells, i % cells
        share = _share(own, visible, i * children, children)
        for child in range(children):
            place = at(order, parent * children + child)
            if place < 0:
                continue
            is_shown = above.size > 0 and _is_shown(visible, i * children + child)
            for head in range(heads):
                row = (batch * heads + head) * cells + parent
                source = (row * children + child) * width
                target = ((batch * places + place) * heads + head) * width
                for column in range(0, width, LANES):
                    d = min(column, width - LANES)
                    y = load(own, source + d)
                    if is_shown:
                        y = fma(load(above, row * width + d), share, y)
                    store(out, target + d, y)


@kernel
def pool(first, last, x, visible, cells, heads, children, width, out):
    """Compute means over the visible children of cells; the range counts cells of all heads."""
    for i in range(first, last):
        if visible.size == 0 and children == 4:
            _mean(x, i, 4, width, out)
        elif visible.size == 0:
            _mean(x, i, children, width, out)
        else:
            first_child = (i // cells // heads * cells + i % cells) * children
            _masked_mean(x, visible, first_child, i, children, width, out)


@inlined
def _mean(x, row, children, width, out):
    share = splat(x.dtype.type(1) / x.dtype.type(children))
    for column in range(0, width, LANES):
        d = min(column, width - LANES)
        mean = zeros(x)
        for child in range(children):
            mean = add(mean, load(x, (row * children + child) * width + d))
        store(out, row * width + d, multiply(mean, share))


@inlined
def _masked_mean(x, visible, first_child, row, children, width, out):
    share = _share(x, visible, first_child, children)
    for column in range(0, width, LANES):
        d = min(column, width - LANES)
        mean = zeros(x)
        for child in range(children):
            if visible[first_child + child]:
                mean = add(mean, load(x, (row * children + child) * width + d))
        store(out, row * width + d, multiply(mean, share))


@kernel
def unpool(first, last, own, above, visible, cells, heads, children, width, out):
    """Sum gradients of children and of their means; the range counts cells of all heads."""
    for i in range(first, last):
        shown = (i // cells // heads * cells + i % cells) * children
        share = _share(own, visible, shown, children)
        for child in range(children):
            for column in range(0, width, LANES):
                d = min(column, width - LANES)
                row = (i * children + child) * width + d
                y = load(own, row)
                if _is_shown(visible, shown + child):
                    y = fma(load(above, i * width + d), share, y)
                store(out, row, y)
