# SPDX-License-Identifier: Apache-2.0
"""Optimal transport by Sinkhorn iterations.

It uses fused kernels with the triton backend, the direct formula with the reference, and otherwise
products of a matrix with vectors. `plain_sinkhorn` is the specification.
"""

from math import log
from typing import Any

import torch
from torch import Tensor

from quadtree_attention.ops.attention.tree import is_exporting
from quadtree_attention.ops.attention.triton.limits import transport_reasons
from quadtree_attention.ops.autograd import apply, backward_pass
from quadtree_attention.ops.backends import default_backend, fuses

EXPORTED_CELLS = 2**11  # maximum cells per side in exported programs


def sinkhorn(
    scores: Tensor, bin_score: Tensor, iterations: int, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Potentials that make an assignment of scores, in the log domain.

    Every cell has mass 1; the dustbin of a side has the mass of all cells of the other side. The
    assignment is `exp(scores + left[:, :, None] + right[:, None])`; the probability of the dustbin
    for a left cell is `exp(bin_score + left + right_bin)`. Rows are normalised last: they sum to 1
    for any scores, and the sums of columns converge to 1 with the iterations.

    Args:
        scores: (R, S, T).
        bin_score: Score of the dustbin, a scalar.
        iterations: Number of iterations.
        backend: "auto" or the name of a backend; "reference" uses the direct formula.

    Returns:
        left (R, S), right (R, T) and right_bin (R, 1).
    """
    backend = default_backend() if backend == "auto" else backend
    if can_fuse(scores, iterations, backend):
        return apply(WHAT, _Sinkhorn, scores.contiguous(), bin_score.to(scores), iterations)
    if backend == "reference" or not can_scale(scores, iterations):
        return plain_sinkhorn(scores, bin_score, iterations)
    return scaled_sinkhorn(scores, bin_score, iterations)


def can_fuse(scores: Tensor, iterations: int, backend: str = "auto") -> bool:
    """Return True if the kernels support these scores in a call of this backend."""
    fits = scores.numel() > 0 and scores.dtype == torch.float32 and fuses(scores, backend)
    return fits and not transport_reasons(scores.shape, iterations)


def can_scale(scores: Tensor, iterations: int) -> bool:
    """Return True if sums of `scaled_sinkhorn` stay finite for any scores.

    If all cells have the same best match, every iteration multiplies factors by their number.
    """
    largest = log(torch.finfo(scores.dtype).max)
    if is_exporting():  # sizes may be symbolic
        return (iterations + 1) * log(EXPORTED_CELLS) < largest
    cells = max(scores.shape[1:])
    return scores.numel() > 0 and (iterations + 1) * log(cells) < largest


def plain_sinkhorn(
    scores: Tensor, bin_score: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sinkhorn` by the direct formula; saves a few matrices per iteration."""
    rows, sources, targets = scores.shape
    left_bin = right_bin = scores.new_zeros(rows, 1)
    right = scores.new_zeros(rows, targets)
    mass_left, mass_right = (scores.new_full((), n).log() for n in (targets, sources))
    for _ in range(iterations):
        left = -torch.logaddexp((scores + right[:, None]).logsumexp(dim=2), bin_score + right_bin)
        left_bin = mass_left - bin_score - with_bin(right, right_bin)
        right = -torch.logaddexp((scores + left[..., None]).logsumexp(dim=1), bin_score + left_bin)
        right_bin = mass_right - bin_score - with_bin(left, left_bin)
    left = -torch.logaddexp((scores + right[:, None]).logsumexp(dim=2), bin_score + right_bin)
    return left, right, right_bin


def scaled_sinkhorn(
    scores: Tensor, bin_score: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sinkhorn` with one exponential per score, and three matrices saved for the gradient.

    The first half iteration normalises the rows to probabilities. Further half iterations multiply
    them by factors, so that sums need no logarithms. See `can_scale` for the size of factors.
    Shares that underflow are 0; they are negligible relative to the dustbin's share.
    """
    rows, sources, targets = scores.shape
    top = torch.maximum(scores.detach().amax(dim=2, keepdim=True), bin_score.detach())
    shares = (scores - top).exp()
    total = shares.sum(dim=2, keepdim=True) + (bin_score - top).exp()
    shares = shares / total  # probabilities per left cell, (R, S, T)
    transposed = shares.mT.contiguous()  # a vector times a matrix is faster than the other way
    left = first = -(top + total.log())[..., 0]
    right, right_bin = scores.new_zeros(rows, targets), scores.new_zeros(rows, 1)
    mass_left, mass_right = (scores.new_full((), n).log() for n in (targets, sources))
    with torch.autocast(scores.device.type, enabled=False):  # products would lose digits
        for _ in range(iterations):
            left_bin = mass_left - bin_score - with_bin(right, right_bin)
            sums = ((left - first).exp()[:, None] @ shares)[:, 0]
            right = -(sums + (bin_score + left_bin).exp()).log()
            right_bin = mass_right - bin_score - with_bin(left, left_bin)
            sums = (right.exp()[:, None] @ transposed)[:, 0]
            left = first - (sums + (bin_score + right_bin + first).exp()).log()
    return left, right, right_bin


def with_bin(potentials: Tensor, of_bin: Tensor) -> Tensor:
    """(R, S) and (R, 1) -> logarithm of the sum of all, (R, 1)"""
    return torch.cat([potentials, of_bin], dim=1).logsumexp(dim=1, keepdim=True)


WHAT = "the fused Sinkhorn iteration"


class _Sinkhorn(torch.autograd.Function):
    """Autograd function that saves the scores and the potentials of every iteration only."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, bin_score: Tensor, iterations: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from quadtree_attention.ops.transport import kernels

        left, right = kernels.sinkhorn(scores, bin_score, iterations)
        ctx.save_for_backward(scores, bin_score, *left, *right)
        # copies, so that a reference to the last does not keep the potentials of all iterations
        return left.cells[-1].clone(), right.cells[-1].clone(), right.bin[-1, :, None].clone()

    @staticmethod
    def backward(ctx: Any, *dlast: Tensor) -> tuple[Tensor, Tensor, None]:
        dscores, dbin = backward_pass(WHAT, _gradients, *dlast, *ctx.saved_tensors)
        return dscores, dbin, None


def _gradients(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of scores and bin_score from gradients of the results and saved tensors."""
    from quadtree_attention.ops.transport import kernels

    dlast, (scores, bin_score, *potentials) = arguments[:3], arguments[3:]
    left, right = kernels.Side(*potentials[:2]), kernels.Side(*potentials[2:])
    return kernels.sinkhorn_backward(scores, bin_score, left, right, dlast)
