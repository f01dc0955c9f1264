# SPDX-License-Identifier: Apache-2.0
"""The table of what stereo networks cost, from the files of `benchmarks.stereo_costs`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import (
    _MACHINE_FIELDS,
    _MEASURED_FIELDS,
    _VERSION_FIELDS,
    OUT_OF_MEMORY,
    RESULTS,
    SCHEMA,
    STEREO_COSTS,
    _check_fields,
    aligned,
    check_kind,
    number,
    page_of_rows,
    read_checked,
)

Result = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network that is measured.

    Attributes:
        words: What it is called in tables.
        attention: Of the network.
        stride: Of its features.
        explicit: Full attention that holds all scores of a layer, as STTR's does, whose encoding of
            position is added to them; otherwise by PyTorch's fused kernels, which hold none.
    """

    words: str
    attention: str
    stride: int
    explicit: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Those of the model."""
        return {"attention": self.attention, "stride": self.stride}


NETWORKS = {
    "explicit-3": Network("full attention, scores held, 1/3", "full", 3, explicit=True),
    "full-3": Network("full attention, fused, 1/3", "full", 3),
    "quadtree-3": Network("QuadTree-B, 1/3", "quadtree_b", 3),
    "explicit-2": Network("full attention, scores held, 1/2", "full", 2, explicit=True),
    "full-2": Network("full attention, fused, 1/2", "full", 2),
    "quadtree-2": Network("QuadTree-B, 1/2", "quadtree_b", 2),
}
# Of the paper, at 960x540: STTR, features at 1/3; QuadTree-B, features at 1/2
PUBLISHED = {"explicit-3": (490.0, 8507.0), "quadtree-2": (254.0, 5381.0)}
KIND = "stereo-costs"
PASSES = ("forward", "training")

_RESULT_FIELDS = {
    "kind": str, "schema": int, "command": str, "date": str, "commit": str | None, "device": str,
    "machine": dict, "versions": dict, "complete": bool, "rows": list,
}  # fmt: skip
_ROW_FIELDS = {"network": str, "image": list, "pass": str, "precision": str}
_COUNT_FIELDS = {"params": int, "macs": int, "attention_macs": int}


def check_result(result: Result) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    _check_fields(result, _RESULT_FIELDS, "result")
    check_kind(result, KIND, SCHEMA)
    _check_fields(result["machine"], _MACHINE_FIELDS, "machine")
    _check_fields(result["versions"], _VERSION_FIELDS, "versions")
    for i, row in enumerate(result["rows"]):
        counted = _COUNT_FIELDS if "macs" in row else {}
        outcome = {"error": str} if "error" in row else _MEASURED_FIELDS
        _check_fields(row, _ROW_FIELDS | counted | outcome, f"rows[{i}]")


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Every result file about the cost of stereo of a folder by its name, checked."""
    return read_checked(folder.glob(f"{STEREO_COSTS}--*.json"), check_result)


def markdown(results: dict[str, Result]) -> str:
    """A section per result file: circumstances, the table, and what failed."""
    return page_of_rows(results, _table, _labels)


def text_table(rows: Sequence[Result]) -> str:
    """The same table, aligned, for a terminal."""
    head, cells = _table(rows)
    return aligned([head, *cells])


def _table(rows: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    head = [
        "image",
        "pass",
        "precision",
        "network and features",
        "GMACs",
        "of it attention",
        "ms",
        "q25 - q75",
    ]
    return [*head, "peak MiB", "paper"], [[*_labels(row), *_cells(row)] for row in rows]


def _labels(row: Result) -> list[str]:
    width, height = row["image"]
    return [f"{width}x{height}", row["pass"], row["precision"], NETWORKS[row["network"]].words]


def _cells(row: Result) -> list[str]:
    counts = [number(row[key] / 1e9) if key in row else "-" for key in ("macs", "attention_macs")]
    if "error" in row:
        outcome = OUT_OF_MEMORY if row["error"] == OUT_OF_MEMORY else "failed"
        return [*counts, outcome, "-", "-", "-"]
    spread = f"{number(row['q25_ms'])} - {number(row['q75_ms'])}"
    times = [number(row["median_ms"]), spread, number(row["peak_mib"])]
    return [*counts, *times, _published(row)]


def _published(row: Result) -> str:
    """What the paper has, beside the forward pass; of which pass its memory is, it does not say."""
    if row["image"] != [960, 540] or row["pass"] != PASSES[0] or row["network"] not in PUBLISHED:
        return "-"
    macs, memory = PUBLISHED[row["network"]]
    return f"{macs:g} GFLOPs, {memory:g} MB"
