# SPDX-License-Identifier: Apache-2.0
"""The assignment of rows: marginals, what is read from it, and that chunks change nothing."""

import pytest
import torch

from quadtree_attention.models.parts.assignment import (
    HIDDEN,
    RowAssignment,
    expected_disparity,
    interpolated,
    possible,
)
from quadtree_attention.ops.transport.functional import sinkhorn

pytestmark = pytest.mark.usefixtures("one_thread")


def plan(scores: torch.Tensor, bin_score: torch.Tensor, iterations: int) -> torch.Tensor:
    """The whole assignment, dustbins included, worked out the plain way; rows come last."""
    rows, sources, targets = scores.shape
    full = bin_score.expand(rows, sources + 1, targets + 1).clone()
    full[:, :-1, :-1] = scores
    mass0 = torch.cat([torch.ones(sources), torch.tensor([float(targets)])]).to(scores)
    mass1 = torch.cat([torch.ones(targets), torch.tensor([float(sources)])]).to(scores)
    u, v = torch.zeros(rows, sources + 1).to(scores), torch.zeros(rows, targets + 1).to(scores)
    for _ in range(iterations):
        u = mass0.log() - (full + v[:, None]).logsumexp(dim=2)
        v = mass1.log() - (full + u[..., None]).logsumexp(dim=1)
    u = mass0.log() - (full + v[:, None]).logsumexp(dim=2)
    return (full + u[..., None] + v[:, None]).exp()


@pytest.mark.parametrize("shape", [(3, 9, 9), (2, 1, 1), (2, 5, 12)])
def test_against_the_plain_way(shape):
    torch.manual_seed(0)
    scores, bins = torch.randn(shape, dtype=torch.float64) * 3, torch.tensor(0.7).double()
    left, right, right_bin = sinkhorn(scores, bins, 10)
    expected = plan(scores, bins, 10)
    assert torch.allclose((scores + left[..., None] + right[:, None]).exp(), expected[:, :-1, :-1])
    assert torch.allclose((bins + left + right_bin).exp(), expected[:, :-1, -1])


def test_marginals_after_ten_iterations():
    """On random scores every row and column has its mass to 1e-4, all in."""
    torch.manual_seed(0)
    scores = torch.randn(4, 64, 64, dtype=torch.float64).masked_fill(~possible(64), HIDDEN)
    bins = torch.zeros((), dtype=torch.float64)
    left, right, right_bin = sinkhorn(scores, bins, 10)
    shares = (scores + left[..., None] + right[:, None]).exp()
    rows = shares.sum(dim=2) + (bins + left + right_bin).exp()
    assert (rows - 1).abs().max() < 1e-12
    left_bin_row = plan(scores, bins, 10)[:, -1, :-1]
    assert (shares.sum(dim=1) + left_bin_row - 1).abs().max() < 1e-4


def test_sharp_scores_still_give_probabilities():
    """Ten iterations balance no columns then, but what is said of a left cell sums to 1."""
    torch.manual_seed(0)
    scores = (torch.randn(4, 64, 64) * 10).masked_fill(~possible(64), HIDDEN)
    bins = torch.zeros(())
    left, right, right_bin = sinkhorn(scores, bins, 10)
    log_plan = scores + left[..., None] + right[:, None]
    none = (bins + left + right_bin).exp()
    assert (log_plan.exp().sum(dim=2) + none - 1).abs().max() < 1e-4
    assert none.max() <= 1 + 1e-5
    assert expected_disparity(log_plan)[1].max() <= 1 + 1e-5


def test_truth_draws_an_assignment_that_is_sure_of_something_else():
    scores = torch.zeros(1, 6, 6)
    scores[0, 5, 1] = 60.0
    scores = scores.masked_fill(~possible(6), HIDDEN).requires_grad_()
    left, right, _ = sinkhorn(scores, torch.zeros(()), 10)
    log_plan = scores + left[..., None] + right[:, None]
    loss = -interpolated(log_plan, torch.tensor([[0.0, 0, 0, 0, 0, 1.0]]))[0, 5]
    (gradient,) = torch.autograd.grad(loss, scores)
    assert loss > 20 and gradient[0, 5, 4] < -0.5  # more for cell 4, at a disparity of 1


def test_impossible_pairs_get_nothing():
    assert possible(4).long().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert possible(4, 1).long().sum(dim=1).tolist() == [1, 2, 2, 2]
    assert possible(4, 1.5).long().sum(dim=1).tolist() == [1, 2, 3, 3]
    module = RowAssignment(8)
    features = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    read = module(*features, max_disparity=5)
    column = torch.arange(30)
    assert (read.disparity >= 0).all() and (read.disparity <= column.clamp(max=5)).all()


def test_disparity_is_a_mean_over_the_best_and_its_neighbours():
    shares = torch.full((1, 6, 6), 1e-9)
    shares[0, 5] = torch.tensor([0.3, 0.0, 0.1, 0.4, 0.1, 0.0]).clamp(min=1e-9)
    disparity, matched = expected_disparity(shares.log())
    assert matched[0, 5].item() == pytest.approx(0.6)
    assert disparity[0, 5].item() == pytest.approx(2.0)  # without the far 0.3
    shares[0, 5] = torch.tensor([0.6, 0.2, 0.0, 0.0, 0.0, 0.0]).clamp(min=1e-9)  # at the edge
    disparity, matched = expected_disparity(shares.log())
    assert disparity[0, 5].item() == pytest.approx((0.6 * 5 + 0.2 * 4) / 0.8)


def test_share_of_the_truth():
    shares = torch.full((1, 5, 5), 0.01)
    shares[0, 4, 1], shares[0, 4, 2] = 0.5, 0.3
    truth = torch.tensor([[0.0, 0.0, 0.0, 0.0, 2.25]])  # from column 4 to 1.75
    found = interpolated(shares.log(), truth)[0, 4].exp().item()
    assert found == pytest.approx(0.25 * 0.5 + 0.75 * 0.3)
    exact = interpolated(shares.log(), torch.full((1, 5), 2.0))[0, 4].exp().item()
    assert exact == pytest.approx(0.3, rel=1e-4)


def test_chunks_change_nothing():
    torch.manual_seed(0)
    features = [torch.randn(2, 7, 20, 8, requires_grad=True) for _ in range(2)]
    truth = torch.rand(2, 7, 20) * 4
    whole, few = RowAssignment(8), RowAssignment(8, max_entries=3 * 400)
    few.load_state_dict(whole.state_dict())
    results, gradients = [], []
    for module in (whole, few):
        read = module(*features, truth)
        loss = read.disparity.mean() - read.log_true.mean() - read.log_none.mean()
        results.append(read)
        gradients.append(torch.autograd.grad(loss, [*features, *module.parameters()]))
    for one, other in zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(few(*features, truth).disparity, results[0].disparity)


def test_gradients():
    torch.manual_seed(0)
    module = RowAssignment(4, iterations=3, dtype=torch.float64)
    features = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    truth = torch.rand(1, 2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: tuple(module(a, b, truth)), features)
