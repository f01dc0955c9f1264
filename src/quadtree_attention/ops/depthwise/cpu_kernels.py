# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""Numba kernels that add maps of levels along their tree.

Maps are flat arrays (B, rows, columns, width) with a width of at least `LANES`. If the width is not
a multiple of `LANES`, the last vector overlaps the previous one.
"""

from quadtree_attention.ops.attention.cpu.kernels.vectors import add, kernel, load, store, zeros
from quadtree_attention.ops.attention.cpu.shape import LANES


@kernel
def add_parents(
    first, last, x, above, message, rows, columns, above_rows, above_columns, width, out
):
    """Add cells, their parents, and the message if there is one, for a range of rows."""
    for i in range(first, last):
        row_above = i // rows * above_rows + i % rows // 2
        for j in range(columns):
            own, parent = (i * columns + j) * width, (row_above * above_columns + j // 2) * width
            for column in range(0, width, LANES):
                d = min(column, width - LANES)
                y = add(load(x, own + d), load(above, parent + d))
                if message.size > 0:
                    y = add(y, load(message, own + d))
                store(out, own + d, y)


@kernel
def add_children(first, last, x, rows, columns, above_rows, above_columns, width, out):
    """Sum over the children of cells, for a range of rows of parents."""
    for i in range(first, last):
        batch, row = i // above_rows, i % above_rows
        for j in range(above_columns):
            for column in range(0, width, LANES):
                d = min(column, width - LANES)
                total = zeros(x)
                for child_row in range(2 * row, min(2 * row + 2, rows)):
                    for child in range(2 * j, min(2 * j + 2, columns)):
                        place = (batch * rows + child_row) * columns + child
                        total = add(total, load(x, place * width + d))
                store(out, (i * above_columns + j) * width + d, total)
