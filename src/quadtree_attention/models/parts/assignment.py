# SPDX-License-Identifier: Apache-2.0
"""Assignment of cells along rows of two views by optimal transport.

The scores of all pairs of cells of a row are a cross attention restricted to non-negative
disparities. Sinkhorn iterations turn them into an assignment, with a dustbin on either side for
unmatched cells. Rows are independent and processed in chunks, also in training: no tensor of the
size of all rows times the square of the width is stored.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quadtree_attention import checks
from quadtree_attention.ops.attention.tree import is_exporting
from quadtree_attention.ops.transport.functional import sinkhorn

HIDDEN = -1e9  # score of an impossible pair; finite, so that sums have gradients
LEAST_LOG = -100.0  # lower bound of log-probabilities of the ground truth
ENTRIES = 2**25  # entries of matrices computed at a time
CPU_ENTRIES = 2**20  # the same on a CPU, to fit its caches
WINDOW = 1  # neighbours on either side of the best cell that a disparity averages over


class Read(NamedTuple):
    """Assignment of the cells of the left view, each (B, H, W).

    Attributes:
        disparity: Disparity in cells, from the best match and its neighbours.
        matched: Total probability of these.
        log_true: Log-probability of the true match; zeros without ground truth.
        log_none: Log-probability of the dustbin.
    """

    disparity: Tensor
    matched: Tensor
    log_true: Tensor
    log_none: Tensor


class RowAssignment(nn.Module):
    """Disparities of the left view from features of both views.

    Args:
        dim: Channels.
        iterations: Sinkhorn iterations.
        max_entries: Entries of the matrices computed at a time; temporary results take a few
            times as much. None means 2**25, or 2**20 on a CPU.
        project: Apply a linear layer before the scores.
    """

    def __init__(
        self,
        dim: int,
        *,
        iterations: int = 10,
        max_entries: int | None = None,
        project: bool = True,
        **dd: Any,
    ) -> None:
        super().__init__()
        checks.at_least(1, iterations=iterations)
        self.iterations = iterations
        self.max_entries = max_entries
        self.proj: nn.Module = nn.Linear(dim, dim, **dd) if project else nn.Identity()
        self.bin_score = nn.Parameter(torch.zeros((), **dd))

    def forward(
        self,
        features0: Tensor,
        features1: Tensor,
        truth: Tensor | None = None,
        max_disparity: float | None = None,
    ) -> Read:
        """Compute the assignment of every row.

        Args:
            features0: Left (B, H, W, C).
            features1: Right (B, H, W, C).
            truth: True disparity (B, H, W) in cells, if available.
            max_disparity: Largest disparity in cells; None: the width.
        """
        scale = features0.shape[-1] ** -0.25
        rows0, rows1 = (self.proj(x).flatten(0, 1) * scale for x in (features0, features1))
        return self._in_parts(rows0, rows1, features0, truth, max_disparity)

    def of_scores(
        self, scores: Tensor, truth: Tensor | None = None, max_disparity: float | None = None
    ) -> Read:
        """Compute `forward` from precomputed scores (B, H, W, W)."""
        return self._in_parts(scores.flatten(0, 1), None, scores, truth, max_disparity)

    def _in_parts(
        self,
        rows0: Tensor,
        rows1: Tensor | None,
        like: Tensor,
        truth: Tensor | None,
        max_disparity: float | None,
    ) -> Read:
        batch, height, width = like.shape[:3]
        wanted = like.new_zeros(batch, height, width) if truth is None else truth
        wanted = wanted.flatten(0, 1)
        entries = self.max_entries
        if entries is None:
            entries = CPU_ENTRIES if like.device.type == "cpu" else ENTRIES
        # Sizes may be symbolic in an export, which then computes all rows at once
        step = batch * height if is_exporting() else max(1, entries // width**2)
        parts = []
        for start in (0,) if is_exporting() else range(0, batch * height, step):
            part = slice(start, start + step)
            others = None if rows1 is None else rows1[part]
            arguments = (rows0[part], others, wanted[part], self.bin_score, max_disparity)
            if torch.is_grad_enabled():  # recomputed in backward, to avoid storing all chunks
                parts.append(checkpoint(self._read, *arguments, use_reentrant=False))
            else:
                parts.append(self._read(*arguments))
        kinds = zip(*parts, strict=True)
        return Read(*(torch.cat(kind).view(batch, height, width) for kind in kinds))

    def _read(
        self,
        rows0: Tensor,
        rows1: Tensor | None,
        truth: Tensor,
        bin_score: Tensor,
        max_disparity: float | None,
    ) -> Read:
        with torch.autocast(rows0.device.type, enabled=False):
            wide = torch.promote_types(rows0.dtype, torch.float32)
            scores = rows0.to(wide)
            if rows1 is not None:
                scores = scores @ rows1.to(wide).mT  # (R, W, W)
            allowed = possible(scores.shape[-1], max_disparity, device=scores.device)
            scores = scores.masked_fill(~allowed, HIDDEN)
            bins = bin_score.to(wide)
            left, right, right_bin = sinkhorn(scores, bins, self.iterations)
            log_plan = scores + left[..., None] + right[:, None]
            disparity, matched = expected_disparity(log_plan)
            log_true = interpolated(log_plan, truth.to(wide))
            log_none = bins + left + right_bin
        return Read(disparity, matched, log_true, log_none)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}"


def possible(width: int, max_disparity: float | None = None, *, device: Any = None) -> Tensor:
    """Return a mask (W, W) of left (row) and right (column) cells with an allowed disparity."""
    column = torch.arange(width, device=device)
    disparity = column[:, None] - column
    allowed = disparity >= 0
    # positions between two cells are interpolated from both
    return allowed if max_disparity is None else allowed & (disparity < max_disparity + 1)


def expected_disparity(log_plan: Tensor) -> tuple[Tensor, Tensor]:
    """Return the disparity in cells and its total probability, (R, W) each.

    The disparity is the probability-weighted mean over the best match and its neighbours only:
    a mean over all cells would mix different surfaces.
    """
    width = log_plan.shape[-1]
    best = log_plan.detach().argmax(dim=-1, keepdim=True)  # (R, W, 1)
    near = best + torch.arange(-WINDOW, WINDOW + 1, device=best.device)
    inside = (near >= 0) & (near < width)
    near = near.clamp(0, width - 1)
    share = torch.where(inside, log_plan.gather(-1, near).exp(), 0)
    matched = share.sum(dim=-1)
    column = torch.arange(width, device=best.device)[:, None]
    disparity = (share * (column - near)).sum(dim=-1) / matched.clamp(min=1e-12)
    return disparity, matched


def interpolated(log_plan: Tensor, truth: Tensor) -> Tensor:
    """Return log-probabilities at disparities in cells (R, W), interpolated between two cells."""
    width = log_plan.shape[-1]
    place = torch.arange(width, device=truth.device) - truth
    low = place.floor()
    weight = place - low
    # In the log domain, so that the gradient does not vanish for confident wrong assignments
    both = torch.stack([low, low + 1], dim=-1).clamp(0, width - 1).long()
    logs = torch.stack([1 - weight, weight], dim=-1).clamp(min=1e-6).log()
    return (log_plan.gather(-1, both) + logs).logsumexp(dim=-1).clamp(min=LEAST_LOG)
