# SPDX-License-Identifier: Apache-2.0
"""The tables that compare matchers, from the result files of `benchmarks.matching`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import (
    _MACHINE_FIELDS,
    _VERSION_FIELDS,
    MATCHING,
    RESULTS,
    SCHEMA,
    _check_choice,
    _check_fields,
    _circumstances,
    _line,
    aligned,
    check_kind,
    number,
    read_checked,
)

Result = dict[str, Any]

KINDS = {"pose": "Poses", "homography": "Homographies"}
UNITS = {"pose": "°", "homography": " px"}
THRESHOLDS = {"pose": ["5", "10", "20"], "homography": ["3", "5", "10"]}
ESTIMATORS = {"opencv": "OpenCV", "poselib": "poselib"}
NOT_YET = "Not measured yet."

_RESULT_FIELDS = {
    "kind": str, "command": str, "schema": int, "date": str, "commit": str | None, "device": str,
    "machine": dict, "versions": dict, "complete": bool, "methods": dict, "rows": list,
}  # fmt: skip
_ROW_FIELDS = {
    "set": str, "method": str, "kind": str, "pairs": int, "missing": int, "matches": float,
    "precision": float, "median_seconds": float, "estimators": dict, "settings": dict,
    "details": list,
}  # fmt: skip
_ESTIMATOR_FIELDS = {"auc": dict, "median": float | None, "failed": int}
_DETAIL_FIELDS = {"name": str, "matches": int, "precision": float, "errors": dict}


def check_result(result: Result) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    _check_fields(result, _RESULT_FIELDS, "result")
    check_kind(result, MATCHING, SCHEMA)
    _check_fields(result["machine"], _MACHINE_FIELDS, "machine")
    versions = _VERSION_FIELDS | {"opencv": str, "poselib": str | None}
    _check_fields(result["versions"], versions, "versions")
    for i, row in enumerate(result["rows"]):
        _check_row(row, list(result["methods"]), f"rows[{i}]")


def _check_row(row: Result, methods: Sequence[str], where: str) -> None:
    _check_fields(row, _ROW_FIELDS, where)
    _check_choice(row, "kind", list(KINDS), where)
    _check_choice(row, "method", methods, where)
    _check_fields(row["estimators"], dict.fromkeys(ESTIMATORS, dict), f"{where}.estimators")
    for name, score in row["estimators"].items():
        _check_fields(score, _ESTIMATOR_FIELDS, f"{where}.{name}")
        _check_fields(
            score["auc"], dict.fromkeys(THRESHOLDS[row["kind"]], float), f"{where}.{name}"
        )
    if len(row["details"]) != row["pairs"]:
        raise ValueError(f"{where}.details has {len(row['details'])} pairs of {row['pairs']}")
    for i, pair in enumerate(row["details"]):
        _check_fields(pair, _DETAIL_FIELDS, f"{where}.details[{i}]")
        errors = dict.fromkeys(ESTIMATORS, float | None)
        _check_fields(pair["errors"], errors, f"{where}.details[{i}].errors")


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Every result file about matching of a folder by its name, checked."""
    return read_checked(folder.glob(f"{MATCHING}--*.json"), check_result)


def markdown(results: dict[str, Result]) -> str:
    """A section per result file: circumstances, methods, a table of poses, one of homographies."""
    sections = []
    for name, result in results.items():
        lines = [*_circumstances(name, result), "", *_methods(result["methods"])]
        for kind, title in KINDS.items():
            rows = [row for row in result["rows"] if row["kind"] == kind]
            if rows:
                lines += ["", f"#### {title}", "", *_markdown_table(kind, rows)]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) or NOT_YET


def _methods(methods: dict[str, Result]) -> list[str]:
    lines = []
    for name, settings in methods.items():
        said = (f"{key.replace('_', ' ')} {str(value)[:12]}" for key, value in settings.items())
        lines.append(f"- {name}: {', '.join(said)}")
    return lines


def _markdown_table(kind: str, rows: Sequence[Result]) -> list[str]:
    head, cells = table(kind, rows)
    return [_line(head), _line(["---"] * 2 + ["---:"] * (len(head) - 2)), *map(_line, cells)]


def text_table(rows: Sequence[Result]) -> str:
    """The same tables, aligned, for a terminal."""
    parts = []
    for kind in KINDS:
        if mine := [row for row in rows if row["kind"] == kind]:
            head, cells = table(kind, mine)
            parts.append(aligned([head, *cells]))
    return "\n\n".join(parts)


def table(kind: str, rows: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table of a kind: one line per set and method."""
    names = THRESHOLDS[kind]
    areas = f"AUC@{'/'.join(names)}{UNITS[kind]}"
    head = ["set", "method", "matches", "correct %"]
    for label in ESTIMATORS.values():
        head += [f"{label} {areas}", f"{label} within {names[-1]}{UNITS[kind]}"]
    head.append("s per pair")
    return head, [_cells(row) for row in rows]


def _cells(row: Result) -> list[str]:
    largest = float(THRESHOLDS[row["kind"]][-1])
    cells = [row["set"], row["method"], f"{row['matches']:.0f}", f"{row['precision']:.1f}"]
    for name in ESTIMATORS:
        errors = [pair["errors"][name] for pair in row["details"]]
        within = sum(error is not None and error < largest for error in errors)
        areas = row["estimators"][name]["auc"].values()
        cells += [" / ".join(f"{area:.1f}" for area in areas), f"{within} of {row['pairs']}"]
    return [*cells, number(row["median_seconds"])]
