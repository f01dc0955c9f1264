# SPDX-License-Identifier: Apache-2.0
"""The op against nested loops that share no code with it."""

import pytest
import torch

from quadtree_attention import quadtree_attention
from tests.ops import brute_force

pytestmark = pytest.mark.usefixtures("each_backend")

CASES = [
    # grid, key grid, levels, topk, hidden share of queries and keys
    ((5,), (9,), 3, [2, 3], 0.0, 0.0),
    ((7,), (4,), 4, [1, 2, 9], 0.3, 0.4),
    ((4, 6), (4, 6), 2, [2], 0.0, 0.0),
    ((5, 3), (2, 7), 3, [3, 2], 0.0, 0.0),
    ((3, 5), (6, 7), 3, [2, 4], 0.3, 0.5),
    ((1, 1), (3, 2), 2, [99], 0.0, 0.0),
    ((2, 3, 4), (3, 2, 1), 2, [2], 0.0, 0.3),
]


def as_map(x: torch.Tensor) -> brute_force.Map:
    """(*grid, D) -> dictionary of lists"""
    return {cell: x[cell].tolist() for cell in brute_force.all_cells(tuple(x.shape[:-1]))}


@pytest.mark.parametrize("variant", ["A", "B"])
@pytest.mark.parametrize(("grid", "key_grid", "levels", "topk", "hide_q", "hide_k"), CASES)
def test_equals_nested_loops(variant, grid, key_grid, levels, topk, hide_q, hide_k):
    batch, heads, dim, value_dim = 2, 2, 3, 2
    q = torch.randn(batch, *grid, heads, dim, dtype=torch.float64)
    k = torch.randn(batch, *key_grid, heads, dim, dtype=torch.float64)
    v = torch.randn(batch, *key_grid, heads, value_dim, dtype=torch.float64)
    query_mask = torch.rand(batch, *grid) >= hide_q
    key_mask = torch.rand(batch, *key_grid) >= hide_k
    logits = torch.randn(levels, dtype=torch.float64) if variant == "B" else None
    out, selection = quadtree_attention(
        q, k, v, num_levels=levels, topk=topk, variant=variant, level_weights=logits, scale=0.7,
        query_mask=query_mask if hide_q else None, key_mask=key_mask if hide_k else None,
        return_selection=True,
    )  # fmt: skip
    for b in range(batch):
        for n in range(heads):
            expected, kept = brute_force.attend(
                as_map(q[b, ..., n, :]), as_map(k[b, ..., n, :]), as_map(v[b, ..., n, :]),
                size=grid, key_size=key_grid, levels=levels, topk=topk, variant=variant,
                weights=[] if logits is None else logits.softmax(0).tolist(), scale=0.7,
                hidden_queries=hidden(query_mask[b]) if hide_q else set(),
                hidden_keys=hidden(key_mask[b]) if hide_k else set(),
            )  # fmt: skip
            for cell, value in expected.items():
                assert out[b][cell][n].tolist() == pytest.approx(value, abs=1e-12)
            for level, cells_of in enumerate(kept):
                for cell, cells in cells_of.items():
                    got = [tuple(c) for c in selection[level].cells[b][cell][n].tolist()]
                    assert sorted(c for c in got if c[0] >= 0) == sorted(cells)


def hidden(mask: torch.Tensor) -> set[brute_force.Cell]:
    return {cell for cell in brute_force.all_cells(tuple(mask.shape)) if not mask[cell]}
