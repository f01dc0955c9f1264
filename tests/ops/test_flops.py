# SPDX-License-Identifier: Apache-2.0
"""FLOPs from sizes, against PyTorch's counter and against counting by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from quadtree_attention import quadtree_attention
from quadtree_attention.ops.attention.tree import Tree
from quadtree_attention.ops.planning import flops


@pytest.mark.parametrize("variant", ["A", "B"])
@pytest.mark.parametrize(
    ("grid", "key_grid", "num_levels", "topk"),
    [
        ((8, 12), (16, 4), 3, (3, 5)),
        ((8, 12), (8, 12), 1, ()),
        ((8, 12), (8, 12), 3, (50, 2)),  # more than the 6 there are
        ((24,), (40,), 4, (2, 1, 3)),
        ((4, 8, 4), (8, 4, 4), 2, (3,)),
    ],
)
def test_what_the_reference_multiplies(grid, key_grid, num_levels, topk, variant):
    sizes = {"batch": 2, "heads": 3, "dim": 8, "value_dim": 4}
    maps = (
        torch.randn(2, *size, 3, dim) for size, dim in ((grid, 8), (key_grid, 8), (key_grid, 4))
    )
    options = {"num_levels": num_levels, "topk": topk, "variant": variant}
    with FlopCounterMode(display=False) as counter:
        quadtree_attention(*maps, **options, backend="reference")
    trees = {"query_tree": Tree(grid, num_levels), "key_tree": Tree(key_grid, num_levels)}
    counted = flops.attention_flops(**sizes, **trees, topk=topk)
    assert len(counted) == num_levels
    assert sum(counted) == counter.get_total_flops()


def test_padding_is_no_query():
    """5 x 7 queries over 3 levels are padded to 8 x 8; 9 x 3 keys to 12 x 4."""
    sizes = {"batch": 1, "heads": 1, "dim": 3, "value_dim": 2}
    trees = {"query_tree": Tree((5, 7), 3), "key_tree": Tree((9, 3), 3)}
    found = flops.attention_flops(**sizes, **trees, topk=(2, 1))
    pairs = [2 * 2 * 3 * 1, 3 * 4 * 2 * 4, 5 * 7 * 1 * 4]
    assert found == [2 * count * (3 + 2) for count in pairs]


def test_candidates():
    assert flops.candidates_per_query(Tree((9, 3), 3), (2, 1)) == [3, 8, 4]
    assert flops.candidates_per_query(Tree((9, 3), 3), (7, 99)) == [3, 12, 48]
    assert flops.candidates_per_query(Tree((9,), 1), ()) == [9]


def test_dense_is_what_pytorch_counts_for_its_own_attention():
    sizes = {"batch": 2, "heads": 3, "queries": 35, "keys": 27, "dim": 16, "value_dim": 16}
    q, k = (2, 3, 35, 16), (2, 3, 27, 16)
    forward = flops.dense_flops(**sizes)
    assert forward == sdpa_flop_count(q, k, k)
    assert flops.backward_flops(forward) == sdpa_backward_flop_count(q, q, k, k)


def test_counts_stay_exact_beyond_what_floats_hold():
    assert flops.backward_flops(2 * (2**60 + 1)) == 5 * (2**60 + 1)
