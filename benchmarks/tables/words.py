# SPDX-License-Identifier: Apache-2.0
"""Sentences about comparisons, generated from the numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Other:
    """A variant that ours is compared with."""

    label: str
    score: float
    ahead: float  # its lead over ours; negative if it is behind
    margin: float  # differences up to this value are too close to call
    error: float | None = None  # standard error of the difference, if known

    def text(self, digits: int) -> str:
        known = self.error is not None
        more = f", {self.ahead:+.{digits}f} ± {self.error:.{digits}f}" if known else ""
        return f"{self.label} ({self.score:.{digits}f}{more})"


def verdict(label: str, metric: str, ours: float, others: Sequence[Other], digits: int) -> str:
    """Sentence that sorts others into ahead of ours, too close to call and behind."""
    groups: dict[str, list[str]] = {"ahead of it": [], "too close to call": [], "behind it": []}
    for other in sorted(others, key=lambda other: -other.ahead):
        close = abs(other.ahead) <= other.margin
        group = "too close to call" if close else "ahead of it" if other.ahead > 0 else "behind it"
        groups[group].append(other.text(digits))
    said = "; ".join(f"{group}: {', '.join(names) or 'none'}" for group, names in groups.items())
    return f"{label} has {metric} {ours:.{digits}f}; {said}"


def gains(metric: str, pairs: Mapping[str, tuple[float, float]], digits: int) -> str:
    """Gain of each attention by LePE; `pairs` holds scores (without, with)."""
    said = (f"{label} {after - before:+.{digits}f}" for label, (before, after) in pairs.items())
    return f"Points of {metric} that LePE adds: {', '.join(said)}."


def growth(metric: str, scores: Mapping[int, float], noise: float, digits: int) -> str:
    """Sentence about the score against K."""
    values = list(scores.values())
    rises = all(a < b for a, b in pairwise(values))
    what = "increases monotonically with K" if rises else "does not increase monotonically with K"
    close = f", and all values are within {noise:g}" if max(values) - min(values) <= noise else ""
    text = ", ".join(f"K {k}: {score:.{digits}f}" for k, score in scores.items())
    return f"{metric} {what}{close} ({text})."
