# SPDX-License-Identifier: Apache-2.0
"""The table of running times of detectors, from the files of `benchmarks.detectors`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import (
    _MACHINE_FIELDS,
    _MEASURED_FIELDS,
    _VERSION_FIELDS,
    DETECTORS,
    OUT_OF_MEMORY,
    RESULTS,
    SCHEMA,
    _check_fields,
    aligned,
    check_kind,
    number,
    page_of_rows,
    read_checked,
)

Result = dict[str, Any]


@dataclass(frozen=True)
class Attention:
    """What it is called in tables, and the options of the detector that choose it."""

    words: str
    options: dict[str, Any]
    explicit: bool = False  # holds the scores of all queries, as PVTv2's own code does


_SPATIAL_REDUCTION = {"attention": "spatial_reduction"}
ATTENTIONS = {
    "held": Attention("spatial reduction (PVTv2), scores held", _SPATIAL_REDUCTION, explicit=True),
    "sr": Attention("spatial reduction, fused", _SPATIAL_REDUCTION),
    "quadtree": Attention("QuadTree-B, K 32", {}),
}
BASES = {"held": "of held", "sr": "of fused"}  # what others are weighed against
PARTS = ("network", "detector")
PRECISIONS = ("float32", "bfloat16")
KIND = "detector-times"

_RESULT_FIELDS = {
    "kind": str, "schema": int, "command": str, "date": str, "commit": str | None, "device": str,
    "machine": dict, "versions": dict, "complete": bool, "rows": list,
}  # fmt: skip
_LABELS = ("images", "part", "precision", "mode")
_ROW_FIELDS = {
    "model": str, "attention": str, "part": str, "image": list, "batch": int, "precision": str,
    "mode": str,
}  # fmt: skip


def check_result(result: Result) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    _check_fields(result, _RESULT_FIELDS, "result")
    check_kind(result, KIND, SCHEMA)
    _check_fields(result["machine"], _MACHINE_FIELDS, "machine")
    _check_fields(result["versions"], _VERSION_FIELDS | {"torchvision": str}, "versions")
    for i, row in enumerate(result["rows"]):
        outcome = {"error": str} if "error" in row else _MEASURED_FIELDS
        _check_fields(row, _ROW_FIELDS | outcome, f"rows[{i}]")


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Every result file about detectors of a folder by its name, checked."""
    return read_checked(folder.glob(f"{DETECTORS}--*.json"), check_result)


def markdown(results: dict[str, Result]) -> str:
    """A section per result file: circumstances, the table, and what failed."""
    return page_of_rows(results, _table, _labels)


def text_table(rows: Sequence[Result]) -> str:
    """The same table, aligned, for a terminal."""
    head, cells = _table(rows)
    return aligned([head, *cells])


def _table(rows: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Every row, and what it is of those with spatial reduction in the same circumstances."""
    found = {(_case(row), row["attention"]): row for row in rows}
    shares = BASES.values()
    head = [*_LABELS, "attention", "ms", "q25 - q75", *shares, "peak MiB", *shares]
    cells = [
        [*_labels(row), *_cells(row, [found.get((_case(row), base)) for base in BASES])]
        for row in rows
    ]
    return head, cells


def _case(row: Result) -> tuple[Any, ...]:
    return (row["model"], *_circumstances(row))


def _labels(row: Result) -> list[str]:
    return [*_circumstances(row), ATTENTIONS[row["attention"]].words]


def _circumstances(row: Result) -> list[str]:
    width, height = row["image"]
    images = f"{row['batch']} of {width}x{height}"
    return [images, row["part"], row["precision"], row["mode"]]


def _cells(row: Result, bases: Sequence[Result | None]) -> list[str]:
    if "error" in row:
        outcome = OUT_OF_MEMORY if row["error"] == OUT_OF_MEMORY else "failed"
        return [outcome] + ["-"] * (2 + 2 * len(bases))
    spread = f"{number(row['q25_ms'])} - {number(row['q75_ms'])}"
    times, memory = (
        [_share(row, base, field) for base in bases] for field in ("median_ms", "peak_mib")
    )
    return [number(row["median_ms"]), spread, *times, number(row["peak_mib"]), *memory]


def _share(row: Result, base: Result | None, field: str) -> str:
    if base is None or base is row or not base.get(field) or not row.get(field):
        return "-"
    return f"{row[field] / base[field]:.2f}x"
