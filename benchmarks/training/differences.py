# SPDX-License-Identifier: Apache-2.0
"""Differences of two networks on the same validation images and seeds, with standard errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.result import Row

ERRORS = 2.0  # standard errors that a difference must exceed to be told from none


@dataclass(frozen=True)
class Difference:
    """By how much the first of two networks has the better score."""

    ahead: float  # mean over seeds
    images: float  # its standard error over validation images
    seeds: float  # its standard error over seeds; infinite for one seed
    count: int  # of seeds

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

    `sign` is -1 if less of the score is better.
    """
    mine, other = (
        {row["case"]["seed"]: row["details"].get("groups") for row in rows}
        for rows in (first, second)
    )
    pairs = [(mine[seed], other[seed]) for seed in sorted(mine) if mine[seed] and other.get(seed)]
    if not pairs:
        return None
    ahead = np.array([a["whole"][score] - b["whole"][score] for a, b in pairs])
    parts = [np.subtract(a["left_out"][score], b["left_out"][score]) for a, b in pairs]
    jackknife, count = np.mean(parts, axis=0), len(parts[0])
    images = jackknife.std() * math.sqrt(count - 1) if count > 1 else math.inf
    seeds = ahead.std(ddof=1) / math.sqrt(len(ahead)) if len(ahead) > 1 else math.inf
    return Difference(sign * float(ahead.mean()), float(images), float(seeds), len(pairs))
