# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""Selection of the highest numbers of a row, without sorting.

The search finds a threshold that exactly K numbers reach. The first guess assumes a normal
distribution, the next ones shift the threshold by the error in ranks, and bisection guarantees
termination. Ties at the threshold are rare and use a slower path.
"""

import math

import numpy as np

from quadtree_attention.ops.attention.cpu.kernels.vectors import (
    add,
    at,
    count_bits,
    fma,
    function,
    higher,
    highest,
    inlined,
    load,
    lower,
    lowest,
    not_below,
    replace,
    splat,
    store_positions,
    total,
    zeros,
)
from quadtree_attention.ops.attention.cpu.shape import LANES

GUESSES = 6  # guesses before bisection
HALVINGS = 64
# Positions of the set bits of every byte, packed into the bytes of an integer.
POSITIONS = np.array(
    [
        sum(i << 8 * n for n, i in enumerate(i for i in range(LANES) if byte >> i & 1))
        for byte in range(2**LANES)
    ]
)


@inlined
def normal_guess(count, topk, like):
    """Return threshold and width of one rank of a normal distribution, in standard deviations.

    It is approximated by the logistic distribution, which has a simple inverse.
    """
    share = min(max(topk / max(count, 1), 0.01), 0.99)
    rank = 1 / (1.7 * share * (1 - share) * max(count, 1))
    return like.dtype.type(math.log(1 / share - 1) / 1.7), like.dtype.type(rank)


@function
def best(rank, start, count, shown, topk, guess, found, values):
    """Find the `topk` highest of rank[start : start + count]; ties to the first.

    NaN counts as highest. Writes ascending positions to `found`; returns their number and the
    highest number.

    Args:
        rank: Row, padded with -inf to whole vectors.
        shown: Number of entries above -inf; an estimate.
        guess: Result of `normal_guess`.
        found: Output of at least `topk + LANES` entries.
        values: Temporary array of at least `topk` entries.
    """
    high, low, mean, deviation = _statistics(rank, start, count, shown)
    wanted = min(topk, count)
    if wanted == count:
        for j in range(count):
            found[j] = j
        return wanted, high
    place, step = guess
    first = mean + deviation * place
    bar, passed = _bar(rank, start, count, low, high, first, deviation * step, wanted)
    if passed == wanted:
        _passing(rank, start, count, bar, found)
    else:
        _with_ties(rank, start, count, bar, wanted, found, values)
    return wanted, high


@inlined
def _statistics(row, start, count, shown):
    """Maximum, minimum, mean and standard deviation without -inf; NaN if any number is NaN."""
    infinity = row.dtype.type(np.inf)
    nothing = splat(-infinity)
    everything = splat(infinity)
    high = nothing
    low = everything
    sums = zeros(row)
    squares = zeros(row)
    for j in range(start, start + count, LANES):
        x = load(row, j)
        high = higher(high, x)
        low = lower(low, replace(x, nothing, everything))
        x = replace(x, nothing, zeros(row))
        sums = add(sums, x)
        squares = fma(x, x, squares)
    number = row.dtype.type(max(shown, 1))
    mean = total(sums) / number
    variance = total(squares) / number - mean * mean
    return highest(high), lowest(low), mean, np.sqrt(max(variance, row.dtype.type(0)))


@inlined
def _bar(rank, start, count, low, high, guess, step, wanted):
    """Return a threshold that at least `wanted` numbers of a row reach, and their number."""
    half = rank.dtype.type(0.5)
    bar = -rank.dtype.type(np.inf)
    size = count
    for turn in range(GUESSES + HALVINGS):
        if turn >= GUESSES or not low < guess < high:
            guess = half * low + half * high
            if not low < guess < high:
                break
        passed = 0
        lanes = splat(guess)
        for j in range(start, start + count, LANES):
            passed += count_bits(not_below(load(rank, j), lanes))
        if passed >= wanted:
            low = guess
            bar = guess
            size = passed
            if passed == wanted:
                break
        else:
            high = guess
        guess += step * rank.dtype.type(passed - wanted)
    return bar, size


@inlined
def _passing(rank, start, count, bar, found):
    lanes = splat(bar)
    size = 0
    for j in range(0, count, LANES):
        bits = not_below(load(rank, start + j), lanes)
        store_positions(found, size, at(POSITIONS, bits), j)
        size += count_bits(bits)


@inlined
def _is_ahead(x, y):
    return x > y or (x != x and y == y)


@function
def _with_ties(rank, start, count, bar, wanted, found, values):
    """Write all numbers above the last kept one, then the first ones equal to it."""
    last, room = _last_kept(rank, start, count, bar, wanted, values)
    size = 0
    for j in range(count):
        x = rank[start + j]
        if _is_ahead(x, last):
            found[size] = j
            size += 1
        elif room > 0 and not _is_ahead(last, x):
            found[size] = j
            size += 1
            room -= 1


@inlined
def _last_kept(rank, start, count, bar, wanted, values):
    """Return the lowest of the `wanted` best of a row, and how many of these equal it."""
    size = 0
    for j in range(start, start + count):
        x = rank[j]
        if x < bar or (size == wanted and not _is_ahead(x, values[size - 1])):
            continue
        i = min(size, wanted - 1)
        while i > 0 and _is_ahead(x, values[i - 1]):
            values[i] = values[i - 1]
            i -= 1
        values[i] = x
        size = min(size + 1, wanted)
    last = values[wanted - 1]
    room = 0
    for i in range(wanted):
        room += not _is_ahead(values[i], last)
    return last, room
