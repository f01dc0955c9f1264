# SPDX-License-Identifier: Apache-2.0
"""Recorded queries and keys, and the selections, scores and attention mass computed from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.ops import LevelSelection, quadtree_attention
from quadtree_attention.ops.attention.problem import check_topk
from quadtree_attention.ops.attention.tree import Tree, hide

Kind = Literal["quadtree", "softmax", "linear"]
SCORES_AT_ONCE = 2**24


class Look(NamedTuple):
    """Candidates of one query on one level.

    Attributes:
        cells: Coordinates (C, ndim) of the candidates, (y, x) order, on the key grid of the level.
        scores: Attention of each candidate (C,).
        kept: Mask (C,) of kept candidates, those with the best scores; False at the finest level.
    """

    cells: Tensor
    scores: Tensor
    kept: Tensor


@dataclass(frozen=True)
class Attention:
    """Queries and keys of some samples of one layer, on the CPU.

    Args:
        q: Queries (B, *grid, N, D).
        k: Keys (B, *key_grid, N, D).
        query_mask: Visible cells (B, *grid), or None for all.
        key_mask: Visible keys (B, *key_grid), or None for all.
        kind: "quadtree", "softmax" or "linear".
        num_levels, topk, variant, scale, level_weights: As in `Layer`.
    """

    q: Tensor
    k: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None
    kind: Kind
    num_levels: int
    topk: tuple[int, ...]
    variant: Any
    scale: float
    level_weights: tuple[float, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(self.q.shape[1:-2])

    @property
    def key_grid(self) -> tuple[int, ...]:
        return tuple(self.k.shape[1:-2])

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @torch.no_grad()
    def selection(self, topk: int | Sequence[int] | None = None) -> tuple[LevelSelection, ...]:
        """Return the kept cells and their scores per level, as `return_selection` does.

        Args:
            topk: Cells to keep; None: as in the layer.
        """
        _, kept = quadtree_attention(
            self.q,
            self.k,
            self.k,
            num_levels=self.num_levels,
            topk=self.topk if topk is None else topk,
            variant=self.variant,
            scale=self.scale,
            query_mask=self.query_mask,
            key_mask=self.key_mask,
            return_selection=True,
        )
        return kept

    @torch.no_grad()
    def look(
        self, at: Sequence[int], head: int, topk: int | Sequence[int] | None = None
    ) -> list[Look]:
        """Return the candidates of query cell `at`, (y, x) of the finest map, on every level."""
        kept = check_topk(self.topk if topk is None else topk, self.num_levels)
        queries = _levels(self.q, self.query_mask, self.num_levels)
        keys = _levels(self.k, self.key_mask, self.num_levels)
        found: list[Look] = []
        parents: Look | None = None
        for level in range(self.num_levels):
            cell = 2 ** (self.num_levels - 1 - level)
            place = tuple(i // cell for i in at)
            k_map, shown = keys[level]
            grid = k_map.shape[1:-2]
            if parents is None:
                cells = torch.cartesian_prod(*(torch.arange(n) for n in grid)).reshape(
                    -1, len(grid)
                )
                handed = torch.ones(len(cells))
            else:
                steps = torch.cartesian_prod(*(torch.arange(2) for _ in grid)).reshape(
                    -1, len(grid)
                )
                cells = (parents.cells[parents.kept][:, None] * 2 + steps).flatten(0, 1)
                handed = parents.scores[parents.kept].repeat_interleave(len(steps))
            inside = (cells < torch.tensor(grid)).all(dim=-1)
            place_of = tuple(cells[inside].unbind(-1))
            visible = shown[0][place_of]
            cells, handed = cells[inside][visible], handed[inside][visible]
            chosen = k_map[0][tuple(cells.unbind(-1))][:, head].float()
            query = queries[level][0][0][place][head].float()
            logits = chosen @ query * self.scale
            if self.variant == "A" and parents is not None:
                same = (cells[:, None] // 2 == cells // 2).all(dim=-1)  # cells with the same parent
                total = torch.where(same, logits, -torch.inf).logsumexp(dim=-1)
                scores = handed * (logits - total).exp()
            else:
                scores = logits.softmax(dim=0)
            keep = torch.zeros(len(cells), dtype=torch.bool)
            if level < self.num_levels - 1:
                rank = scores if self.variant == "A" else logits
                keep[rank.argsort(descending=True, stable=True)[: kept[level]]] = True
            parents = Look(cells, scores, keep)
            found.append(parents)
        return found

    def maps(
        self, at: Sequence[int], head: int | None = None, topk: int | Sequence[int] | None = None
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return scores, candidates and kept cells, as maps (*key_grid_l) per level.

        Args:
            at: Query cell, (y, x) of the finest map.
            head: One head; None: the mean over all.
            topk: Cells to keep; None: as in the layer.
        """
        heads = range(self.heads) if head is None else [head]
        tree = Tree(self.key_grid, self.num_levels)
        found = [torch.zeros(3, *tree.grid_at(level)) for level in range(self.num_levels)]
        for one in heads:
            for level, look in enumerate(self.look(at, one, topk)):
                place: Any = (slice(None), *look.cells.unbind(-1))
                values = torch.stack([look.scores, torch.ones(len(look.scores)), look.kept.float()])
                found[level][place] += values / len(heads)
        return [(level[0], level[1], level[2]) for level in found]

    def scores(self, at: Tensor, topk: int | Sequence[int] | None = None) -> list[Tensor]:
        """Return the scores of queries on every level; 0 for keys that are not candidates.

        Args:
            at: Row-major indices (Q,) of query cells of the first sample.
            topk: Cells to keep; None: as in the layer.

        Returns:
            (Q, N, *key_grid_l) per level, coarse -> fine.
        """
        return [scores for scores, _, _ in self.levels(at, topk)]

    @torch.no_grad()
    def levels(
        self, at: Tensor, topk: int | Sequence[int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield scores and kept cells of queries level by level, coarse -> fine.

        Only these queries are computed, unlike in `selection`.

        Args:
            at: As for `scores`.
            topk: As for `scores`.

        Yields:
            Scores (Q, N, *key_grid_l); row-major indices of kept cells (Q, N, K), best first, empty
            at the finest level; mask of existing kept cells (Q, N, K).
        """
        kept = (*check_topk(self.topk if topk is None else topk, self.num_levels), 0)
        queries = _levels(self.q, self.query_mask, self.num_levels)
        keys = _levels(self.k, self.key_mask, self.num_levels)
        place = torch.unravel_index(at, self.grid)
        scores = chosen = torch.zeros(())
        for level, ((q_map, _), (k_map, shown)) in enumerate(zip(queries, keys, strict=True)):
            side = 2 ** (self.num_levels - 1 - level)
            q = q_map[0][tuple(axis // side for axis in place)].float()  # (Q, N, D)
            logits = torch.einsum("qnd,...nd->qn...", q, k_map[0].float()) * self.scale
            looked = shown[0].expand_as(logits)
            if level:
                looked = looked & _children(chosen, logits)
            logits = logits.masked_fill(~looked, -torch.inf)
            if level and self.variant == "A":
                axes = tuple(range(2, logits.ndim))
                e = (logits - logits.amax(dim=axes, keepdim=True)).double().exp()
                total = e
                for axis in range(2, e.ndim):
                    total = _summed(total, axis, 2)
                share = e / _children(total, e).clamp(min=1e-300)
                scores = (share * _children(scores, e)).float()
            else:
                scores = logits.flatten(2).softmax(dim=-1).nan_to_num().view_as(logits)
            rank = scores if self.variant == "A" else logits
            rank = torch.where(looked, rank, -torch.inf).flatten(2)
            best = rank.topk(min(kept[level], rank.shape[-1])).indices  # sorted
            exists = looked.flatten(2).gather(-1, best)
            chosen = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, best, exists)
            chosen = chosen.view_as(logits)
            yield scores, best, exists

    @torch.no_grad()
    def dense(self, at: Tensor) -> Tensor:
        """Return the scores of queries for all keys of the finest map; linear if the layer is.

        Args:
            at: Row-major indices (Q,) of query cells of the first sample.

        Returns:
            (Q, N, *key_grid).
        """
        q = self.q[0].flatten(0, -3)[at].movedim(1, 0).float()  # (N, Q, D)
        k = self.k[0].flatten(0, -3).movedim(1, 0).float()  # (N, S, D)
        mask = None if self.key_mask is None else self.key_mask[0].flatten()
        if self.kind == "linear":
            products = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
            products = products if mask is None else products * mask
            scores = products / products.sum(dim=-1, keepdim=True).clamp(min=1e-6)
        else:
            logits = q @ k.mT * self.scale
            if mask is not None:
                logits = logits.masked_fill(~mask, -torch.inf)
            scores = logits.softmax(dim=-1).nan_to_num()
        return scores.movedim(0, 1).unflatten(-1, self.key_grid)


def _children(x: Tensor, like: Tensor) -> Tensor:
    """Repeat values (Q, N, *grid) of cells to their children, on the grid of `like`."""
    for axis in range(2, x.ndim):
        x = x.repeat_interleave(2, dim=axis).narrow(axis, 0, like.shape[axis])
    return x


def _levels(x: Tensor, mask: Tensor | None, num_levels: int) -> list[tuple[Tensor, Tensor]]:
    """Return means of a map (B, *grid, N, D) over visible cells, and the mask, on every level."""
    shown = torch.ones(x.shape[:-2], dtype=torch.bool) if mask is None else mask
    levels = [(x, shown)]
    for _ in range(num_levels - 1):
        below, seen = levels[0]
        total, count = hide(below, seen).float(), seen.float()
        for axis in range(1, x.ndim - 2):
            total, count = _summed(total, axis, 2), _summed(count, axis, 2)
        mean = (total / count.clamp(min=1)[..., None, None]).to(x.dtype)
        levels.insert(0, (mean, count > 0))
    return levels


def _summed(x: Tensor, axis: int, cell: int) -> Tensor:
    """Sum `cell` consecutive entries along an axis; the last sum may have fewer terms."""
    if missing := -x.shape[axis] % cell:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, missing])
    return x.unflatten(axis, (-1, cell)).sum(dim=axis + 1)


@torch.no_grad()
def mass_inside(attention: Attention, topk: Sequence[int], queries: int) -> list[Tensor]:
    """Return the probability of full attention in every kept cell of the first sample.

    Args:
        attention: Recorded quadtree attention.
        topk: Cells kept per selecting level.
        queries: Number of visible query cells, spread evenly.

    Returns:
        (Q, N, K) per selecting level, coarse -> fine, best cells first.
    """
    mask = attention.query_mask
    cells = (
        torch.arange(prod(attention.grid)) if mask is None else mask[0].flatten().nonzero()[:, 0]
    )
    wanted = min(len(cells), queries)
    chosen = cells[torch.arange(wanted) * len(cells) // max(1, wanted)]
    step = max(1, SCORES_AT_ONCE // (attention.heads * prod(attention.key_grid)))
    parts = []
    for at in chosen.split(step):
        totals = [attention.dense(at)]  # (Q, N, *key_grid)
        for _ in range(attention.num_levels - 1):
            pooled = totals[0]
            for axis in range(2, pooled.ndim):
                pooled = _summed(pooled, axis, 2)
            totals.insert(0, pooled)
        parts.append(
            [
                total.flatten(2).gather(-1, best) * exists
                for total, (_, best, exists) in zip(totals, attention.levels(at, topk), strict=True)
            ][:-1]
        )
    return [torch.cat(level) for level in zip(*parts, strict=True)]
