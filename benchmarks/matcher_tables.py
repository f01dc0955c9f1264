# SPDX-License-Identifier: Apache-2.0
"""The tables of the matcher's time and memory, from the files of `benchmarks.matchers`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import (
    _MACHINE_FIELDS,
    _MEASURED_FIELDS,
    _VERSION_FIELDS,
    MATCHERS,
    OUT_OF_MEMORY,
    RESULTS,
    SCHEMA,
    _check_fields,
    _circumstances,
    aligned,
    check_kind,
    number,
    page_table,
    read_checked,
)

Result = dict[str, Any]

KIND = "matcher-times"
STAGES = ("CNN", "transformer", "coarse matching", "fine")
ATTENTION = "attention"  # of the transformer
NOT_YET = "Not measured yet."

_RESULT_FIELDS = {
    "kind": str, "schema": int, "command": str, "date": str, "commit": str | None, "device": str,
    "machine": dict, "versions": dict, "memory_gib": float | None, "complete": bool, "rows": list,
}  # fmt: skip
_ROW_FIELDS = {
    "model": str, "attention": str, "image": list, "matches": int, "precision": str,
}  # fmt: skip
_STAGES_FIELDS = {"stages_ms": dict, "stages_mib": dict | None}


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
        _check_row(row, f"rows[{i}]")


def _check_row(row: Result, where: str) -> None:
    outcome = {"error": str} if "error" in row else _MEASURED_FIELDS | _STAGES_FIELDS
    _check_fields(row, _ROW_FIELDS | outcome, where)
    if "error" not in row:
        times = dict.fromkeys((*STAGES, ATTENTION), float)
        _check_fields(row["stages_ms"], times, f"{where}.stages_ms")
        if row["stages_mib"] is not None:
            _check_fields(row["stages_mib"], dict.fromkeys(STAGES, float), f"{where}.stages_mib")


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Every result file about the matcher's cost of a folder by its name, checked."""
    return read_checked(folder.glob(f"{MATCHERS}--*.json"), check_result)


def markdown(results: dict[str, Result]) -> str:
    """A section per result file: circumstances, times, memory, and what failed."""
    sections = []
    for name, result in results.items():
        rows = result["rows"]
        lines = [*_circumstances(name, result), "", *_limit(result)]
        for title, (head, cells) in _tables(rows).items():
            lines += [f"#### {title}", "", *page_table(head, cells, 4), ""]
        lines += [f"- {_name(row)}: failed: {row['error']}" for row in rows if _failed(row)]
        sections.append("\n".join(lines).rstrip())
    return "\n\n".join(sections) or NOT_YET


def text_table(rows: Sequence[Result]) -> str:
    """The same tables, aligned, for a terminal."""
    parts = []
    for title, (head, cells) in _tables(rows).items():
        parts.append(f"{title}\n{aligned([head, *cells])}")
    return "\n\n".join(parts)


def _limit(result: Result) -> list[str]:
    limit = result["memory_gib"]
    return [] if limit is None else [f"PyTorch was given {number(limit)} GiB of the GPU.", ""]


def _tables(rows: Sequence[Result]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Head and lines of either table by its title."""
    first = ["image", "model", "precision", "attention"]
    times = [*STAGES[:2], "of it attention", *STAGES[2:]]
    return {
        "Milliseconds of a pair": (
            [*first, "median", "q25 - q75", *times],
            [[*_labels(row), *_time_cells(row)] for row in rows],
        ),
        "Peak memory in MiB": (
            [*first, "whole", *STAGES],
            [[*_labels(row), *_memory_cells(row)] for row in rows],
        ),
    }


def _labels(row: Result) -> list[str]:
    width, height = row["image"]
    return [f"{width}x{height}", row["model"], row["precision"], row["attention"]]


def _time_cells(row: Result) -> list[str]:
    if "error" in row:
        return [_outcome(row), *["-"] * (len(STAGES) + 2)]
    spread = f"{number(row['q25_ms'])} - {number(row['q75_ms'])}"
    stages = (*STAGES[:2], ATTENTION, *STAGES[2:])
    cells = [number(row["stages_ms"][stage]) for stage in stages]
    return [number(row["median_ms"]), spread, *cells]


def _memory_cells(row: Result) -> list[str]:
    if "error" in row:
        return [_outcome(row), *["-"] * len(STAGES)]
    stages = row["stages_mib"] or {}
    return [number(row["peak_mib"]), *(number(stages.get(stage)) for stage in STAGES)]


def _outcome(row: Result) -> str:
    return "failed" if _failed(row) else OUT_OF_MEMORY


def _failed(row: Result) -> bool:
    return row.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY


def _name(row: Result) -> str:
    return ", ".join(_labels(row))
