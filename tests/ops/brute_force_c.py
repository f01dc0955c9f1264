# SPDX-License-Identifier: Apache-2.0
"""Variant C as nested loops, straight from the formulas, sharing no code with the package."""

import math

from tests.ops.brute_force import Cell, Map, all_cells, children, grids

Term = tuple[float, list[float]]  # score with the logarithm of the tokens, value


def tokens_below(cell: Cell, level: int, sizes: list[tuple[int, ...]]) -> list[Cell]:
    """Cells of the finest grid that a cell covers."""
    cells = [cell]
    for grid in sizes[level + 1 :]:
        cells = [child for one in cells for child in children(one, grid)]
    return cells


def mean(x: Map, tokens: list[Cell]) -> list[float]:
    width = len(next(iter(x.values())))
    if not tokens:
        return [0.0] * width
    return [sum(x[t][d] for t in tokens) / len(tokens) for d in range(width)]


def attend(
    q: Map,
    k: Map,
    v: Map,
    *,
    size: tuple[int, ...],
    key_size: tuple[int, ...],
    levels: int,
    topk: list[int],
    scale: float,
    hidden_queries: set[Cell],
    hidden_keys: set[Cell],
    prefix: list[tuple[list[float], list[float]]],
    exact_queries: bool,
    lookahead: bool,
) -> tuple[dict[Cell, tuple[list[float], float]], list[dict[Cell, list[Cell]]]]:
    """One head: result and log-sum-exp per token, kept cells per level and query cell.

    Every token walks down by itself: what it shares with its neighbours follows from the formulas.
    """
    sizes, key_sizes = grids(size, levels), grids(key_size, levels)
    selections: list[dict[Cell, list[Cell]]] = [{} for _ in range(levels - 1)]
    results: dict[Cell, tuple[list[float], float]] = {}

    def visible_tokens(cell: Cell, level: int) -> list[Cell]:
        return [t for t in tokens_below(cell, level, key_sizes) if t not in hidden_keys]

    def score(query: list[float], cell: Cell, level: int) -> float:
        tokens = visible_tokens(cell, level)
        key = mean(k, tokens)
        return scale * sum(a * b for a, b in zip(query, key, strict=True)) + math.log(len(tokens))

    def rank(query: list[float], cell: Cell, level: int) -> float:
        if not lookahead:
            return score(query, cell, level)
        below = [c for c in children(cell, key_sizes[level + 1]) if visible_tokens(c, level + 1)]
        return math.log(sum(math.exp(score(query, c, level + 1)) for c in below))

    for token in all_cells(size):
        terms: list[Term] = [
            (scale * sum(a * b for a, b in zip(q[token], key, strict=True)), value)
            for key, value in prefix
        ]
        candidates = [c for c in all_cells(key_sizes[0]) if visible_tokens(c, 0)]
        for level in range(levels):
            cell = tuple(c >> (levels - 1 - level) for c in token)
            shown = [t for t in tokens_below(cell, level, sizes) if t not in hidden_queries]
            query = mean(q, shown) if level < levels - 1 else q[token]
            kept: list[Cell] = []
            if level < levels - 1:
                ranks = {c: rank(query, c, level) for c in candidates}
                best = sorted(candidates, key=lambda c: -ranks[c])[: topk[level]]
                kept = [c for c in candidates if c in best]
                selections[level][cell] = kept
            own = q[token] if exact_queries else query
            terms += [
                (score(own, c, level), mean(v, visible_tokens(c, level)))
                for c in candidates
                if c not in kept
            ]
            if level < levels - 1:
                candidates = [
                    c
                    for one in kept
                    for c in children(one, key_sizes[level + 1])
                    if visible_tokens(c, level + 1)
                ]
        results[token] = softmax_mean(terms, len(next(iter(v.values()))))
    return results, selections


def softmax_mean(terms: list[Term], width: int) -> tuple[list[float], float]:
    if not terms:
        return [0.0] * width, -math.inf
    highest = max(s for s, _ in terms)
    weights = [math.exp(s - highest) for s, _ in terms]
    out = [
        sum(w * value[d] for w, (_, value) in zip(weights, terms, strict=True)) / sum(weights)
        for d in range(width)
    ]
    return out, highest + math.log(sum(weights))
