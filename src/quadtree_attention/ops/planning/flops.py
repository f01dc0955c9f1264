# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of attention, from sizes alone; a multiply-add counts as two.

Only the two matrix products, scores and messages, are counted, as by PyTorch's FLOP counter for
`scaled_dot_product_attention`. Softmax, selection, pooling and padded queries are not.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import prod

from quadtree_attention.ops.attention.problem import effective_topk
from quadtree_attention.ops.attention.tree import Tree

# Forward has two matrix products (scores, message). Backward has five: the scores again, and the
# gradients of weights, values, queries and keys. A Fraction keeps counts integers.
BACKWARD_FACTOR = Fraction(5, 2)


def candidates_per_query(key_tree: Tree, topk: Sequence[int]) -> list[int]:
    """Key cells that one query cell is compared with, per level, coarse -> fine.

    Args:
        key_tree: Tree of the keys.
        topk: Cells kept at each selecting level; values above the number of cells keep all.
    """
    kept = effective_topk(tuple(topk), key_tree)
    return [key_tree.num_cells(0), *(key_tree.num_children * k for k in kept)]


def pair_flops(pairs: int, dim: int, value_dim: int) -> int:
    """Forward FLOPs of `pairs` of a query and a key of width `dim` and a value of `value_dim`."""
    return 2 * pairs * (dim + value_dim)


def attention_flops(
    *,
    batch: int,
    heads: int,
    dim: int,
    value_dim: int,
    query_tree: Tree,
    key_tree: Tree,
    topk: Sequence[int],
) -> list[int]:
    """Forward FLOPs of quadtree attention, per level, coarse -> fine, equal in all variants.

    Example:
        >>> tree = Tree((8, 12), num_levels=2)  # 24 cells, then 96
        >>> attention_flops(
        ...     batch=1, heads=1, dim=16, value_dim=16, query_tree=tree, key_tree=tree, topk=[3]
        ... )  # 24 queries x 24 keys, then 96 queries x 3 * 4 candidates
        [36864, 73728]
    """
    candidates = candidates_per_query(key_tree, topk)
    queries = [prod(query_tree.grid_at(level)) for level in range(query_tree.num_levels)]
    return [
        pair_flops(batch * heads * cells * seen, dim, value_dim)
        for cells, seen in zip(queries, candidates, strict=True)
    ]


def dense_flops(
    *, batch: int, heads: int, dim: int, value_dim: int, queries: int, keys: int
) -> int:
    """Forward FLOPs of dense attention of `queries` cells to `keys` cells."""
    return pair_flops(batch * heads * queries * keys, dim, value_dim)


def backward_flops(forward: int) -> int:
    """FLOPs of the backward pass from those of forward; exact if values are as wide as keys."""
    return int(forward * BACKWARD_FACTOR)
