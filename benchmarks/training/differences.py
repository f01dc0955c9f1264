# SPDX-License-Identifier: Apache-2.0
"""Differences of two networks on the same validation images and seeds, with standard errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.result import Row

ERRORS = 2.0  # standard errors that a difference must exceed to be told from none


@dataclass(frozen=True)
class Difference:
    """By how much the first of two networks has the better score.

    Attributes:
        ahead: Mean over seeds.
        images: Its standard error over validation images.
        seeds: Its standard error over seeds; infinite for one seed.
        count: Seeds.
    """

    ahead: float
    images: float
    seeds: float
    count: int

    @property
    def error(self) -> float:
        """Standard error of both; images and seeds are independent."""
        return math.hypot(self.images, self.seeds)

    @property
    def is_clear(self) -> bool:
        return abs(self.ahead) > ERRORS * self.error

    @property
    def more(self) -> float:
        """How many times as many images and seeds would tell this difference from none."""
        return (ERRORS * self.error / abs(self.ahead)) ** 2 if self.ahead else math.inf


def difference(
    first: Sequence[Row], second: Sequence[Row], score: str, sign: int = 1
) -> Difference | None:
    """Of two networks' runs with the same seeds, image by image; None without such runs.

    Args:
        first: Runs of the first network.
        second: Runs of the second network.
        score: Name of the score.
        sign: -1 if less of it is better.
    """
    mine, other = (
        {
            row["case"]["seed"]: row["details"]["groups"]
            for row in rows
            if "groups" in row["details"]
        }
        for rows in (first, second)
    )
    pairs = [(mine[seed], other[seed]) for seed in sorted(mine.keys() & other.keys())]
    if not pairs:
        return None
    ahead = [a["whole"][score] - b["whole"][score] for a, b in pairs]
    columns = [
        [x - y for x, y in zip(a["left_out"][score], b["left_out"][score], strict=True)]
        for a, b in pairs
    ]
    jackknife = [fmean(values) for values in zip(*columns, strict=True)]
    seeds = stdev(ahead) / math.sqrt(len(ahead)) if len(ahead) > 1 else math.inf
    images, count = math.inf, len(jackknife)
    if count > 1:
        mean = fmean(jackknife)
        images = math.sqrt((count - 1) / count * sum((x - mean) ** 2 for x in jackknife))
    return Difference(sign * fmean(ahead), images, seeds, len(pairs))
