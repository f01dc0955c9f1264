# SPDX-License-Identifier: Apache-2.0
"""Fast Sinkhorn iterations against plain ones; kernels in Triton's interpreter and on a GPU."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from quadtree_attention import use_backend
from quadtree_attention.models.parts.assignment import HIDDEN, RowAssignment, possible
from quadtree_attention.ops.transport.functional import (
    can_fuse,
    can_scale,
    plain_sinkhorn,
    sinkhorn,
)
from tests.interpreter import kernels


@dataclass(frozen=True)
class Case:
    """Scores (R, S, T) of this deviation, cut off at 50."""

    shape: tuple[int, int, int]
    deviation: float = 2.0
    iterations: int = 10
    max_disparity: float | None = None
    hides: bool = True  # what lies to the right; needs S = T
    hides_all: bool = False  # of one row and one column

    @property
    def tolerance(self) -> float:
        """Of potentials, in float32: 50 is rounded to 2e-6."""
        return 1e-5 if self.deviation < 10 else 3e-5


CASES = (
    Case((1, 16, 16), hides=False),
    Case((1, 1, 1)),
    Case((2, 5, 12), hides=False),
    Case((3, 40, 9), hides=False, iterations=1),
    Case((5, 17, 17), max_disparity=4.5),
    Case((2, 70, 70), max_disparity=20),
    Case((4, 33, 33), deviation=10.0),
    Case((2, 31, 31), deviation=50.0),
    Case((3, 24, 24), hides_all=True),
    Case((2, 18, 18), deviation=50.0, hides_all=True),
    Case((1, 20, 300), hides=False, iterations=2),  # more than one block of what is summed up
    Case((1, 300, 20), hides=False, iterations=2),
)
LARGE_CASES = (
    Case((64, 480, 480)),
    Case((64, 480, 480), deviation=50.0, hides_all=True),
    Case((64, 256, 256), max_disparity=64),
    Case((7, 251, 251)),
    Case((2, 1999, 1999), iterations=3),
    Case((2, 700, 1000), hides=False, iterations=3),
    Case((70000, 16, 16)),  # more than a second axis of programs would take
)


def inputs_of(case, device):
    """Scores, the dustbin's score, and what the results are weighed with in a loss."""
    rng = torch.Generator().manual_seed(0)
    rows, sources, targets = case.shape
    scores = torch.randn(case.shape, generator=rng).mul_(case.deviation).clamp_(-50, 50)
    if case.hides:
        scores.masked_fill_(~possible(sources, case.max_disparity), HIDDEN)
    if case.hides_all:
        scores[:, sources // 2] = HIDDEN
        scores[:, :, targets // 3] = HIDDEN
    weights = [torch.randn(rows, n, generator=rng).to(device) for n in (sources, targets, 1)]
    return scores.to(device), torch.tensor(0.7, device=device), weights


def with_gradients(function, scores, bin_score, iterations, weights):
    scores, bin_score = (t.detach().clone().requires_grad_() for t in (scores, bin_score))
    results = function(scores, bin_score, iterations)
    loss = sum((x * w.to(x)).sum() for x, w in zip(results, weights, strict=True))
    return results, torch.autograd.grad(loss, (scores, bin_score))


def check(case, device, *, fused=True):
    """Results and gradients, with plain PyTorch in float64 as the truth."""
    scores, bin_score, weights = inputs_of(case, device)
    assert can_fuse(scores, 3) == fused
    exact = scores.double(), bin_score.double(), case.iterations, weights
    results, gradients = with_gradients(sinkhorn, scores, bin_score, case.iterations, weights)
    truth, true_gradients = with_gradients(plain_sinkhorn, *exact)
    for x, true in zip(results, truth, strict=True):
        assert x.shape == true.shape and x.dtype == torch.float32
        assert (x - true).abs().max() < case.tolerance, case
    (dscores, dbin), (true_dscores, true_dbin) = gradients, true_gradients
    assert (dscores - true_dscores).abs().max() < 1e-4 * true_dscores.abs().max(), case
    # terms of either sign, one for every cell, all but cancel each other out
    terms = sum(w.double().abs().sum() for w in weights)
    assert (dbin - true_dbin).abs() < 1e-6 * terms + 1e-4 * true_dbin.abs(), case


def check_modes(device):
    """Layouts, autocast, checkpoints and no_grad change nothing, and there may be no scores."""
    scores, bin_score, weights = inputs_of(Case((2, 19, 19)), device)
    expected, gradients = with_gradients(sinkhorn, scores, bin_score, 3, weights)

    def transposed(scores, *rest):
        return sinkhorn(scores.mT.contiguous().mT, *rest)

    def under_autocast(*inputs):
        with torch.autocast(device, torch.bfloat16):
            return sinkhorn(*inputs)

    def from_checkpoint(*inputs):
        return checkpoint(sinkhorn, *inputs, use_reentrant=False)

    layouts = [transposed] if can_fuse(scores, 3) else []  # PyTorch rounds by the layout
    for function in (under_autocast, from_checkpoint, *layouts):
        again = with_gradients(function, scores, bin_score, 3, weights)
        for x, y in zip((*expected, *gradients), (*again[0], *again[1]), strict=True):
            assert torch.equal(x, y)
    with torch.no_grad():
        for x, y in zip(expected, sinkhorn(scores.requires_grad_(), bin_score, 3), strict=True):
            assert torch.equal(x, y) and not y.requires_grad
    compiled = torch.compile(sinkhorn, backend="eager", fullgraph=True)  # without kernels of ours
    for x, y in zip(expected, compiled(scores, bin_score, 3), strict=True):
        assert torch.allclose(x, y, atol=1e-5)
    empty = sinkhorn(scores[:0], bin_score, 3)
    assert [tuple(x.shape) for x in empty] == [(0, 19), (0, 19), (0, 1)]
    # one result alone, as a loss may need no other
    (alone,) = torch.autograd.grad(sinkhorn(scores, bin_score, 3)[1].sum(), scores)
    (true,) = torch.autograd.grad(plain_sinkhorn(scores, bin_score, 3)[1].sum(), scores)
    assert torch.allclose(alone, true, atol=1e-5)


def check_module(device):
    """Through the module that needs it, which makes rows again for the gradient."""
    torch.manual_seed(0)
    module = RowAssignment(8, iterations=4, max_entries=3 * 21**2).to(device)
    features = torch.randn(2, 1, 7, 21, 8, device=device)
    truth = torch.rand(1, 7, 21, device=device) * 4

    def run(module, dtype):
        read = module(*features.to(dtype), truth.to(dtype), max_disparity=9)
        loss = read.disparity.mean() - read.log_true.mean() - read.log_none.mean()
        return *read, *torch.autograd.grad(loss, list(module.parameters()))

    results = run(module, torch.float32)
    for x, true in zip(results, run(module.double(), torch.float64), strict=True):
        assert (x - true).abs().max() < 1e-4 * true.abs().max()


@kernels(check, zip(CASES), zip(CASES + LARGE_CASES))
def test_kernels(run):
    run()


@kernels(check_modes)
def test_modes(run):
    run()


@kernels(check_module)
def test_module(run):
    run()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_kernels(case):
    check(case, "cpu", fused=False)


@pytest.mark.parametrize("check", [check_modes, check_module])
def test_checks_without_kernels(check):
    check("cpu")


@pytest.mark.parametrize("bin_score", [-120.0, -30.0, 30.0, 120.0])
def test_dustbins_that_are_never_or_always_taken(bin_score):
    """Sums without logarithms hold for any score of a dustbin that training may reach."""
    scores, _, weights = inputs_of(Case((2, 23, 23), deviation=10.0), "cpu")
    check_extreme(scores, torch.tensor(bin_score), weights)


@pytest.mark.parametrize("size", [24, 480])
def test_one_partner_that_all_want(size):
    """Scores far above that of the dustbins: nothing else than the partner can be had."""
    scores = torch.full((1, size, size), HIDDEN)
    scores[:, :, 0] = 150.0
    weights = [torch.ones(1, n) for n in (size, size, 1)]
    assert can_scale(scores, 10) and not can_scale(scores, 40)
    check_extreme(scores, torch.tensor(0.0), weights)
    for x in sinkhorn(scores, torch.tensor(0.0), 40):
        assert x.isfinite().all()


def check_extreme(scores, bin_score, weights):
    """To float32's digits of the largest number that there is."""
    exact = scores.double(), bin_score.double(), 10, weights
    results, gradients = with_gradients(sinkhorn, scores, bin_score, 10, weights)
    truth, true_gradients = with_gradients(plain_sinkhorn, *exact)
    for x, true in zip((*results, *gradients), (*truth, *true_gradients), strict=True):
        assert (x - true).abs().max() < 2e-6 * max(1, true.abs().max(), abs(bin_score))


def test_the_reference_is_plain():
    scores, bin_score, _ = inputs_of(Case((2, 9, 9)), "cpu")
    plain = plain_sinkhorn(scores, bin_score, 2)
    with use_backend("reference"):
        results = sinkhorn(scores, bin_score, 2)
    for x, y in zip(results, plain, strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_no_kernels_where_the_reference_is_asked_for():
    scores = torch.zeros(1, 2, 2, device="cuda")
    assert can_fuse(scores, 3)
    with use_backend("reference"):
        assert not can_fuse(scores, 3)
    assert not can_fuse(scores.double(), 3)
    assert not can_fuse(scores[:0], 3)


@pytest.mark.gpu
def test_memory_on_a_gpu():
    """The scores, their gradient, and potentials."""
    bin_score = torch.zeros((), device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    scores = torch.randn(64, 480, 480, device="cuda", requires_grad=True)
    left, right, right_bin = sinkhorn(scores, bin_score, 10)
    (left.sum() + right.square().sum() + right_bin.sum()).backward()
    held = torch.cuda.max_memory_allocated() - before
    assert held < 3 * scores.nbytes
