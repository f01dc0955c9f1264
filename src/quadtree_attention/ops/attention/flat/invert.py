# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""Inversion of a selection: entries by cell."""

from quadtree_attention.ops.attention.cpu.kernels.vectors import kernel


@kernel
def invert(first, last, selection, size, cells, offsets, entries):
    """List the entries of a selection by cell, in order, with a counting sort.

    Args:
        first, last: Range of heads.
        selection: `size` numbers of cells per head.
        cells: Cells per head.
        offsets: Output (heads, cells + 1): start of the entries of each cell, within its head.
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
        for i in range(size):  # afterwards offsets[cell] is the start of the next cell
            cell = selection[base + i]
            if 0 <= cell < cells:
                entries[base + offsets[begin + cell]] = i
                offsets[begin + cell] += 1
        for i in range(begin + cells, begin, -1):
            offsets[i] = offsets[i - 1]
        offsets[begin] = 0
