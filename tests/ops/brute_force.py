# SPDX-License-Identifier: Apache-2.0
"""Quadtree attention as nested loops, straight from the formulas, sharing no code with the package.

A map is a dictionary from a coordinate tuple to a list of floats. There is no padding and no tree
order here: a cell has the children that lie on the grid, and hidden cells are simply left out.
"""

import itertools
import math

Cell = tuple[int, ...]
Map = dict[Cell, list[float]]


def grids(size: tuple[int, ...], levels: int) -> list[tuple[int, ...]]:
    """Grid sizes, coarse -> fine."""
    result = [size]
    for _ in range(levels - 1):
        result.insert(0, tuple((s + 1) // 2 for s in result[0]))
    return result


def all_cells(grid: tuple[int, ...]) -> list[Cell]:
    return list(itertools.product(*(range(s) for s in grid)))


def children(cell: Cell, grid: tuple[int, ...]) -> list[Cell]:
    """Children of a cell that lie on the next finer grid, in row-major order."""
    offsets = itertools.product((0, 1), repeat=len(cell))
    found = [tuple(2 * c + o for c, o in zip(cell, offset, strict=True)) for offset in offsets]
    return [child for child in found if all(c < s for c, s in zip(child, grid, strict=True))]


def visible_levels(size: tuple[int, ...], levels: int, hidden: set[Cell]) -> list[set[Cell]]:
    sizes = grids(size, levels)
    result = [{cell for cell in all_cells(size) if cell not in hidden}]
    for i in reversed(range(levels - 1)):
        finer = result[0]
        above = {
            c for c in all_cells(sizes[i]) if any(x in finer for x in children(c, sizes[i + 1]))
        }
        result.insert(0, above)
    return result


def pyramid(finest: Map, size: tuple[int, ...], visible: list[set[Cell]]) -> list[Map]:
    """Means over visible children; zeros where there is none."""
    sizes = grids(size, len(visible))
    width = len(next(iter(finest.values())))
    result = [finest]
    for i in reversed(range(len(visible) - 1)):
        coarser: Map = {}
        for cell in all_cells(sizes[i]):
            shown = [c for c in children(cell, sizes[i + 1]) if c in visible[i + 1]]
            coarser[cell] = [
                sum(result[0][c][d] for c in shown) / len(shown) if shown else 0.0
                for d in range(width)
            ]
        result.insert(0, coarser)
    return result


def softmax(logits: list[float]) -> list[float]:
    if not logits:
        return []
    highest = max(logits)
    weights = [math.exp(x - highest) for x in logits]
    return [w / sum(weights) for w in weights]


def attend(
    q: Map,
    k: Map,
    v: Map,
    *,
    size: tuple[int, ...],
    key_size: tuple[int, ...],
    levels: int,
    topk: list[int],
    variant: str,
    weights: list[float],
    scale: float,
    hidden_queries: set[Cell],
    hidden_keys: set[Cell],
) -> tuple[Map, list[dict[Cell, list[Cell]]]]:
    """One head. Returns the result per finest query cell and the kept cells per level and query."""
    sizes, key_sizes = grids(size, levels), grids(key_size, levels)
    seen = visible_levels(key_size, levels, hidden_keys)
    qs = pyramid(q, size, visible_levels(size, levels, hidden_queries))
    ks, vs = pyramid(k, key_size, seen), pyramid(v, key_size, seen)
    width = len(next(iter(v.values())))
    selections: list[dict[Cell, list[Cell]]] = []
    kept_scores: dict[Cell, dict[Cell, float]] = {}
    totals: Map = {}
    for level in range(levels):
        new_totals: Map = {}
        new_scores: dict[Cell, dict[Cell, float]] = {}
        selection: dict[Cell, list[Cell]] = {}
        for query in all_cells(sizes[level]):
            parent = tuple(c // 2 for c in query)
            if level == 0:
                families = [[c for c in all_cells(key_sizes[0]) if c in seen[0]]]
            else:
                families = [
                    [c for c in children(p, key_sizes[level]) if c in seen[level]]
                    for p in selections[-1][parent]
                ]
            candidates = [c for family in families for c in family]
            logit = {
                c: scale * sum(a * b for a, b in zip(qs[level][query], ks[level][c], strict=True))
                for c in candidates
            }
            score: dict[Cell, float] = {}
            if variant == "B" or level == 0:
                parts = softmax([logit[c] for c in candidates])
                score = dict(zip(candidates, parts, strict=True))
            else:
                for p, family in zip(selections[-1][parent], families, strict=True):
                    for c, part in zip(family, softmax([logit[c] for c in family]), strict=True):
                        score[c] = kept_scores[parent][p] * part
            kept: list[Cell] = []
            if level < levels - 1:
                best = sorted(candidates, key=lambda c: -score[c])[: topk[level]]
                kept = [c for c in candidates if c in best]
            message = [
                sum(
                    score[c] * vs[level][c][d]
                    for c in candidates
                    if variant == "B" or c not in kept
                )
                for d in range(width)
            ]
            if variant == "B":
                message = [weights[level] * m for m in message]
            if level > 0:
                message = [m + t for m, t in zip(message, totals[parent], strict=True)]
            new_totals[query] = message
            new_scores[query] = {c: score[c] for c in kept}
            selection[query] = kept
        totals, kept_scores = new_totals, new_scores
        selections.append(selection)
    return totals, selections[:-1]
