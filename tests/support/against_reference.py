# SPDX-License-Identifier: Apache-2.0
"""A small attention problem, and the comparison of a backend with the reference on it.

Needs torch alone, so that it runs where pytest is not installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from quadtree_attention import quadtree_attention, quadtree_attention_pyramid
from quadtree_attention.ops.attention.functional import LevelSelection

Grid = tuple[int, ...]
LOW_PRECISION = (torch.float16, torch.bfloat16)
MOST_NEAR_TIES = 0.02  # share of queries whose selection may differ from the reference's;
MOST_NEAR_TIES_LOW = 0.1  # in low precision


@dataclass(frozen=True)
class Case:
    """A problem; its tensors follow from a seed.

    Attributes:
        hide_queries, hide_keys: Share of cells that a mask hides; 0 for no mask, 1 hides all cells
            of the first batch entry and a third of those of the others.
        pyramids: Draw the maps of every level, for `quadtree_attention_pyramid`.
        layout: "dense", or "heads first" for maps whose heads come before their cells in memory.
        deterministic: Run the backend with `torch.use_deterministic_algorithms(True)`.
    """

    name: str
    batch: int
    grid: Grid
    key_grid: Grid
    heads: int
    dim: int
    value_dim: int
    num_levels: int
    topk: int | tuple[int, ...]
    variant: str
    hide_queries: float = 0.0
    hide_keys: float = 0.0
    weighted: bool = True
    scale: float | None = None
    pyramids: bool = False
    layout: str = "dense"
    deterministic: bool = False


@dataclass(frozen=True)
class Run:
    """Inputs and results of one call."""

    leaves: dict[str, Tensor]
    out: Tensor
    cotangent: Tensor
    selection: tuple[LevelSelection, ...]

    def gradients(self, judged: Tensor) -> dict[str, Tensor]:
        """Gradients of all inputs; only the queries `judged` (B, *grid, N) contribute."""
        found = torch.autograd.grad(
            self.out, tuple(self.leaves.values()), self.cotangent * judged[..., None]
        )
        return dict(zip(self.leaves, found, strict=True))


def check(
    case: Case, backend: str, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> float:
    """Compare a backend with the reference: kept cells, result and all gradients.

    A near tie may be decided differently: the scores of what was kept must agree, and queries
    whose finer levels then look at other cells are left out of the rest of the comparison.

    Returns:
        The share of queries that were compared.
    """
    got = run(case, backend, dtype, device, seed)
    assert got.out.dtype == dtype
    if dtype in LOW_PRECISION:
        plain = run(case, "reference", dtype, device, seed)
        return _check_low_precision(case, got, plain, device, seed)
    # In float64: gradients that cancel have rounding errors in the reference, too
    expected = run(case, "reference", torch.float64, device, seed, rounded_to=dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    judged = same_selection(got, expected, tolerance)
    _check_near_ties(judged, MOST_NEAR_TIES)
    assert_close("out", got.out[judged], expected.out[judged], tolerance)
    gradients = got.gradients(judged)
    for name, gradient in expected.gradients(judged).items():
        assert gradients[name].dtype == dtype
        assert_close(name, gradients[name], gradient, tolerance, least=_terms(case, name))
    return _share(judged)


def _check_low_precision(case: Case, got: Run, plain: Run, device: str, seed: int) -> float:
    """At most twice the error that the reference makes in the same dtype.

    Both are judged on queries for which exact arithmetic keeps the same cells.
    """
    dtype = plain.out.dtype
    exact = run(case, "reference", torch.float64, device, seed, rounded_to=dtype)
    judged = same_selection(got, plain, 1e-2)
    _check_near_ties(judged, MOST_NEAR_TIES_LOW)
    judged = judged & same_selection(exact, plain, torch.inf)
    pairs = {"out": tuple(x.out[judged] for x in (got, plain, exact))}
    gradients = [x.gradients(judged) for x in (got, plain, exact)]
    for name in case_inputs(case):
        pairs[name] = tuple(x[name] for x in gradients)
    # The gradient of a level weight is one sum over all numbers of the result, which may cancel
    whole = (plain.out.numel() ** 0.5) * rms(plain.out) * rms(plain.cotangent) / 16
    for name, (ours, theirs, truth) in pairs.items():
        least = whole if name == "level_weights" else 1e-3 * max(1, 10 * _terms(case, name))
        floor = torch.finfo(dtype).eps * max(rms(truth), least)
        error, allowed = rms(ours - truth), 2 * rms(theirs - truth) + floor
        assert error <= allowed, f"{name}: {error=} where {allowed=}"
    return _share(judged)


def run(
    case: Case,
    backend: str,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    rounded_to: torch.dtype | None = None,
) -> Run:
    """Result on inputs that are drawn on the CPU in float64."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=rng, dtype=torch.float64)
        return (x if rounded_to is None else x.to(rounded_to)).to(device, dtype)

    leaves = {
        name: _laid_out(draw(*shape), case.layout).requires_grad_()
        for name, shape in case_inputs(case).items()
    }
    cotangent = draw(case.batch, *case.grid, case.heads, case.value_dim)
    options: dict[str, Any] = {"topk": case.topk, "variant": case.variant, "scale": case.scale}
    for name, grid, hide in (
        ("query_mask", case.grid, case.hide_queries),
        ("key_mask", case.key_grid, case.hide_keys),
    ):
        if hide > 0 and not (case.pyramids and name == "query_mask"):
            mask = torch.rand(case.batch, *grid, generator=rng) >= (1 / 3 if hide == 1 else hide)
            mask[0] &= hide < 1
            options[name] = mask.to(device)
    options |= {"backend": backend, "return_selection": True}
    if "level_weights" in leaves:
        options["level_weights"] = leaves["level_weights"]
    with _deterministic(case.deterministic and backend != "reference"):
        if case.pyramids:
            maps = (
                [leaves[f"{x}{level}"] for level in range(case.num_levels)] for x in ("q", "k", "v")
            )
            out, selection = quadtree_attention_pyramid(*maps, **options)
        else:
            maps = (leaves[x] for x in ("q", "k", "v"))
            out, selection = quadtree_attention(*maps, num_levels=case.num_levels, **options)
    return Run(leaves, out, cotangent, selection)


def case_inputs(case: Case) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the inputs that get a gradient."""
    shapes = {}
    for name, grid, dim in (
        ("q", case.grid, case.dim),
        ("k", case.key_grid, case.dim),
        ("v", case.key_grid, case.value_dim),
    ):
        for level in range(case.num_levels) if case.pyramids else (case.num_levels - 1,):
            cells = tuple(-(-size // 2 ** (case.num_levels - 1 - level)) for size in grid)
            shapes[f"{name}{level}" if case.pyramids else name] = (
                case.batch, *cells, case.heads, dim,
            )  # fmt: skip
    if case.variant == "B" and case.weighted:
        shapes["level_weights"] = (case.num_levels,)
    return shapes


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another order in memory."""
    if layout == "dense" or x.ndim < 4:
        return x
    return x.movedim(-2, 1).contiguous().movedim(1, -2)


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on or before)
    yield
    torch.use_deterministic_algorithms(before)


def same_selection(got: Run, expected: Run, tolerance: float) -> Tensor:
    """Finest queries (B, *grid, N) for which the same cells were kept at every level.

    At the first level where a query kept other cells, the scores of these must be the same.
    """
    same = torch.ones((), dtype=torch.bool, device=got.out.device)
    for level, other in zip(got.selection, expected.selection, strict=True):
        if same.ndim:
            same = _children(same, level.scores.shape)
        ours, theirs = (x.scores.sort(-1).values.double() for x in (level, other))
        differs = ((ours - theirs).abs().amax(-1) > tolerance * theirs.max()) & same
        assert not differs.any(), "the kept cells do not have the scores of those of the reference"
        same = same & (as_sets(level.cells) == as_sets(other.cells)).all(-1)
    return _children(same, got.out.shape) if same.ndim else same.expand(got.out.shape[:-1])


def _children(x: Tensor, shape: torch.Size) -> Tensor:
    """(B, *grid, N) of a level for the cells of the next finer one."""
    for axis in range(1, x.ndim - 1):
        x = x.repeat_interleave(2, axis).narrow(axis, 0, shape[axis])
    return x


def _check_near_ties(same: Tensor, most: float) -> None:
    differ = 1 - _share(same)
    allowed = max(most, 9 / same.numel())  # a single near tie of the coarsest level and its cells
    assert differ <= allowed, f"{100 * differ:.0f} % of the queries keep other cells"


def _share(judged: Tensor) -> float:
    return judged.double().mean().item()


def as_sets(cells: Tensor) -> Tensor:
    """Coordinates (..., K, ndim) as numbers (..., K) in ascending order."""
    numbers = cells[..., 0]
    for axis in range(1, cells.shape[-1]):
        numbers = numbers * 10_000 + cells[..., axis]
    return numbers.sort(-1).values


def _terms(case: Case, name: str) -> float:
    """Size of the terms of a gradient that may cancel, which determines its rounding error.

    The gradients of q and k are 0 where only one key is visible, that of level weights with one
    level.
    """
    if name == "level_weights":
        return 1.0
    if name[0] not in "qk":
        return 0.0
    size = 0.1 * max(1.0, 1.0 if case.scale is None else case.scale * case.dim**0.5)
    queries_per_key = prod(case.grid) / prod(case.key_grid)
    return size * max(1.0, queries_per_key) ** 0.5 if name[0] == "k" else size


def assert_close(
    name: str, got: Tensor, expected: Tensor, tolerance: float, *, least: float = 0.0
) -> None:
    """Compare with the largest expected number, or with `least` if that is larger."""
    assert got.shape == expected.shape, name
    if not expected.numel():
        return
    highest = max(expected.abs().max().item(), least)
    error = (got - expected).abs().max().item()
    assert error <= tolerance * highest, f"{name}: {error=} where the highest number is {highest}"


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0
