# SPDX-License-Identifier: Apache-2.0
"""Comparisons by training, as `comparisons.yaml` lists them, and the rows of their results."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.result import RESULTS, ROOT, Result, ResultFileError, Row

FILE = ROOT / "benchmarks" / "comparisons.yaml"
PEAK = "peak_mib"  # a column of the history that runs on a GPU have
SYNTHETIC = "synthetic"  # the set of scenes that training does not use
SIFT = "sift"  # stands beside the attentions that are scored


@dataclass(frozen=True)
class Comparison:
    """Variants of a recipe that differ in the attention, and what is looked at in their runs.

    comparisons.yaml says what the fields mean.
    """

    name: str
    recipe: str
    variants: Mapping[str, str]
    scores: Mapping[str, str]
    noise: float
    order: Sequence[str] = ()
    losses: Sequence[str] = ("train/loss",)
    optional: Sequence[str] = (PEAK,)
    ours: str = "quadtree-b"
    seeds: Sequence[int] = (0, 1)
    data: str = "root"
    options: Sequence[str] = ()
    step: Sequence[str] = ()
    weights: bool = False
    paired: bool = False
    lower: Sequence[str] = ()
    start: str = ""
    columns: Sequence[Sequence[str]] = ()
    digits: int = 2
    claim: str = ""
    note: str = "Means over seeds, ± half of their range."
    lepe: Mapping[str, str] = field(default_factory=dict)
    topk: Mapping[int, str] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)
    panels: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return f"training/{self.name}"

    @property
    def task(self) -> str:
        return self.recipe.partition("/")[0]

    @property
    def score(self) -> str:
        return next(iter(self.scores))

    def sign(self, metric: str) -> int:
        """1 if more of it is better, else -1."""
        return -1 if metric in self.lower else 1

    @property
    def baselines(self) -> list[str]:
        """What QuadTree-B is compared with: other attentions, not other settings of itself."""
        return [name for name in self.variants if not name.startswith(self.ours)]

    def label(self, variant: str) -> str:
        return "SIFT" if variant == SIFT else self.variants.get(variant, variant)

    def rank(self, variant: str) -> int:
        """Place in the order of training."""
        order = self.order or sorted(self.variants, key=lambda name: name != self.ours)
        return list(order).index(variant) if variant in order else len(order)

    def find_result(self, path: Path | None) -> Path:
        """The result file asked for, or the only one there is."""
        found = [path] if path else sorted(RESULTS.glob(f"{self.kind}--*.json"))
        if len(found) != 1:
            raise ResultFileError(
                f"there are {len(found)} result files {self.kind}--*.json; pass --results"
            )
        return found[0]


@cache
def comparisons() -> dict[str, Comparison]:
    """All comparisons by name."""
    content = yaml.safe_load(FILE.read_text())
    return {name: Comparison(name=name, **fields) for name, fields in content.items()}


def short(metric: str) -> str:
    """Name of a score of validation in a result."""
    return metric.removeprefix("val/")


def rows_of(result: Result, kind: str) -> list[Row]:
    """Rows of a kind that have values."""
    return [row for row in result["rows"] if row["kind"] == kind and "error" not in row]


def compared_runs(comparison: Comparison, result: Result) -> dict[str, list[Row]]:
    """The runs of every variant by seed; only those as long as most are, others do not compare."""
    rows = sorted(rows_of(result, "run"), key=lambda row: row["case"]["seed"])
    lengths = Counter(row["case"]["epochs"] for row in rows)
    epochs = max(lengths, key=lambda length: (lengths[length], length), default=0)
    names = dict.fromkeys([*comparison.variants, *(row["case"]["recipe"] for row in rows)])
    rows = [row for row in rows if row["case"]["epochs"] == epochs]
    return {name: [row for row in rows if row["case"]["recipe"] == name] for name in names}


def scored_rows(result: Result) -> list[Row]:
    """Scores of the runs that are there, and of SIFT; none of a run that was made again."""
    weights = [row["details"].get("weights") for row in rows_of(result, "run")]
    current = {found["sha256"] for found in weights if found} | {None}
    return [row for row in rows_of(result, "score") if row["case"]["weights"] in current]


def samples_per_second(result: Result, row: Row) -> float:
    """Speed of a measured training step."""
    batch: int = result["runs"][row["run"]]["settings"]["batch"]
    return 1e3 * batch / row["values"]["median_ms"]


def steps_of(result: Result) -> dict[str, Row]:
    """Measured training steps by variant, with the memory that another command has measured."""
    steps = {row["case"]["recipe"]: row for row in result["rows"] if row["kind"] == "step"}
    for row in rows_of(result, "memory"):
        found: dict[str, Any] = steps.get(row["case"]["recipe"], {})
        if "values" in found:
            steps[row["case"]["recipe"]] = found | {"values": found["values"] | row["values"]}
    return steps
