# SPDX-License-Identifier: Apache-2.0
"""Quadtree attention beside full attention on the same maps, forward and backward."""

import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Call, cpu_peak_mib, measure
from benchmarks.suite import SkippedError, Work, cases
from benchmarks.tables.table import number
from quadtree_attention import available_backends, quadtree_attention
from quadtree_attention.ops.attention.problem import check_topk
from quadtree_attention.ops.attention.tree import Tree
from quadtree_attention.ops.backends import BACKENDS
from quadtree_attention.ops.planning.flops import attention_flops, dense_flops

PASSES = ("forward", "forward+backward")
SEED = 0


@dataclass(frozen=True)
class Case:
    """One problem size: self attention on a map of `grid` tokens."""

    name: str  # what the command line and the results call it
    batch: int  # maps per call
    heads: int
    head_dim: int  # channels per head
    grid: tuple[int, int]  # rows and columns of the map
    num_levels: int  # of the pyramid
    topk: int | tuple[int, ...]  # cells kept per query, or one per level that selects, coarse first


CASES = (
    Case("det_b0_s1", 1, 1, 32, (200, 336), 4, 32),
    Case("det_b2_s1", 1, 1, 64, (200, 336), 4, 32),
    Case("det_b2_s2", 1, 2, 64, (100, 168), 3, 32),
    Case("cls_b2_s1", 64, 1, 64, (56, 56), 4, 8),
    Case("loftr_640x480", 2, 8, 32, (60, 80), 3, (32, 16)),
    Case("loftr_1024", 2, 8, 32, (128, 128), 3, (32, 16)),
    Case("hires_512", 1, 1, 64, (512, 512), 4, 8),
)
# One more level for each doubling of the side: the coarsest map is always 16 x 16.
GROWTH = tuple(
    Case(f"growth_{16 << level}", 1, 1, 64, (16 << level, 16 << level), level + 1, 8)
    for level in range(2, 7)
)
# A vision transformer with dense attention, at many tokens; for variant C.
VIT = tuple(
    Case(f"vit_{side}", 1, 12, 64, (side, side), levels, 16)
    for side, levels in ((64, 3), (128, 4), (256, 4), (512, 5))
)
VIT_HEAD = replace(VIT[2], name="vit_256_head", heads=1)  # dense attention takes minutes on a CPU
TINY = Case("tiny", 1, 2, 16, (9, 14), 3, 4)  # for tests only
SUITES = {"all": CASES, "growth": GROWTH, "vit": VIT}
KNOWN = {case.name: case for case in (*CASES, *GROWTH, *VIT, VIT_HEAD, TINY)}
CALIBRATION = GROWTH[0]
_calibrated: dict[tuple[str, ...], float] = {}


def find_cases(names: str) -> tuple[Case, ...]:
    """The cases of a comma-separated list of names, or of a suite: "all", "growth" or "vit"."""
    if names in SUITES:
        return SUITES[names]
    for name in names.split(","):
        if name not in KNOWN:
            known = ", ".join(KNOWN)
            raise ArgumentTypeError(f"unknown case {name!r}; known: {', '.join(SUITES)}, {known}")
    return tuple(KNOWN[name] for name in dict.fromkeys(names.split(",")))


def implementations() -> list[str]:
    """Every implementation that can be asked for."""
    return ["quadtree", *(f"quadtree:{b.name}" for b in BACKENDS), "reference", "sdpa"]


def plan(options: Namespace) -> list[list[Work]]:
    """Every row to measure, one at a time; those that are compared with each other are adjacent."""
    more = {"variant": options.variant, "limit": options.max_estimated_seconds}
    names = [case.name for case in options.cases]
    planned = cases(case=names, dtype=options.dtypes, pass_=options.passes, mode=options.modes,
                    implementation=options.implementations)  # fmt: skip
    return [[Work(case, options.device, more)] for case in planned]


def prepare(work: Work) -> Call:
    """The call to measure, on inputs that exist already."""
    expected, limit = estimate(work), work.more["limit"]
    if expected > limit:
        raise SkippedError(f"estimated {number(expected)} s for one run, limit {limit:g} s")
    return call_of(work, KNOWN[work["case"]])


def values(work: Work) -> dict[str, Any]:
    return {"backend": backend_of(work, KNOWN[work["case"]])}


def call_of(work: Work, case: Case) -> Call:
    """The call on a problem size."""
    q, k, v, grad = _inputs(work, case)
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    if work["implementation"] == "sdpa":  # (B, H, W, N, D) -> (B, N, T, D)
        q, k, v, grad = (x.flatten(1, 2).transpose(1, 2).contiguous() for x in (q, k, v, grad))
    else:
        backend = backend_of(work, case)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return quadtree_attention(q, k, v, backend=backend, **_options(work, case))

    backward = work["pass"] == PASSES[1]
    q, k, v = (x.requires_grad_(backward) for x in (q, k, v))

    def call() -> Any:
        with torch.set_grad_enabled(backward):
            out = attend(q, k, v)
        return torch.autograd.grad(out, (q, k, v), grad) if backward else out

    return call


def backend_of(work: Work, case: Case) -> str | None:
    """The backend that runs; for "auto" the one it takes, so that the record is certain."""
    name = work["implementation"].removeprefix("quadtree").removeprefix(":")
    if name:
        return None if name == "sdpa" else name
    found = available_backends(*_inputs(work, case)[:3], **_options(work, case))
    return next(backend for backend, reasons in found.items() if not reasons)


def _options(work: Work, case: Case) -> dict[str, Any]:
    return {"num_levels": case.num_levels, "topk": case.topk, "variant": work.more["variant"]}


def _inputs(work: Work, case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the result, (B, H, W, N, D) each."""
    size = (case.batch, *case.grid, case.heads, case.head_dim)
    random = torch.Generator().manual_seed(SEED)  # on the CPU: the same numbers on every device
    dtype = getattr(torch, work["dtype"])
    return [torch.randn(size, generator=random).to(work.device, dtype) for _ in range(4)]


def peak(work: Work, options: Namespace) -> float | None:
    """Peak memory on a CPU."""
    case = KNOWN[work["case"]]
    small = replace(case, batch=1, grid=(2**case.num_levels,) * 2)
    return cpu_peak_mib(partial(call_of, work), small, case, threads=options.threads)


def estimate(work: Work) -> float:
    """Seconds that one call may take, from its FLOPs and the time of a small case."""
    name = work["implementation"]
    key = (name, work["dtype"], work["pass"], work.more["variant"])
    if key not in _calibrated:
        call = call_of(work, CALIBRATION)
        (timing,) = measure(call, device=work.device, seconds=0.1, max_repeats=10)
        _calibrated[key] = timing["median_ms"] / 1e3
    return _calibrated[key] * flops(KNOWN[work["case"]], name) / flops(CALIBRATION, name)


def flops(case: Case, implementation: str) -> int:
    """Floating-point operations of the two matrix products of one forward pass."""
    sizes = {"batch": case.batch, "heads": case.heads}
    sizes |= {"dim": case.head_dim, "value_dim": case.head_dim}
    if implementation == "sdpa":
        tokens = math.prod(case.grid)
        return dense_flops(queries=tokens, keys=tokens, **sizes)
    tree = Tree(case.grid, num_levels=case.num_levels)
    topk = check_topk(case.topk, case.num_levels)
    return sum(attention_flops(query_tree=tree, key_tree=tree, topk=topk, **sizes))
