# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate match`: how good the matches in files are."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.files import check_writable, write_whole
from quadtree_attention.tasks.match.evaluate import (
    CORRECT_PIXELS,
    Kind,
    Scores,
    Settings,
    Summary,
    evaluate,
)
from quadtree_attention.tasks.match.pairs import read_pairs

NAMED = 5  # pairs without predictions that are named; all of them are in the JSON
LABELS = {"opencv": "OpenCV RANSAC", "poselib": "poselib LO-RANSAC"}
UNITS: dict[Kind, str] = {"pose": "°", "homography": " px"}


def run(
    pairs: Path,
    predictions: Path,
    *,
    images: Path | None,
    out: Path | None,
    settings: Settings,
    as_json: bool,
) -> None:
    if out is not None:
        check_writable(out, pairs)
    folder = pairs.parent if images is None else images  # where `quadtree match` looks, too
    scores = evaluate(read_pairs(pairs), predictions, images=folder, settings=settings)
    if scores.missing:
        print(f"quadtree: {_missing_text(scores.missing)}", file=sys.stderr)
    found = json.dumps(scores.as_dict(), indent=2)
    if out is not None:
        write_whole(out, (found + "\n").encode())
    print(found if as_json else printable(as_text(scores)))


def as_text(scores: Scores) -> str:
    found: dict[Kind, Summary | None] = {"pose": scores.pose, "homography": scores.homography}
    return "\n\n".join(
        _summary_text(kind, summary, scores.settings)
        for kind, summary in found.items()
        if summary is not None
    )


def _summary_text(kind: Kind, found: Summary, settings: Settings) -> str:
    unit = UNITS[kind]
    thresholds = list(found.estimators["opencv"].auc)
    head = ["estimator", *(f"AUC@{name}{unit}" for name in thresholds), "median", "failed"]
    table = [head]
    for name, score in found.estimators.items():
        areas = [f"{area:.2f}" for area in score.auc.values()]
        table.append([LABELS[name], *areas, f"{score.median:.2f}{unit}", str(score.failed)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        f"{kind}: {found.pairs:,} pairs, {found.missing:,} of them without predictions",
        *("  " + _aligned(row, widths) for row in table),
        f"  {found.matches:,.1f} matches per pair, {found.precision:.2f} % of them correct "
        f"({_correct_text(kind, settings)})",
    ]
    return "\n".join(lines)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "   ".join([row[0].ljust(widths[0]), *numbers])


def _correct_text(kind: Kind, settings: Settings) -> str:
    if kind == "pose":
        return f"squared epipolar distance below {settings.epipolar:g}"
    pixels = f"within {CORRECT_PIXELS:g} px"
    return pixels + (f" at a shorter side of {settings.side}" if settings.side else "")


def _missing_text(names: Sequence[str]) -> str:
    said = "1 pair has no predictions and counts as failed"
    if len(names) > 1:
        said = f"{len(names):,} pairs have no predictions and count as failed"
    return f"{said}: {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"
