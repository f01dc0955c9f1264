# SPDX-License-Identifier: Apache-2.0
"""Sentences about comparisons: no more than the numbers say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Other:
    """Something that is compared.

    Attributes:
        label: What it is called.
        score: What it has.
        ahead: By how much it is ahead; negative: behind.
        margin: Differences up to this one are too close to call.
        error: Standard error of the difference, if it is known.
    """

    label: str
    score: float
    ahead: float
    margin: float
    error: float | None = None

    def text(self, digits: int) -> str:
        known = self.error is not None
        more = f", {self.ahead:+.{digits}f} ± {self.error:.{digits}f}" if known else ""
        return f"{self.label} ({self.score:.{digits}f}{more})"


def verdict(label: str, metric: str, ours: float, others: Sequence[Other], digits: int) -> str:
    """Which others are ahead of ours, behind it, and too close to call, the best first."""
    groups: dict[str, list[str]] = {"ahead of it": [], "too close to call": [], "behind it": []}
    for other in sorted(others, key=lambda other: -other.ahead):
        close = abs(other.ahead) <= other.margin
        group = "too close to call" if close else "ahead of it" if other.ahead > 0 else "behind it"
        groups[group].append(other.text(digits))
    said = "; ".join(f"{group}: {', '.join(names) or 'none'}" for group, names in groups.items())
    return f"{label} has {metric} {ours:.{digits}f}; {said}"


def gains(metric: str, pairs: Mapping[str, tuple[float, float]], digits: int) -> str:
    """What the position encoding adds to the score of each attention; (without, with)."""
    said = (f"{label} {after - before:+.{digits}f}" for label, (before, after) in pairs.items())
    return f"Points of {metric} that LePE adds: {', '.join(said)}."


def growth(metric: str, scores: Mapping[int, float], noise: float, digits: int) -> str:
    """What keeping more cells adds."""
    values = list(scores.values())
    rises = all(a < b for a, b in pairwise(values))
    what = "rises with every step of K" if rises else "does not rise with every step of K"
    close = f", and all are within {noise:g}" if max(values) - min(values) <= noise else ""
    text = ", ".join(f"K {k}: {score:.{digits}f}" for k, score in scores.items())
    return f"Cells kept per query: {metric} {what}{close} ({text})."
