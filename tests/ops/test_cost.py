# SPDX-License-Identifier: Apache-2.0
"""Memory and time from sizes, against what was measured."""

from math import prod

import pytest
import torch

from benchmarks.result import read_all
from benchmarks.speed.ops import KNOWN
from quadtree_attention import plan, quadtree_attention
from quadtree_attention.ops.planning import cost
from quadtree_attention.ops.planning.cost import saved_bytes
from quadtree_attention.ops.planning.plan import describe_problem

IMPLEMENTATIONS = ("quadtree", "sdpa")
DRAW = 1.1  # measured times that differ by less than this factor have no winner


def measured_pairs():
    """Rows (quadtree, sdpa) of the committed results that belong together."""
    for result in read_all("speed/ops").values():
        device = result["runs"][0]["machine"]["device"]
        variant = result["runs"][0]["settings"]["variant"]
        found = {}
        for row in (row["case"] | row.get("values", {}) for row in result["rows"]):
            if row["implementation"] in IMPLEMENTATIONS and "median_ms" in row:
                key = (row["case"], row["dtype"], row["pass"], row["mode"])
                found.setdefault(key, {})[row["implementation"]] = row
        for key, rows in found.items():
            if len(rows) == len(IMPLEMENTATIONS):
                yield pytest.param(device, variant, rows, id="-".join([device, *key]))


def has_winner(rows):
    ratio = rows["quadtree"]["median_ms"] / rows["sdpa"]["median_ms"]
    return not 1 / DRAW < ratio < DRAW


def is_launched_one_by_one(device, rows):
    return device == "cuda" and rows["sdpa"]["mode"] == "eager"


PAIRS = list(measured_pairs())
DECIDED = [pair for pair in PAIRS if has_winner(pair.values[2])]
ON_DEVICE = [pair for pair in PAIRS if not is_launched_one_by_one(pair.values[0], pair.values[2])]


def planned(device, variant, rows):
    case, dtype = KNOWN[rows["sdpa"]["case"]], getattr(torch, rows["sdpa"]["dtype"])
    sizes = {name: getattr(case, name) for name in ("heads", "num_levels", "topk", "batch")}
    sizes |= {"dim": case.head_dim, "variant": variant, "dtype": dtype, "device": device}
    return plan(case.grid, **sizes)


def test_there_are_results_of_both_devices():
    assert {pair.values[0] for pair in PAIRS} == {"cpu", "cuda"}
    assert len(DECIDED) >= 20


@pytest.mark.parametrize(("device", "variant", "rows"), DECIDED)
def test_the_measured_winner_is_advised(device, variant, rows):
    result = planned(device, variant, rows)
    advised = result.cheaper_eager if is_launched_one_by_one(device, rows) else result.cheaper
    quadtree, dense = (rows[name]["median_ms"] for name in IMPLEMENTATIONS)
    assert advised == ("quadtree" if quadtree < dense else "dense"), result.advice


@pytest.mark.parametrize(("device", "variant", "rows"), ON_DEVICE)
def test_estimated_speedup_is_near_the_measured_one(device, variant, rows):
    """Within a factor of 2, forward and training alike."""
    result = planned(device, variant, rows)
    measured = rows["sdpa"]["median_ms"] / rows["quadtree"]["median_ms"]
    assert 1 / 2 < result.dense.seconds / result.quadtree.seconds / measured < 2


@pytest.mark.parametrize(("device", "variant", "rows"), PAIRS)
def test_memory_is_near_the_measured_peak(device, variant, rows):
    """Within a factor of 1.5; the peaks of a CPU count memory that is not the call's as well."""
    result = planned(device, variant, rows)
    for ours, name in ((result.quadtree, "quadtree"), (result.dense, "sdpa")):
        training = rows[name]["pass"] == "forward+backward"
        estimate = ours.training_memory if training else ours.memory
        assert 1 / 1.5 < estimate / 2**20 / rows[name]["peak_mib"] < 1.5, name


@pytest.mark.parametrize(
    ("grid", "key_grid", "options"),
    [
        ((16, 24), (16, 24), {"num_levels": 3, "topk": 8}),
        ((13, 22), (19, 9), {"num_levels": 3, "topk": (5, 3), "variant": "A"}),
        ((57,), (90,), {"num_levels": 4, "topk": 4}),
        ((5, 6, 7), (4, 8, 6), {"num_levels": 2, "topk": 6}),
        ((24, 40), (24, 40), {"num_levels": 1, "topk": 6}),
        ((16, 24), (13, 20), {"num_levels": 3, "topk": 8, "variant": "C"}),
        ((24, 40), (24, 40), {"num_levels": 2, "topk": 4, "variant": "C"}),
    ],
)
def test_what_forward_saves(grid, key_grid, options):
    """Bytes that the cpu backend saves for backward, within a factor of 1.25."""
    pytest.importorskip("numba", reason="the cpu backend needs numba")
    shapes = ((2, *grid, 3, 16), (2, *key_grid, 3, 16), (2, *key_grid, 3, 24))
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    saved = {}

    def remember(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        out = quadtree_attention(q, k, v, backend="cpu", **options)
    for x in (q, k, v, out):
        saved.pop(x.untyped_storage().data_ptr(), None)
    problem = describe_problem(grid, key_grid, heads=3, dim=16, value_dim=24, batch=2, **options)
    assert 1 / 1.25 < saved_bytes(problem) / sum(saved.values()) < 1.25


def test_backend_without_copies_needs_no_memory_for_the_finest_level(monkeypatch):
    sizes = {"heads": 2, "dim": 8, "value_dim": 4, "num_levels": 2, "topk": 3}
    with_copies = plan((6, 10), **sizes).quadtree
    monkeypatch.setitem(cost.COPIES_FINEST, "cpu", False)
    without = plan((6, 10), **sizes).quadtree
    cells = 2 * prod((6, 10)) * 4  # bytes of a map of width 1
    assert with_copies.memory - without.memory == cells * (8 + 8 + 4 + 4)
    kept = 2400 + 360 + 600  # coarse levels, selection, message and log-sum-exp
    gradients = 9600 + 2400 + 480 + 960 + 360  # maps, levels, inherited, statistics, users
    assert without.training_memory == kept + 1920 + gradients
    assert with_copies.training_memory > without.training_memory
    assert with_copies.bytes_moved > without.bytes_moved


def test_half_precision_holds_half_where_sums_are_not_kept():
    sizes, dtypes = {"dim": 64, "num_levels": 1, "topk": 1}, (torch.float32, torch.bfloat16)
    full, half = (plan((40, 50), **sizes, dtype=dtype) for dtype in dtypes)
    assert full.quadtree.memory == 2 * half.quadtree.memory
    assert half.quadtree.training_memory > full.quadtree.training_memory / 2  # sums in float32
    # dense: result, three gradients, two numbers per query
    assert full.dense.training_memory == 2000 * (4 * 64 + 2) * 4
    assert half.dense.training_memory == 2000 * (4 * 64 * 2 + 2 * 4 + 64 * 4)


def test_variant_a_keeps_scores_and_lists_slots_too(monkeypatch):
    """With every user of a key comes the number of the key among those it kept."""
    monkeypatch.setitem(cost.COPIES_FINEST, "cpu", False)
    sizes = {"heads": 2, "dim": 8, "num_levels": 3, "topk": (3, 2)}
    a, b = (plan((12, 20), **sizes, variant=variant).quadtree for variant in "AB")
    saved = 2 * (3 * 5 * 3 + 6 * 10 * 2) * 4  # scores
    assert a.memory - b.memory == saved and a.flops == b.flops
    families, queries, kept = 6 * 10, 12 * 20, 2
    slots = 2 * families * kept * 4
    statistics = 2 * (families * kept - 2 * queries) * 4  # of families, not of queries
    assert a.training_memory - b.training_memory == saved + slots + statistics
