# SPDX-License-Identifier: Apache-2.0
"""What is measured: the problem sizes, and the calls made on them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention import available_backends, quadtree_attention
from quadtree_attention.ops.backends import BACKENDS

Grid = tuple[int, int]
SEED = 0


@dataclass(frozen=True)
class Case:
    """One problem size: self attention on a map of `grid` tokens.

    Attributes:
        name: What the command line and the results call it.
        batch: Maps per call.
        heads: Attention heads.
        head_dim: Channels per head.
        grid: Rows and columns of the map.
        num_levels: Levels of the pyramid.
        topk: Cells kept per query: one number, or one per level that selects, coarse -> fine.
    """

    name: str
    batch: int
    heads: int
    head_dim: int
    grid: Grid
    num_levels: int
    topk: int | tuple[int, ...]


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
TINY = Case("tiny", 1, 2, 16, (9, 14), 3, 4)  # for tests only


def find_cases(names: str) -> tuple[Case, ...]:
    """The cases of a comma-separated list of names, or of the suite "all" or "growth".

    Raises:
        ValueError: A name is unknown.
    """
    if names in ("all", "growth"):
        return CASES if names == "all" else GROWTH
    known = {case.name: case for case in (*CASES, *GROWTH, TINY)}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ValueError(f"unknown case {unknown[0]!r}; known: all, growth, {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names.split(",")))


@dataclass(frozen=True)
class Work:
    """One call to measure.

    Attributes:
        case: The problem size.
        implementation: "quadtree", "quadtree:<backend>", "reference" or "sdpa".
        dtype: Name of the dtype of the inputs.
        backward: Whether the gradients of q, k and v are computed too.
        variant: The variant of quadtree attention.
        device: "cpu" or "cuda".
    """

    case: Case
    implementation: str
    dtype: str
    backward: bool
    variant: Literal["A", "B"]
    device: str


def implementations() -> list[str]:
    """Every implementation that can be asked for."""
    return ["quadtree", *(f"quadtree:{b.name}" for b in BACKENDS), "reference", "sdpa"]


def prepare(work: Work) -> tuple[Callable[[], object], str | None]:
    """The call to measure, on inputs that exist already, and the backend that runs it."""
    q, k, v, grad = _inputs(work)
    if work.implementation == "sdpa":
        q, k, v, grad = (_tokens(x) for x in (q, k, v, grad))
    q, k, v = (x.requires_grad_(work.backward) for x in (q, k, v))
    attend, backend = _attention(work, q, k, v)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def forward_and_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    return forward_and_backward if work.backward else forward, backend


def flops(case: Case, implementation: str) -> int:
    """Floating-point operations of the two matrix products of one forward pass."""
    pairs = _dense_pairs(case) if implementation == "sdpa" else _quadtree_pairs(case)
    return 4 * case.batch * case.heads * case.head_dim * pairs


def _inputs(work: Work) -> list[Tensor]:
    """q, k, v and the gradient of the result, (B, H, W, N, D) each."""
    case = work.case
    shape = (case.batch, *case.grid, case.heads, case.head_dim)
    random = torch.Generator().manual_seed(SEED)  # on the CPU: the same numbers on every device
    dtype = getattr(torch, work.dtype)
    return [torch.randn(shape, generator=random).to(work.device, dtype) for _ in range(4)]


def _tokens(x: Tensor) -> Tensor:
    """(B, H, W, N, D) -> (B, N, T, D), the layout that `scaled_dot_product_attention` takes."""
    return x.flatten(1, 2).transpose(1, 2).contiguous()


def _attention(
    work: Work, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str | None]:
    if work.implementation == "sdpa":
        return F.scaled_dot_product_attention, None
    case = work.case
    levels, topk, variant = case.num_levels, case.topk, work.variant
    name = work.implementation.removeprefix("quadtree").removeprefix(":")
    if not name:  # what "auto" takes, but called by its name, so that the record is certain
        found = available_backends(q, k, v, num_levels=levels, topk=topk, variant=variant)
        name = next(backend for backend, reasons in found.items() if not reasons)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return quadtree_attention(
            q, k, v, num_levels=levels, topk=topk, variant=variant, backend=name
        )

    return attend, name


def _dense_pairs(case: Case) -> int:
    return math.prod(case.grid) ** 2


def _quadtree_pairs(case: Case) -> int:
    """Pairs of a query and a candidate, summed over the levels."""
    selecting = case.num_levels - 1
    topk = (case.topk,) * selecting if isinstance(case.topk, int) else case.topk
    cells = [
        math.prod(math.ceil(side / 2 ** (selecting - level)) for side in case.grid)
        for level in range(case.num_levels)
    ]
    candidates = cells[0]
    pairs = cells[0] * candidates
    for count, kept in zip(cells[1:], topk, strict=True):
        candidates = 4 * min(kept, candidates)
        pairs += count * candidates
    return pairs
