# SPDX-License-Identifier: Apache-2.0
"""The op against nested loops that share no code with it."""

import itertools

import pytest
import torch

from quadtree_attention import quadtree_attention
from tests.ops import brute_force, brute_force_c

pytestmark = pytest.mark.usefixtures("each_backend")

VARIANTS = {
    "A": {},
    "B": {},
    "C": {"exact_queries": False, "lookahead": False},
    "C exact": {"exact_queries": True, "lookahead": False},
    "C lookahead": {"exact_queries": False, "lookahead": True},
}
CASES = [
    # grid, key grid, levels, topk, hidden share of queries and keys, prefix tokens of variant C
    ((5,), (9,), 3, [2, 3], 0.0, 0.0, 0),
    ((7,), (4,), 4, [1, 2, 9], 0.3, 0.4, 2),
    ((4, 6), (4, 6), 2, [2], 0.0, 0.0, 1),
    ((5, 3), (2, 7), 3, [3, 2], 0.0, 0.0, 0),
    ((3, 5), (6, 7), 3, [2, 4], 0.3, 0.5, 0),
    ((1, 1), (3, 2), 2, [99], 0.0, 0.0, 0),
    ((2, 3, 4), (3, 2, 1), 2, [2], 0.0, 0.3, 3),
]


def as_map(x: torch.Tensor) -> brute_force.Map:
    """(*grid, D) -> dictionary of lists"""
    return {cell: x[cell].tolist() for cell in brute_force.all_cells(tuple(x.shape[:-1]))}


def hidden(mask: torch.Tensor) -> set[brute_force.Cell]:
    return {cell for cell in brute_force.all_cells(tuple(mask.shape)) if not mask[cell]}


@pytest.mark.parametrize("how", VARIANTS)
@pytest.mark.parametrize(
    ("grid", "key_grid", "levels", "topk", "hide_q", "hide_k", "prefix"), CASES
)
def test_equals_nested_loops(how, grid, key_grid, levels, topk, hide_q, hide_k, prefix):
    batch, heads, dim, value_dim = 2, 2, 3, 2
    variant, own = how[0], VARIANTS[how]
    shapes = (grid, dim), (key_grid, dim), (key_grid, value_dim), ((prefix,), dim)
    q, k, v, prefix_keys, prefix_values = (
        torch.randn(batch, *size, heads, width, dtype=torch.float64)
        for size, width in (*shapes, ((prefix,), value_dim))
    )
    query_mask = torch.rand(batch, *grid) >= hide_q
    key_mask = torch.rand(batch, *key_grid) >= hide_k
    logits = torch.randn(levels, dtype=torch.float64) if variant == "B" else None
    first = {"prefix_keys": prefix_keys, "prefix_values": prefix_values}
    out, selection, *lse = quadtree_attention(
        q, k, v, num_levels=levels, topk=topk, variant=variant, level_weights=logits, scale=0.7,
        query_mask=query_mask if hide_q else None, key_mask=key_mask if hide_k else None,
        return_selection=True, return_lse=variant == "C",
        **(own | first if variant == "C" and prefix else own),
    )  # fmt: skip
    for b, n in itertools.product(range(batch), range(heads)):
        maps = (as_map(x[b, ..., n, :]) for x in (q, k, v))
        sizes = {"size": grid, "key_size": key_grid, "levels": levels, "topk": topk, "scale": 0.7}
        sizes["hidden_queries"] = hidden(query_mask[b]) if hide_q else set()
        sizes["hidden_keys"] = hidden(key_mask[b]) if hide_k else set()
        if variant == "C":
            pairs = zip(prefix_keys[b, :, n].tolist(), prefix_values[b, :, n].tolist(), strict=True)
            found, kept = brute_force_c.attend(*maps, **sizes, prefix=list(pairs), **own)
            expected = {cell: value for cell, (value, _) in found.items()}
            for cell, (_, log_sum) in found.items():
                assert lse[0][b][cell][n].item() == pytest.approx(log_sum, abs=1e-12)
        else:
            weights = [] if logits is None else logits.softmax(0).tolist()
            expected, kept = brute_force.attend(*maps, **sizes, variant=variant, weights=weights)
        for cell, value in expected.items():
            assert out[b][cell][n].tolist() == pytest.approx(value, abs=1e-12)
        for level, cells_of in enumerate(kept):
            for cell, cells in cells_of.items():
                got = [tuple(c) for c in selection[level].cells[b][cell][n].tolist()]
                assert sorted(c for c in got if c[0] >= 0) == sorted(cells)
