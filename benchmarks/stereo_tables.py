# SPDX-License-Identifier: Apache-2.0
"""The tables that compare ways to stereo, from the result files of `benchmarks.stereo`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import (
    _MACHINE_FIELDS,
    _VERSION_FIELDS,
    RESULTS,
    SCHEMA,
    _check_choice,
    _check_fields,
    _circumstances,
    aligned,
    check_kind,
    number,
    page_table,
    read_checked,
)

Result = dict[str, Any]

STEREO = "stereo"  # how names of its files begin
NOT_YET = "Not measured yet."
COLUMNS = {"epe": "EPE px", "bad3": "bad-3 %", "d1": "D1 %"}
REGIONS = {"noc": "not occluded", "all": "all"}
IOU = "occlusion_iou"

_RESULT_FIELDS = {
    "kind": str, "command": str, "schema": int, "date": str, "commit": str | None, "device": str,
    "machine": dict, "versions": dict, "complete": bool, "methods": dict, "rows": list,
}  # fmt: skip
_ROW_FIELDS = {
    "method": str, "pairs": int, "median_seconds": float, "mean": dict, "details": list,
}  # fmt: skip
_DETAIL_FIELDS = {"name": str, "scores": dict, "seconds": float}
_SCORES = (
    *(f"{name}_{region}" for region in REGIONS for name in ("epe", "bad1", "bad2", "bad3", "d1")),
    IOU, "occlusion_iou_both",
)  # fmt: skip


def check_result(result: Result) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    _check_fields(result, _RESULT_FIELDS, "result")
    check_kind(result, STEREO, SCHEMA)
    _check_fields(result["machine"], _MACHINE_FIELDS, "machine")
    _check_fields(result["versions"], _VERSION_FIELDS | {"opencv": str}, "versions")
    for i, row in enumerate(result["rows"]):
        _check_row(row, list(result["methods"]), f"rows[{i}]")
    names = [[pair["name"] for pair in row["details"]] for row in result["rows"]]
    if any(listed != names[0] for listed in names):
        raise ValueError("rows must be of the same pairs in the same order")


def _check_row(row: Result, methods: Sequence[str], where: str) -> None:
    _check_fields(row, _ROW_FIELDS, where)
    _check_choice(row, "method", methods, where)
    _check_scores(row["mean"], f"{where}.mean")
    if len(row["details"]) != row["pairs"]:
        raise ValueError(f"{where}.details has {len(row['details'])} pairs of {row['pairs']}")
    for i, pair in enumerate(row["details"]):
        _check_fields(pair, _DETAIL_FIELDS, f"{where}.details[{i}]")
        _check_scores(pair["scores"], f"{where}.details[{i}].scores")


def _check_scores(scores: Result, where: str) -> None:
    _check_fields(scores, dict.fromkeys(_SCORES, float | None), where)


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Every result file about stereo of a folder by its name, checked."""
    return read_checked(folder.glob(f"{STEREO}--*.json"), check_result)


def markdown(results: dict[str, Result]) -> str:
    """A section per result file: circumstances, methods, a table of means, one of all pairs."""
    sections = []
    for name, result in results.items():
        lines = [*_circumstances(name, result), "", *_methods(result["methods"])]
        for table in (means_table(result["rows"]), pairs_table(result["rows"])):
            lines += ["", *page_table(table[0], table[1:], 1)]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) or NOT_YET


def _methods(methods: dict[str, Result]) -> list[str]:
    lines = []
    for name, settings in methods.items():
        said = (
            f"{key.replace('_', ' ')} {str(value)[:12] if 'sha256' in key else value}"
            for key, value in settings.items()
            if value is not None
        )
        lines.append(f"- {name}: {', '.join(said)}")
    return lines


def text_table(rows: Sequence[Result]) -> str:
    """The same tables, aligned, for a terminal."""
    return "\n\n".join(map(aligned, (pairs_table(rows), means_table(rows))))


def means_table(rows: Sequence[Result]) -> list[list[str]]:
    """Head and one line per method: means over all pairs."""
    titles = [f"{title}, {region}" for region in REGIONS.values() for title in COLUMNS.values()]
    lines = [["method", *titles, "occlusion IoU", "s per pair"]]
    for row in rows:
        scores = [row["mean"][f"{name}_{region}"] for region in REGIONS for name in COLUMNS]
        numbers = [*map(_number, [*scores, row["mean"][IOU]]), number(row["median_seconds"])]
        lines.append([row["method"], *numbers])
    return lines


def pairs_table(rows: Sequence[Result]) -> list[list[str]]:
    """Head and one line per pair, of all known pixels: EPE, bad-3 and D1 of every method."""
    lines = [["pair", *(f"{row['method']} {title}" for row in rows for title in COLUMNS.values())]]
    for pairs in zip(*(row["details"] for row in rows), strict=True):
        cells = [_number(pair["scores"][f"{name}_all"]) for pair in pairs for name in COLUMNS]
        lines.append([pairs[0]["name"], *cells])
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
