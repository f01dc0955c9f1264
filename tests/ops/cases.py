# SPDX-License-Identifier: Apache-2.0
"""One table of cases that every fast backend must pass against the reference."""

import pytest
import torch

from tests.support.against_reference import Case, as_sets, check

__all__ = ["CASES", "Case", "as_sets", "check", "compare", "draw", "every_case"]

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


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def compare(fused, plainly, inputs, dtypes, *, of_gradients=1e-5):
    """Results and gradients; the truth is plain PyTorch in float64 on a CPU.

    In half precision, twice the error of plain PyTorch is allowed: differences of sums may cancel.
    """
    given = [x.to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)]
    exact = [x.detach().cpu().double().requires_grad_() for x in given]
    got, true = _and_gradients(fused, given), _and_gradients(plainly, exact)
    allowed = [max(4 * torch.finfo(dtypes[0]).eps, 1e-5)] * len(got)  # interpreters do not round
    if dtypes[0] == torch.float32:
        allowed[1:] = [max(x, of_gradients) for x in allowed[1:]]
    else:
        half = [x.detach().to(dtypes[0]).requires_grad_() for x in given]
        theirs = map(_error, _and_gradients(plainly, half), true)
        allowed = [max(x, 2 * error) for x, error in zip(allowed, theirs, strict=True)]
    for ours, expected, like, most in zip(got, true, [got[0], *given], allowed, strict=True):
        assert ours.dtype == like.dtype
        assert ours.shape == expected.shape
        assert (error := _error(ours, expected)) < most, error


def _and_gradients(function, inputs):
    y = function(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def _error(x, expected):
    """Largest difference, relative to the largest number."""
    error = (x.detach().cpu().double() - expected).abs().max()
    return (error / expected.abs().max().clamp(min=1e-6)).item()
