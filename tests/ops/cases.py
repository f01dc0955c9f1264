# SPDX-License-Identifier: Apache-2.0
"""One table of cases that every fast backend must pass against the reference."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quadtree_attention import quadtree_attention
from quadtree_attention.ops.functional import LevelSelection

Grid = tuple[int, ...]
SEEDS = 5  # a near tie may be decided differently; not for every seed, though


@dataclass(frozen=True)
class Case:
    """A small problem; its tensors follow from a seed.

    Attributes:
        hide_queries, hide_keys: Share of cells that a mask hides; 0 for no mask, 1 hides all cells
            of the first batch entry and a third of those of the others.
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


CASES = (
    Case("plain_b", 1, (8, 12), (8, 12), 1, 32, 32, 2, 4, "B"),
    Case("plain_a", 1, (8, 12), (8, 12), 1, 32, 32, 2, 4, "A"),
    Case("odd_b", 2, (9, 14), (9, 14), 3, 24, 24, 3, 5, "B"),
    Case("odd_a", 2, (9, 14), (9, 14), 3, 24, 24, 3, 5, "A"),
    Case("unequal_b", 1, (7, 13), (12, 5), 5, 48, 48, 3, (7, 3), "B"),
    Case("unequal_a", 1, (7, 13), (12, 5), 5, 48, 48, 3, (7, 3), "A"),
    Case("masks_b", 2, (10, 11), (9, 15), 2, 32, 32, 3, 6, "B", 0.4, 0.4),
    Case("masks_a", 2, (10, 11), (9, 15), 2, 32, 32, 3, 6, "A", 0.4, 0.4),
    Case("nearly_all_hidden_b", 2, (6, 9), (11, 10), 1, 8, 8, 3, 4, "B", 0.0, 0.9),
    Case("nearly_all_hidden_a", 2, (6, 9), (11, 10), 1, 8, 8, 3, 4, "A", 0.0, 0.9),
    Case("all_hidden_b", 3, (5, 8), (7, 6), 2, 16, 8, 2, 3, "B", 1.0, 1.0),
    Case("all_hidden_a", 3, (5, 8), (7, 6), 2, 16, 8, 2, 3, "A", 1.0, 1.0),
    Case("wide_b", 1, (6, 10), (8, 7), 3, 80, 80, 2, 6, "B"),
    Case("wide_a", 1, (6, 10), (8, 7), 3, 80, 64, 2, 6, "A"),
    Case("widest_b", 1, (4, 6), (5, 4), 1, 256, 256, 2, 3, "B"),
    Case("values_differ_b", 1, (9, 8), (8, 11), 8, 64, 24, 3, (5, 9), "B", 0.0, 0.3),
    Case("odd_widths_a", 2, (5, 9), (6, 7), 2, 20, 12, 2, 3, "A", 0.3, 0.3),
    Case("one_level_b", 2, (5, 7), (8, 9), 3, 32, 16, 1, 1, "B", 0.0, 0.5),
    Case("one_level_a", 1, (5, 7), (8, 9), 3, 32, 16, 1, 1, "A"),
    Case("four_levels_b", 1, (17, 26), (19, 22), 1, 16, 16, 4, (5, 4, 3), "B"),
    Case("four_levels_a", 1, (17, 26), (19, 22), 1, 16, 16, 4, (5, 4, 3), "A", 0.0, 0.2),
    Case("more_than_there_is_b", 1, (6, 9), (5, 7), 2, 32, 32, 3, 500, "B"),
    Case("more_than_there_is_a", 1, (6, 9), (5, 7), 2, 32, 32, 3, 500, "A", 0.0, 0.3),
    Case("row_b", 2, (29,), (37,), 3, 24, 24, 4, 3, "B", 0.2, 0.2),
    Case("row_a", 2, (29,), (37,), 3, 24, 24, 4, 3, "A"),
    Case("volume_b", 1, (5, 3, 6), (4, 6, 5), 2, 16, 24, 2, 3, "B", 0.0, 0.3),
    Case("volume_a", 1, (5, 3, 6), (4, 6, 5), 2, 16, 24, 3, 2, "A"),
    Case("one_cell_b", 1, (1, 2), (3, 1), 1, 8, 8, 3, 2, "B"),
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@dataclass(frozen=True)
class Run:
    """What one call gave."""

    out: torch.Tensor
    gradients: dict[str, torch.Tensor]
    selection: tuple[LevelSelection, ...]


def check(case: Case, backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compares a backend with the reference: kept cells, result and all gradients."""
    if dtype in (torch.float16, torch.bfloat16):
        check_low_precision(case, backend, dtype, device)
        return
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for seed in range(SEEDS):
        expected = run(case, "reference", dtype, device, seed)
        got = run(case, backend, dtype, device, seed)
        assert got.out.dtype == dtype
        if same_selection(got, expected, tolerance):
            break
    else:
        pytest.fail(f"the selection differed from that of the reference for {SEEDS} seeds")
    assert_close("out", got.out, expected.out, tolerance)
    for name, gradient in expected.gradients.items():
        assert got.gradients[name].dtype == gradient.dtype
        assert_close(name, got.gradients[name], gradient, tolerance)


def check_low_precision(case: Case, backend: str, dtype: torch.dtype, device: str) -> None:
    """At most twice the error that the reference makes in the same dtype."""
    exact = run(case, "reference", torch.float64, device, rounded_to=dtype)
    plain = run(case, "reference", dtype, device)
    got = run(case, backend, dtype, device)
    same_selection(got, plain, 1e-2)
    pairs = {"out": (got.out, plain.out, exact.out)}
    for name in exact.gradients:
        pairs[name] = tuple(x.gradients[name] for x in (got, plain, exact))
    for name, (ours, theirs, truth) in pairs.items():
        floor = torch.finfo(dtype).eps * max(rms(truth), 1e-3)
        assert rms(ours - truth) <= 2 * rms(theirs - truth) + floor, name


def run(
    case: Case,
    backend: str,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    rounded_to: torch.dtype | None = None,
) -> Run:
    """Result and gradients on inputs that are drawn on the CPU in float64."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=rng, dtype=torch.float64)
        return (x if rounded_to is None else x.to(rounded_to)).to(device, dtype)

    leaves = {
        "q": draw(case.batch, *case.grid, case.heads, case.dim).requires_grad_(),
        "k": draw(case.batch, *case.key_grid, case.heads, case.dim).requires_grad_(),
        "v": draw(case.batch, *case.key_grid, case.heads, case.value_dim).requires_grad_(),
    }
    cotangent = draw(case.batch, *case.grid, case.heads, case.value_dim)
    options: dict[str, Any] = {"num_levels": case.num_levels, "topk": case.topk}
    if case.variant == "B":
        leaves["level_weights"] = draw(case.num_levels).requires_grad_()
    for name, grid, hide in (
        ("query_mask", case.grid, case.hide_queries),
        ("key_mask", case.key_grid, case.hide_keys),
    ):
        if hide > 0:
            mask = torch.rand(case.batch, *grid, generator=rng) >= (1 / 3 if hide == 1 else hide)
            mask[0] &= hide < 1
            options[name] = mask.to(device)
    out, selection = quadtree_attention(
        **leaves, **options, variant=case.variant, backend=backend, return_selection=True
    )
    gradients = torch.autograd.grad(out, tuple(leaves.values()), cotangent)
    return Run(out.detach(), dict(zip(leaves, gradients, strict=True)), selection)


def same_selection(got: Run, expected: Run, tolerance: float) -> bool:
    """Whether the kept cells are the same; their scores must be, as far as they are comparable.

    Where a near tie was decided differently, finer levels look at other cells.
    """
    for level, other in zip(got.selection, expected.selection, strict=True):
        ours, theirs = level.scores.sort(-1).values, other.scores.sort(-1).values
        assert_close("scores", ours, theirs, tolerance)
        if not torch.equal(as_sets(level.cells), as_sets(other.cells)):
            return False
    return True


def as_sets(cells: torch.Tensor) -> torch.Tensor:
    """Coordinates (..., K, ndim) as numbers (..., K) in ascending order."""
    numbers = cells[..., 0]
    for axis in range(1, cells.shape[-1]):
        numbers = numbers * 10_000 + cells[..., axis]
    return numbers.sort(-1).values


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape, name
    highest = expected.abs().max().item()
    if name == "level_weights":  # a difference of large sums; with one level it is 0
        highest = max(highest, 1.0)
    error = (got - expected).abs().max().item()
    assert error <= tolerance * highest, f"{name}: {error=} where the highest number is {highest}"


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()
