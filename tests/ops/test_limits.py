# SPDX-License-Identifier: Apache-2.0
"""Sizes at the limits of the Triton kernels, one below and one above; no GPU and no memory needed.

Whole grids of places go through a kernel of their own. The attention runs with places of 8 bits
instead of 31, so that small maps reach the limits. Launches on maps of true size are recorded.
"""

import random
from math import prod

import numpy as np
import pytest
import torch

from quadtree_attention import OptionError, quadtree_attention
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.ops import launches
from quadtree_attention.ops.attention.problem import make_problem
from quadtree_attention.ops.attention.triton import limits
from quadtree_attention.ops.backends import TRITON
from quadtree_attention.ops.transport.functional import sinkhorn
from tests.ops.cases import Case, check
from tests.support import raises

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")

import triton
import triton.language as tl

from quadtree_attention.ops import kernel
from quadtree_attention.ops.attention.triton import layout, operator, schedule
from quadtree_attention.ops.attention.triton.kernels import places
from quadtree_attention.ops.norms import kernels as norms
from quadtree_attention.ops.transport import kernels as transport
from quadtree_attention.ops.values.kernels import norm_linear, norm_linear_backward

LARGEST_GRID = (2**31 - 1, 65535, 65535)  # programs along the axes of a launch

# ---- places ------------------------------------------------------------------------------------

WHOLE_GRIDS = ((32768, 4), (32769, 4), (40000, 8), (1, 70000), (3, 65537))
WHOLE_GRIDS += ((4, 4, 1500), (2049, 2, 2), (2, 2, 1025), (1, 1, 1040), (70001,))


@triton.jit
def places_kernel(p_row, p_child, cells, parents, size_0, size_1, size_2, above_1, above_2,
                  BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rows by way of their places, and the children of all parents by way of theirs."""
    F: tl.constexpr = 2 ** len(BITS)
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_place = places.place_of(o_row, size_1, size_2, BITS)
    m_place = places.is_on_grid(o_place, size_0, size_1, size_2, BITS)
    o_back = tl.where(m_place, places.row_at(o_place, size_1, size_2, BITS), -1)
    tl.store(p_row + o_row, o_back, mask=o_row < cells)
    o_parent = places.place_of(o_row, above_1, above_2, BITS)
    for i_child in tl.static_range(F):
        o_child = places.child_of(o_parent, o_row * 0 + i_child, BITS)
        m_child = places.is_on_grid(o_child, size_0, size_1, size_2, BITS)
        o_child = tl.where(m_child, places.row_at(o_child, size_1, size_2, BITS), -1)
        tl.store(p_child + o_row * F + i_child, o_child, mask=o_row < parents)


def check_places(grid):
    ndim, bits = len(grid), limits.bits_of(grid)
    assert sum(bits) <= 31
    above = tuple((size + 1) // 2 for size in grid)
    cells, parents, block = prod(grid), prod(above), 65536
    rows = torch.empty(cells, dtype=torch.int32)
    children = torch.empty(parents, 2**ndim, dtype=torch.int32)
    places_kernel[(-(-cells // block),)](
        rows, children, cells, parents, *schedule.three(grid), *schedule.three(above)[1:],
        BITS=bits, BLOCK=block,
    )  # fmt: skip
    assert np.array_equal(rows.numpy(), np.arange(cells))
    steps = np.indices((2,) * ndim).reshape(ndim, 1, -1)
    places = np.indices(above).reshape(ndim, -1, 1) * 2 + steps  # (ndim, parents, F)
    on_grid = np.all([x < size for x, size in zip(places, grid, strict=True)], axis=0)
    expected = np.ravel_multi_index(places, grid, mode="clip")
    assert np.array_equal(children.numpy(), np.where(on_grid, expected, -1))
    packed = layout.packed(torch.arange(cells), layout.Cells(grid, bits))
    axes = layout.coordinates_of(packed, bits)
    assert np.array_equal(torch.stack(axes).numpy(), np.indices(grid).reshape(ndim, -1))


@pytest.mark.parametrize("grid", WHOLE_GRIDS, ids=str)
def test_places_of_whole_grids(grid, interpreter):
    interpreter(check_places, grid)


def test_most_grids_share_the_bits_of_their_axes():
    assert limits.bits_of((2**31 - 2**17,)) == (31,)
    assert limits.bits_of((1, 1)) == limits.bits_of((2**15, 2**16)) == (15, 16)
    assert limits.bits_of((1, 1, 1)) == limits.bits_of((2**11, 2**10, 2**10)) == (11, 10, 10)
    assert limits.bits_of((2**15 + 1, 2**15)) == (16, 15)
    assert limits.bits_of((1, 2**16 + 1)) == (3, 17)  # three levels below one cell are 8 rows
    assert limits.bits_of((1, 2**10 + 1, 9)) == (2, 11, 4)


class _Size(np.int32):
    """A size whose reciprocal is off by some units in the last place, as on a GPU."""

    ulp = 0

    def __rtruediv__(self, one):
        exact = np.float32(one) / np.float32(int(self))
        return (exact.view(np.int32) + np.int32(self.ulp)).view(np.float32)


class _Block(np.ndarray):
    """Numbers that are cast as a block of Triton."""

    def to(self, dtype):
        return self.astype({tl.float32: np.float32, tl.int32: np.int32}[dtype])


def _quotient(o_x, size, ulp):
    moved = _Size(size)
    moved.ulp = ulp
    return kernel.quotient.fn(o_x.astype(np.int32).view(_Block), moved)


@pytest.mark.parametrize("ulp", [-2, -1, 0, 1, 2])
def test_quotients_survive_an_inexact_reciprocal(ulp):
    rng = np.random.default_rng(0)
    for size in [1, 2, 3, 5, 7, 31, 100, 1000, 1023, 1500, 46341, 2**16 + 1, 2**30 + 3]:
        most = min(limits.LARGEST_QUOTIENT, limits.LARGEST_CELLS // size) * size  # cells of a map
        starts = np.minimum(np.arange(2000) * size, most)  # of rows
        o_x = [most - 1 - np.arange(5000), starts, starts - 1, rng.integers(0, most, 20_000)]
        o_x = np.concatenate(o_x).clip(0, most - 1)
        assert np.array_equal(_quotient(o_x, size, ulp), o_x // size), size


def test_quotients_fail_above_their_limit():
    """Or the limit would be too low, and the test above would show nothing."""
    o_x = 8 * limits.LARGEST_QUOTIENT * 3 - 1 - np.arange(100_000)
    assert not np.array_equal(_quotient(o_x, 3, 2), o_x // 3)


# ---- the attention with few bits -----------------------------------------------------------------

FEW_BITS = 8
# the query grid, the key grid, levels, K: at the limit, or one below
SMALL_GRIDS = (
    ((1, 32), (1, 31), 3, 2),
    ((32, 1), (1, 32), 2, 2),  # each grid has its own bits
    ((3, 17), (16, 2), 2, 2),
    ((1, 1, 16), (1, 1, 15), 3, 1),
    ((16, 1, 1), (2, 1, 7), 2, 1),
)
ONE_ABOVE = ((1, 33), (33, 1), (17, 9), (1, 1, 17), (17, 1, 4), (257,))


def with_few_bits(function, *arguments):
    limits.PLACE_BITS = FEW_BITS
    forget()
    try:
        function(*arguments)
    finally:
        limits.PLACE_BITS = 31
        forget()


def forget():
    """What was worked out for another number of bits."""
    for cached in (layout.grids_of, schedule.forward_schedule, schedule.backward_schedule):
        cached.cache_clear()


def check_attention(grid, key_grid, levels, topk, variant, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    for each in (grid, key_grid):
        assert sum(limits.bits_of(each)) <= limits.PLACE_BITS
    case = Case("limits", 1, grid, key_grid, 1, 8, 8, levels, topk, variant, 0.2, 0.2)
    check(case, "triton", torch.float32)


@pytest.mark.parametrize("variant", ["A", "B"])
@pytest.mark.parametrize("case", SMALL_GRIDS, ids=str)
def test_attention_at_the_limits(case, variant, interpreter):
    interpreter(with_few_bits, check_attention, *case, variant, variant == "A")


@pytest.mark.parametrize("grid", ONE_ABOVE, ids=str)
def test_one_above_is_a_reason(grid):
    q = torch.zeros(1, *grid, 1, 8)

    def look():
        smaller = torch.zeros(1, *(1 for _ in grid), 1, 8)
        for pair in ((q, smaller), (smaller, q)):
            problem = make_problem(pair[0], pair[1], pair[1], num_levels=2, topk=1)
            assert any("bits, 8 fit" in reason for reason in limits.reasons(problem))

    with_few_bits(look)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["A", "B"])
def test_a_long_map(variant, interpreter):
    interpreter(check_attention, (1, 1, 1030), (1, 1, 1040), 3, 1, variant, False)


# ---- launches on maps of true size ---------------------------------------------------------------


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def fits(recorded):
    """Grids within what a GPU has, and integers within what kernels calculate in."""
    assert recorded
    for name, grid, arguments in ((x.name, x.grid, x.arguments) for x in recorded):
        for programs, most in zip(grid, LARGEST_GRID, strict=False):
            assert 0 < programs <= most, (name, grid)
        for key, value in arguments.items():
            if isinstance(value, int) and key in kernel.SIZES - {"rows", "kept"}:
                assert value < 2**31, (name, key, value)
        if name.startswith("fine"):
            assert arguments.get("rows", 0) < 2**31 - 16, name
        if "p_first" in arguments:  # sums of counts
            assert arguments["p_first"].dtype == torch.int64
        for key in ("QUERY_BITS", "KEY_BITS", "BITS"):
            assert sum(arguments.get(key, ())) <= 31, (name, arguments[key])


def attend(batch, grid, key_grid, heads, dim, topk, variant="B", deterministic=False):
    """Forward and backward on tensors without memory; gives their launches."""
    q = meta(batch, *grid, heads, dim)
    k = meta(batch, *key_grid, heads, dim)
    levels = len(topk) + 1
    problem = make_problem(q, k, k, num_levels=levels, topk=topk or 1)
    assert limits.reasons(problem) == []
    lists = [q], [k], [k], [], [], None
    with launches.record() as recorded:
        options = list(problem.topk), 1.0, variant, variant == "A"
        out, rest = operator._run(*lists, *options, True)
        operator._run_backward(q, out, rest, *lists, *options, deterministic)
    fits(recorded)
    return recorded


@pytest.mark.parametrize("variant", ["A", "B"])
@pytest.mark.parametrize(
    ("grid", "levels"),
    [((4, 4, 1500), 3), ((40000, 8), 8), ((8, 40000), 8), ((1, 2**27), 4), ((2**21 - 1, 64), 4)],
    ids=str,
)
def test_launches_of_large_attention(grid, levels, variant):
    recorded = attend(1, grid, grid, 2, 32, (8,) * (levels - 1), variant)
    kernels = {x.name for x in recorded}
    assert {"fine_fwd_kernel", "coarse_fwd_kernel", "fine_bwd_keys_kernel"} <= kernels


def test_launches_of_random_attention():
    rng = random.Random(0)
    for _ in range(60):
        ndim = rng.choice([1, 2, 3])
        while True:
            grids = [
                tuple(int(2 ** rng.uniform(0, 30 / ndim + 4)) for _ in range(ndim))
                for _ in range(2)
            ]
            batch, heads = int(2 ** rng.uniform(0, 8)), rng.randint(1, 8)
            levels = rng.randint(1, 5)
            topk = tuple(rng.randint(1, 128) for _ in range(levels - 1))
            q, k = meta(batch, *grids[0], heads, 8), meta(batch, *grids[1], heads, 8)
            try:
                problem = make_problem(q, k, k, num_levels=levels, topk=topk or 1)
            except OptionError:
                continue
            if not limits.reasons(problem):
                break
        attend(batch, *grids, heads, 8, topk, rng.choice("AB"))


def test_users_are_listed_past_2_to_31():
    recorded = attend(16, (2**11, 2**11), (64, 64), 16, 8, (128, 128))
    first = [x.arguments["p_first"] for x in recorded if x.name == "list_users_kernel"]
    users = [x.arguments["p_users"] for x in recorded if x.name == "list_users_kernel"]
    assert min(x.numel() for x in users) >= 2**31
    assert {x.dtype for x in first} == {torch.int64}


NOT_AN_ISSUE = {"batch": 1, "grid": (64, 64), "heads": 1, "levels": 2}
LARGE = {"grid": (2**15, 2**15)}
SINGLE = LARGE | {"levels": 1}
# what is changed to be at the limit, then to be above it, and a word of the reason
LIMITS = {
    "cells": ({"grid": (2**31 - 2**17,)}, {"grid": (2**31 - 2**17 + 1,)}, "cells"),
    "rows": ({"grid": (2**21 - 1, 8)}, {"grid": (2**21, 8)}, "rows"),
    "rows of a volume": ({"grid": (2**11 - 1, 2**10, 4)}, {"grid": (2**11, 2**10, 4)}, "rows"),
    "bits": ({"grid": (7, 2**28)}, {"grid": (9, 2**27 + 1)}, "bits"),
    "families": (LARGE | {"batch": 7}, LARGE | {"batch": 8}, "families"),
    "blocks of a single level": (SINGLE | {"batch": 31}, SINGLE | {"batch": 32}, "families"),
}


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("name", LIMITS)
def test_at_and_above_a_limit(name, side):
    at, above, word = LIMITS[name]
    for change, is_above in ((at, False), (above, True)):
        batch, grid, heads, levels = (NOT_AN_ISSUE | change).values()
        other = tuple(8 for _ in grid)
        grids = (grid, other) if side == "query" else (other, grid)
        topk = (4,) * (levels - 1)
        q, k = (meta(batch, *each, heads, 8) for each in grids)
        problem = make_problem(q, k, k, num_levels=levels, topk=topk or 1)
        found = limits.reasons(problem)
        assert TRITON.reasons(problem)[-len(found) or 99 :] == found
        assert any(word in reason for reason in found) == is_above, found
        if not is_above:
            attend(batch, *grids, heads, 8, topk)


def test_dims_and_topk():
    for dim, topk, reasons in (
        (256, 128, []),
        (256, 129, ["topk goes up to 128, got (129,)"]),
        (257, 1, ["head dims go up to 256, got 257 and 257"]),
    ):
        q = meta(1, 64, 64, 1, dim)
        assert limits.reasons(make_problem(q, q, q, num_levels=2, topk=topk)) == reasons


# ---- norms, value pyramids, position encodings, transport ----------------------------------------


def run_maps(batch, grid, channels):
    x, vector = meta(batch, *grid, channels), meta(channels)
    flat = x.flatten(1, -2)
    with launches.record() as recorded:
        norms.layer_norm(x, vector, vector, 1e-5, x.dtype)
        norms.layer_norm_backward(x, x, vector, 1e-5)
        for columns in (0, grid[1]):
            y, stats = norms.map_norm(flat, vector, vector, 1e-5, norms.GELU, columns)
            norms.map_norm_backward(y, flat, vector, vector, stats, norms.GELU, columns)
        moments = norms.moments_of(flat)
        for children in (1, 4):
            matrix = meta(channels, children * channels)
            by_parent = children == 4
            y, _, stats = norm_linear(
                x, moments, vector, vector, matrix, vector, 1e-5, norms.RELU,
                by_parent=by_parent, with_moments=True,
            )  # fmt: skip
            given = y, x, stats, vector, vector, matrix, norms.RELU
            norm_linear_backward(*given, by_parent=by_parent)
    fits(recorded)


@pytest.mark.parametrize(
    ("batch", "grid", "channels"),
    [
        (1, (512, 512), 512),  # 65,536 blocks of rows in backward
        (1, (725, 725), 512),
        (100_000, (3, 5), 16),  # more maps than a second axis holds
        (1, (2**21 - 2, 64), 8),
        (3, (1, 2**29), 4),
        (16, (2048, 4095), 1024),
    ],
)
def test_launches_on_large_maps(batch, grid, channels):
    assert limits.map_reasons((batch, *grid, channels)) == []
    run_maps(batch, grid, channels)


def test_maps_above_the_limits():
    for reasons, at, above, words in (
        (limits.token_reasons, (2**31 - 2**17, 8), (2**31 - 2**17 + 1, 8), "tokens"),
        (limits.token_reasons, (3, 1024), (3, 1025), "channels go up to 1024"),
        (limits.map_reasons, (1, 2**21 - 2, 64, 8), (1, 2**21 - 1, 64, 8), "2**21 - 1 rows"),
        (limits.map_reasons, (1, 2, 2**30 - 2**16, 4), (1, 1, 2**30, 4), "cells"),  # of two rows
        (limits.map_reasons, (2**21, 1, 8, 1024), (2**24, 1, 8, 1024), "blocks of channels"),
    ):
        assert reasons(at) == [] and words in reasons(above)[0]


def test_transport_at_and_above_its_limits():
    assert limits.transport_reasons((2, 2**15, 2**16 - 1), 100) == []
    assert "2**31 scores" in limits.transport_reasons((2, 2**15, 2**16), 100)[0]
    assert "iterations" in limits.transport_reasons((2**21, 1, 1), 1023)[0]
    assert "blocks" in limits.transport_reasons((2**31 - 16, 1, 1), 0)[0]
    scores = meta(2, 2**15, 2**16 - 1, dtype=torch.float32)
    bin_score = meta(dtype=torch.float32)
    with launches.record() as recorded:
        sides = transport.sinkhorn(scores, bin_score, 2)
        dlast = [meta(2, n, dtype=torch.float32) for n in (*scores.shape[1:], 1)]
        transport.sinkhorn_backward(scores, bin_score, *sides, tuple(dlast))
    fits(recorded)


def test_transport_falls_back_on_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(limits, "LARGEST_PROGRAMS", 0)
    scores = torch.randn(1, 3, 4)
    assert sinkhorn(scores, torch.zeros(()), 3)[0].isfinite().all()


# ---- levels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "most"),
    [((8, 8), 4), ((9, 2), 5), ((1, 1), 4), ((3,), 4), ((33,), 7), ((2, 2, 17), 6)],
)
def test_levels_below_a_single_cell_are_refused(grid, most):
    q = torch.randn(1, *grid, 1, 4)
    out = quadtree_attention(q, q, q, num_levels=most, topk=1, backend="reference")
    assert out.isfinite().all()
    shape = "x".join(map(str, grid))
    for levels in (most + 1, 12, 100):
        text = f"num_levels must be at most {most} for maps of {shape}, got num_levels={levels}; "
        raises(OptionError, text, quadtree_attention, q, q, q, num_levels=levels, topk=1)


def test_the_larger_map_decides_how_many_levels_there_are():
    q, k = torch.randn(1, 2, 3, 1, 4), torch.randn(1, 5, 17, 1, 4)
    text = r"at most 6 for maps of .* and .*, got num_levels=7"
    for maps in ((q, k, k), (k, q, q)):
        quadtree_attention(*maps, num_levels=6, topk=1)
        raises(OptionError, text, quadtree_attention, *maps, num_levels=7, topk=1)


def test_a_module_refuses_them_too():
    attention = QuadtreeAttention(8, 1, num_levels=6)
    assert attention(torch.randn(1, 17, 3, 8)).shape == (1, 17, 3, 8)
    text = "num_levels must be at most 5 for maps of 16x3"
    raises(OptionError, text, attention, torch.randn(1, 16, 3, 8))
