# SPDX-License-Identifier: Apache-2.0
"""Matching of the cells of two maps."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.models.parts.masks import extent
from quadtree_attention.models.parts.similarity import HIDDEN, Similarity
from quadtree_attention.ops.attention.tree import accumulation_dtype, is_exporting
from quadtree_attention.ops.transport.functional import with_bin

Method = Literal["dual_softmax", "optimal_transport"]
CPU_ENTRIES = 2**20  # of a tile on a CPU, to fit its caches


@dataclass(frozen=True)
class CoarseMatches:
    """Pairs of cells; cell indices are row-major.

    Args:
        batch_indexes: Sample of each pair (M,).
        cells0: Cell of map 0 (M,).
        cells1: Cell of map 1 (M,).
        confidence: (M,); 0 for ground truth pairs.
    """

    batch_indexes: Tensor
    cells0: Tensor
    cells1: Tensor
    confidence: Tensor

    def __len__(self) -> int:
        return len(self.cells0)

    def __getitem__(self, index: Any) -> "CoarseMatches":
        """Select pairs by a slice or a tensor."""
        fields = (self.batch_indexes, self.cells0, self.cells1, self.confidence)
        return CoarseMatches(*(field[index] for field in fields))

    def swapped(self) -> "CoarseMatches":
        """Return the pairs with the maps swapped."""
        return CoarseMatches(self.batch_indexes, self.cells1, self.cells0, self.confidence)


class CoarseMatching(nn.Module):
    """Confidence of all pairs of cells, and mutual nearest neighbours.

    With "dual_softmax" the confidence of a pair is the product of the softmax of its similarity
    over the row and over the column. With "optimal_transport" it is the mass that Sinkhorn
    iterations (Cuturi 2013), in the log domain, move from one cell to the other; unmatched cells
    are assigned to a dustbin with a learned score (SuperGlue, Sarlin et al. 2020).

    Pairs with a hidden cell have confidence 0; hidden cells do not affect other pairs.

    Args:
        method: "dual_softmax" or "optimal_transport".
        temperature: Divisor of similarities; dual softmax only.
        threshold: Minimum confidence of matches (exclusive).
        border: Width of the border without matches, in cells of the visible region.
        iterations: Sinkhorn iterations.
        max_entries: Entries of the matrix computed at a time without gradients;
            2**26 in float32 are 256 MiB, and temporary results take the same again.
    """

    bin_score: nn.Parameter | None

    def __init__(
        self,
        method: Method = "dual_softmax",
        *,
        temperature: float = 0.1,
        threshold: float = 0.2,
        border: int = 2,
        iterations: int = 3,
        max_entries: int = 2**26,
        **dd: Any,
    ) -> None:
        super().__init__()
        checks.one_of(get_args(Method), matching=method)
        checks.above(0, temperature=temperature)
        checks.at_least(0, border=border)
        checks.at_least(1, iterations=iterations, max_entries=max_entries)
        self.method = method
        self.temperature = temperature
        self.threshold = threshold
        self.border = border
        self.iterations = iterations
        self.max_entries = max_entries
        self.bin_score = None
        if method == "optimal_transport":
            self.bin_score = nn.Parameter(torch.tensor(1.0, **dd))

    def confidence(
        self, map0: Tensor, map1: Tensor, mask0: Tensor | None, mask1: Tensor | None
    ) -> Tensor:
        """Return the confidence of all pairs of cells, with gradients.

        Args:
            map0: (B, H0, W0, C)
            map1: (B, H1, W1, C)
            mask0: Boolean (B, H0, W0), True = visible, or None.
            mask1: Boolean (B, H1, W1), the same for map 1.

        Returns:
            (B, H0*W0, H1*W1), cells in row-major order.
        """
        with torch.autocast(map0.device.type, enabled=False):
            similarity = self._similarity(map0, map1, mask0, mask1, None)
            gain, rows, columns = self._potentials(similarity)
            ((_, matrix),) = similarity.tiles()
            return (gain * matrix + rows[:, :, None] + columns[:, None]).exp()

    @torch.no_grad()
    def select(
        self,
        confidence: Tensor,
        grid0: tuple[int, int],
        grid1: tuple[int, int],
        mask0: Tensor | None,
        mask1: Tensor | None,
    ) -> CoarseMatches:
        """Select matches in a matrix of `confidence`, sorted by sample and cell of map 0."""
        scores, columns = confidence.max(dim=2)
        rows = confidence.argmax(dim=1)
        pairs = ((grid0, mask0), (grid1, mask1))
        allowed = [self._allowed(*pair, confidence) for pair in pairs]
        return self._mutual((scores, columns, rows), allowed, None)

    @torch.no_grad()
    def forward(
        self,
        map0: Tensor,
        map1: Tensor,
        mask0: Tensor | None,
        mask1: Tensor | None,
        threshold: float | None = None,
    ) -> CoarseMatches:
        """Return `select(confidence(...))` for maps of any size, without storing a large matrix.

        `threshold` overrides the threshold of the module.
        """
        with torch.autocast(map0.device.type, enabled=False):
            similarity = self._similarity(map0, map1, mask0, mask1, self.max_entries)
            scores, columns, rows = similarity.best(*self._potentials(similarity))
        pairs = ((map0, mask0), (map1, mask1))
        allowed = [self._allowed((x.shape[1], x.shape[2]), mask, scores) for x, mask in pairs]
        return self._mutual((scores.exp(), columns, rows), allowed, threshold)

    def extra_repr(self) -> str:
        return (
            f"{self.method}, temperature={self.temperature}, threshold={self.threshold}, "
            f"border={self.border}"
        )

    def _similarity(
        self,
        map0: Tensor,
        map1: Tensor,
        mask0: Tensor | None,
        mask1: Tensor | None,
        max_entries: int | None,
    ) -> Similarity:
        if is_exporting():  # the number of tiles would be symbolic
            max_entries = None
        dtype = accumulation_dtype(map0.dtype)
        divisor = float(map0.shape[-1])
        if self.method == "dual_softmax":
            divisor *= self.temperature
        return Similarity(
            map0.flatten(1, 2).to(dtype) / divisor,
            map1.flatten(1, 2).to(dtype),
            None if mask0 is None else mask0.flatten(1),
            None if mask1 is None else mask1.flatten(1),
            max_entries=max_entries,
            tile_entries=CPU_ENTRIES if map0.is_cpu and max_entries is not None else None,
        )

    def _potentials(self, similarity: Similarity) -> tuple[float, Tensor, Tensor]:
        """Return gain, row and column terms: log confidence = gain * similarity + terms."""
        if self.bin_score is None:
            rows, columns = similarity.log_sums()
            gain, rows, columns = 2.0, -rows, -columns
        else:
            gain = 1.0
            rows, columns = _sinkhorn(similarity, self.bin_score, self.iterations)
        return gain, _hide(rows, similarity.visible0), _hide(columns, similarity.visible1)

    def _allowed(self, grid: tuple[int, int], mask: Tensor | None, like: Tensor) -> Tensor:
        """Return cells (B, H*W) that may match: visible, and not on the border."""
        if mask is None:
            mask = torch.ones(like.shape[0], *grid, dtype=torch.bool, device=like.device)
        inside = mask
        for axis, ends in enumerate(extent(mask).unbind(dim=1), start=1):
            place = torch.arange(mask.shape[axis], device=mask.device)
            near = (place >= self.border) & (place < ends[:, None] - self.border)  # (B, side)
            inside = inside & near.unsqueeze(3 - axis)
        return inside.flatten(1)

    def _mutual(
        self, best: tuple[Tensor, Tensor, Tensor], allowed: list[Tensor], threshold: float | None
    ) -> CoarseMatches:
        scores, columns, rows = best
        cells = torch.arange(columns.shape[1], device=columns.device)
        least = self.threshold if threshold is None else threshold
        kept = (rows.gather(1, columns) == cells) & (scores > least)
        kept &= allowed[0] & allowed[1].gather(1, columns)
        batch_indexes, cells0 = kept.nonzero(as_tuple=True)
        return CoarseMatches(
            batch_indexes, cells0, columns[batch_indexes, cells0], scores[batch_indexes, cells0]
        )


def _sinkhorn(similarity: Similarity, bin_score: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Return potentials of rows (B, S) and columns (B, T) after the iterations.

    Every visible cell has mass 1; the dustbin of a map has the mass of the other map.
    """
    visible0, visible1 = similarity.visible0, similarity.visible1
    score = bin_score.to(similarity.features0.dtype)
    log0 = _count(visible0, similarity.features0).log()  # (B, 1)
    log1 = _count(visible1, similarity.features1).log()
    norm = -torch.logaddexp(log0, log1)
    rows_bin = columns_bin = torch.zeros_like(norm)
    columns = _hide(torch.zeros_like(similarity.features1[..., 0]), visible1)
    rows = _hide(torch.zeros_like(similarity.features0[..., 0]), visible0)
    for _ in range(iterations):
        rows = norm - torch.logaddexp(similarity.row_log_sums(columns), score + columns_bin)
        rows = _hide(rows, visible0)
        rows_bin = log1 + norm - (score + with_bin(columns, columns_bin))
        columns = norm - torch.logaddexp(similarity.column_log_sums(rows), score + rows_bin)
        columns = _hide(columns, visible1)
        columns_bin = log0 + norm - (score + with_bin(rows, rows_bin))
    return rows - norm, columns


def _count(visible: Tensor | None, features: Tensor) -> Tensor:
    """Return the number of visible cells, at least one, (B, 1)."""
    if visible is None:
        return features.new_full((features.shape[0], 1), features.shape[1])
    return visible.sum(dim=1, keepdim=True).clamp(min=1).to(features.dtype)


def _hide(potentials: Tensor, visible: Tensor | None) -> Tensor:
    return potentials if visible is None else torch.where(visible, potentials, HIDDEN)


def matches_for_training(
    predicted: CoarseMatches,
    truth: CoarseMatches,
    *,
    count: int,
    least_true: int = 200,
    generator: torch.Generator | None = None,
) -> CoarseMatches:
    """Return predicted matches, padded with true ones to `count`, to train the fine stage.

    At least `least_true` matches are true ones, drawn with repetition. Without true matches, only
    predicted ones are returned.
    """
    room = max(0, count - least_true)
    if len(predicted) > room:
        order = torch.randperm(len(predicted), generator=generator)[:room]
        predicted = predicted[order.to(predicted.cells0.device)]
    if len(truth) == 0:
        return predicted
    drawn = torch.randint(len(truth), (count - len(predicted),), generator=generator)
    truth = truth[drawn.to(truth.cells0.device)]
    pairs = zip(vars(predicted).values(), vars(truth).values(), strict=True)
    return CoarseMatches(*(torch.cat(pair) for pair in pairs))
