# SPDX-License-Identifier: Apache-2.0
"""The plan of a call: its numbers, its advice and its errors."""

import dataclasses
import re

import pytest
import torch

from quadtree_attention import DTypeError, OptionError, Plan, ShapeError, plan
from quadtree_attention.ops.attention.problem import make_problem
from quadtree_attention.ops.planning.plan import describe_problem
from tests.support import raises

GOOD = {"dim": 16, "num_levels": 2, "topk": 3}


def test_numbers_by_hand():
    """8 x 12 queries and 4 x 20 keys over 2 levels: 24 to 20, then 96 to 3 * 4."""
    result = plan((8, 12), (4, 20), heads=5, dim=16, value_dim=6, num_levels=2, topk=3, batch=7)
    assert isinstance(result, Plan)
    coarse, fine = result.levels
    assert (coarse.grid, coarse.key_grid) == ((4, 6), (2, 10))
    assert (coarse.candidates, coarse.kept) == (20, 3)
    assert (fine.grid, fine.key_grid, fine.candidates, fine.kept) == ((8, 12), (4, 20), 12, 0)
    assert coarse.flops == 7 * 5 * 24 * 20 * 2 * (16 + 6)
    assert fine.flops == 7 * 5 * 96 * 12 * 2 * (16 + 6)
    assert result.quadtree.flops == coarse.flops + fine.flops
    assert result.dense.flops == 7 * 5 * 96 * 80 * 2 * (16 + 6)
    for cost in (result.quadtree, result.dense):
        assert 2 * cost.training_flops == 7 * cost.flops

    rows = 7 * 5 * 4  # batch, heads and bytes of a number
    out = 96 * 6
    levels = (24 + 96) * 16 + (20 + 80) * (16 + 6)
    total, kept = (24 + 96) * 6, 24 * 3
    assert result.quadtree.memory == rows * (levels + total + kept + out)
    gradients = 96 * (16 + 6) + 80 * (16 + 6)
    assert result.quadtree.training_memory == rows * (levels + kept + (24 + 96) + out + gradients)
    inputs = 96 * 16 + 80 * (16 + 6)
    gathered = 24 * 12 * (16 + 6)
    assert result.quadtree.bytes_moved == rows * (
        inputs + levels + (24 + 96) * 16 + 20 * (16 + 6) + gathered + 2 * (total + kept) + out
    )
    assert result.dense.memory == rows * (out + 96)
    assert result.dense.training_memory == rows * (out + inputs + 2 * 96)
    assert result.dense.bytes_moved == rows * (inputs + out)


def test_dense_reads_the_keys_once_per_block_of_queries():
    one, two = (plan((side,), dim=1, num_levels=1, topk=1).dense for side in (128, 256))
    assert one.bytes_moved == 4 * 4 * 128
    assert two.bytes_moved == 4 * (2 * 256 + 2 * 2 * 256)


@pytest.mark.parametrize(
    ("grid", "key_grid", "options"),
    [
        ((31,), None, {"num_levels": 4, "topk": (5, 2, 1)}),
        ((9, 14), (30, 3), {"num_levels": 3, "topk": 99, "variant": "A"}),
        ([5, 6, 7], (4, 4, 9), {"num_levels": 2, "topk": [3], "dtype": torch.float16}),
        (torch.Size((1, 1)), None, {"num_levels": 3, "topk": 1, "dtype": torch.float64}),
        ((9, 14), None, {"num_levels": 1, "topk": 4, "batch": 0}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", torch.device("cpu")])
def test_everything_that_the_function_takes(grid, key_grid, options, device):
    result = plan(grid, key_grid, heads=3, dim=24, device=device, **options)
    assert len(result.levels) == options["num_levels"]
    assert result.levels[-1].grid == tuple(grid)
    assert result.levels[-1].key_grid == tuple(key_grid or grid)
    assert result.cheaper in ("quadtree", "dense")
    assert f"on {device}" in result.problem
    assert result.quadtree.training_memory >= result.quadtree.memory


def test_problem_is_that_of_real_tensors():
    q, k, v = torch.zeros(2, 9, 14, 3, 8), torch.zeros(2, 5, 6, 3, 8), torch.zeros(2, 5, 6, 3, 4)
    options = {"num_levels": 3, "topk": (2, 50), "variant": "A"}
    sizes = {"heads": 3, "dim": 8, "value_dim": 4, "batch": 2}
    assert describe_problem((9, 14), (5, 6), **sizes, **options) == make_problem(q, k, v, **options)


def test_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan((8, 8), **GOOD).cheaper = "quadtree"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("grid", [(14, 14), (7, 20), (196,)])
def test_small_maps_are_for_dense_attention(grid, device, dtype):
    result = plan(grid, heads=2, dim=32, num_levels=2, topk=8, dtype=dtype, device=device)
    assert (result.cheaper, result.cheaper_eager) == ("dense", "dense")
    assert result.advice.startswith("Use dense attention: quadtree takes about ")
    assert "launching the kernels of 2 levels takes longer than dense attention" in result.advice


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_large_maps_are_for_quadtree_attention(device):
    result = plan((512, 500), dim=64, num_levels=4, topk=8, device=device)
    assert (result.cheaper, result.cheaper_eager) == ("quadtree", "quadtree")
    assert re.match(
        r"Use quadtree attention: it is about [\d,]+ times as fast as dense, by an estimate for "
        r"[^.]+\. Training needs \d\.\d times as much memory as dense attention\.$",
        result.advice,
    )


def test_launches_decide_where_there_is_no_graph():
    sizes = {"heads": 2, "dim": 64, "num_levels": 3, "topk": 32, "dtype": torch.bfloat16}
    result = plan((100, 168), **sizes, device="cuda")
    assert (result.cheaper, result.cheaper_eager) == ("quadtree", "dense")
    assert "This holds in a CUDA graph: without one, the host needs about" in result.advice
    assert result.quadtree.eager_seconds > result.dense.eager_seconds > result.quadtree.seconds


def test_keeping_nearly_everything_is_no_saving():
    result = plan((64, 60), heads=8, dim=64, num_levels=2, topk=960)
    assert result.quadtree.flops > result.dense.flops
    assert result.cheaper == "dense"
    assert "topk keeps so many cells that more scores are computed than by" in result.advice


def test_gathering_can_cost_more_than_it_saves():
    sizes = {"heads": 8, "dim": 64, "num_levels": 2, "topk": 8, "dtype": torch.bfloat16}
    result = plan((14, 15), **sizes, batch=64, device="cuda")
    assert result.quadtree.flops < result.dense.flops
    assert result.cheaper == "dense"
    assert "gathering and selecting cells takes longer than the skipped cells save" in result.advice


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_level_is_dense_attention(device, dtype):
    result = plan((200, 336), heads=8, dim=64, num_levels=1, topk=1, dtype=dtype, device=device)
    assert result.quadtree.flops == result.dense.flops
    assert (result.cheaper, result.cheaper_eager) == ("dense", "dense")
    assert "with one level quadtree attention equals dense attention" in result.advice


def test_close_calls_are_not_made():
    """Somewhere on the way from small to large maps the two take as long."""
    plans = [plan((side, side), dim=32, num_levels=3, topk=8) for side in range(8, 200, 2)]
    close = [p for p in plans if 1 / 1.5 < p.quadtree.seconds / p.dense.seconds < 1.5]
    assert close
    assert all(p.advice.startswith("Measure both: ") for p in close)
    assert not any(p.advice.startswith("Measure") for p in plans if p not in close)


BAD = [
    ({"device": "mps"}, OptionError, "device must be of type cuda or cpu, got 'mps'; choose"),
    ({"device": "gpu"}, OptionError, "device must be of type cuda or cpu, got 'gpu'"),
    ({"device": None}, OptionError, "device must be of type cuda or cpu, got None"),
    ({"dtype": "float32"}, DTypeError, "dtype must be a torch.dtype, got 'float32'; try torch"),
    ({"grid": 64}, ShapeError, "grid must be a sequence of sizes, one per axis, got 64; a row of"),
    ({"key_grid": "8x8"}, ShapeError, "key_grid must be a sequence of sizes, one per axis, got '8"),
    ({"grid": (8, -1)}, ShapeError, "grid[1] must be an integer of at least 1, got -1; pass"),
    ({"grid": (8, 2.0)}, ShapeError, "grid[1] must be an integer of at least 1, got 2.0"),
    ({"heads": True}, ShapeError, "heads must be an integer of at least 1, got True"),
    ({"batch": None}, ShapeError, "batch must be an integer of at least 1, got None"),
    ({"value_dim": -3}, ShapeError, "value_dim must be an integer of at least 1, got -3"),
    ({"grid": (2**40, 2**30)}, ShapeError, "a tensor can hold less than 2**63 bytes, got the"),
    # the checks of the call itself
    ({"grid": (8, 0)}, ShapeError, "every axis of q but the batch must have at least one entry"),
    ({"grid": (2, 2, 2, 2)}, ShapeError, "q must be (batch, *grid, heads, dim) with 1, 2 or 3"),
    ({"key_grid": (64,)}, ShapeError, "q and k must have the same number of grid axes, got 2"),
    ({"dtype": torch.int32}, DTypeError, "q must be float32, float64, float16 or bfloat16, got"),
    ({"num_levels": 0}, OptionError, "num_levels must be an integer of at least 1, got"),
    ({"topk": (3, 3)}, OptionError, "topk must have one entry per level that selects"),
    ({"variant": "D"}, OptionError, "variant must be 'A', 'B' or 'C', got variant='D'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=[text[:40] for _, _, text in BAD])
def test_errors(change, error, text):
    raises(error, re.escape(text), plan, **{"grid": (8, 8), **GOOD, **change})
