# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""Candidates of a family of queries, for forward and backward."""

import numpy as np

from quadtree_attention.ops.attention.cpu.kernels.rows import exponentials
from quadtree_attention.ops.attention.cpu.kernels.vectors import at, inlined
from quadtree_attention.ops.attention.cpu.shape import BLOCK


@inlined
def list_candidates(family, shape, parents, visible, listed, hidden, places):
    """List the families of keys that are candidates of a family of queries.

    Args:
        listed: Output, the families.
        hidden: Output, positions of hidden cells among all their cells.
        places: Output, index of each listed family in the selection.

    Returns:
        Number of listed families, and of hidden cells.
    """
    children = shape.children
    first = family // shape.families // shape.heads * shape.key_families * children
    count = dark = 0
    for place in range(shape.kept):
        cell = at(parents, family * shape.kept + place) if parents.size > 0 else place
        if not 0 <= cell < shape.key_families:
            continue
        listed[count] = cell
        places[count] = place
        if visible.size > 0:
            for i in range(children):
                if not visible[first + cell * children + i]:
                    hidden[dark] = count * children + i
                    dark += 1
        count += 1
    return count, dark


@inlined
def hide_candidates(logits, stride, hidden, dark):
    for i in range(BLOCK):
        for j in range(dark):
            logits[i * stride + hidden[j]] = -np.inf


@inlined
def softmax_of_families(logits, start, number, children):
    """Variant A: softmax over the children of each kept cell."""
    zero = logits.dtype.type(0)
    for begin in range(start, start + number * children, children):
        high = -logits.dtype.type(np.inf)
        for j in range(begin, begin + children):
            high = max(high, logits[j])
        if high == -np.inf:
            high = zero
        for j in range(begin, begin + children):
            logits[j] -= high
    exponentials(logits, start, number * children, zero)
    for begin in range(start, start + number * children, children):
        total = zero
        for j in range(begin, begin + children):
            total += logits[j]
        if total != 0:
            total = logits.dtype.type(1) / total
        for j in range(begin, begin + children):
            logits[j] *= total
