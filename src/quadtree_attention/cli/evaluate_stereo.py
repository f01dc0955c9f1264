# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate stereo`: how good disparities are, of a network or in files."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import check_writable, write_whole
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.stereo.evaluate import Scores, evaluate, predict
from quadtree_attention.tasks.stereo.sources import Split, StereoSource, open_stereo

OUT = Path("predictions")
NAMED = 5  # pairs without predictions that are named; all of them are in the JSON
COLUMNS = {"epe": "EPE", "bad1": "bad-1", "bad2": "bad-2", "bad3": "bad-3", "d1": "D1"}
REGIONS = {"noc": "not occluded", "all": "all known pixels"}
IOU = {"occlusion_iou": "IoU", "occlusion_iou_both": "as STTR"}  # of occlusion


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, as it was typed; None is what was not."""

    data: Path
    weights: Path | None = None
    predictions: Path | None = None
    layout: str = "auto"
    split: str | None = None
    out: Path | None = None
    scores: Path | None = None
    size: int | None = None
    max_disparity: float | None = None
    device: str | None = None
    force: bool = False
    strict: bool = False


ONLY_RUNNING = ("weights", "out", "size", "max_disparity", "device", "force")


def run(request: Request, *, as_json: bool) -> None:
    if request.scores is not None:
        check_writable(request.scores)
    if request.predictions is not None:
        _check_nothing_else(request)
    split = cast(Split | None, request.split)  # which `open_stereo` checks
    source = open_stereo(request.data, request.layout, split=split, strict=request.strict)
    if source.skipped:
        _tell(f"left out {len(source.skipped)} pairs: {summary(source.skipped)}")
    folder = request.predictions
    if folder is None:
        folder = _predict(request, source)
    scores = evaluate(source, folder)
    if scores.missing:
        _tell(_missing_text(scores.missing))
    for reason in scores.skipped:
        _tell(f"skipped: {reason}")
    found = json.dumps(scores.as_dict(), indent=2)
    if request.scores is not None:
        write_whole(request.scores, (found + "\n").encode())
    print(found if as_json else printable(as_text(scores, folder)))


def _check_nothing_else(request: Request) -> None:
    options = {field.name: field for field in fields(request)}
    given = [n for n in ONLY_RUNNING if getattr(request, n) != options[n].default]
    if given:
        words = ["WEIGHTS" if n == "weights" else "--" + n.replace("_", "-") for n in given]
        raise OptionError(
            f"--predictions scores files as they are, got {', '.join(words)} as well; leave out "
            "one or the other"
        )


def _predict(request: Request, source: StereoSource) -> Path:
    from quadtree_attention.tasks.stereo.predictor import StereoMatcher

    matcher = StereoMatcher(
        request.weights,
        device=request.device,
        size=request.size,
        max_disparity=request.max_disparity,
    )
    data = str(request.data.resolve())
    done = predict(matcher, source, request.out or OUT, data=data, force=request.force)
    for reason in done.skipped:
        _tell(f"skipped: {reason}")
    if done.skipped and request.strict:
        raise DataError(
            f"{len(done.skipped)} pairs cannot be read; mend them, or leave out --strict"
        )
    if done.there:
        _tell(f"{done.folder} holds {done.there} of these pairs already; --force makes them again")
    return done.folder


def as_text(scores: Scores, folder: Path) -> str:
    """A line per pair and one of the means: first of what both views see, then of all."""
    ious = {name: title for name, title in IOU.items() if name in scores.mean}
    names = ["pair", *(pair.name for pair in scores.pairs), "mean"]
    blocks = [[name] for name in names]
    values = [pair.scores for pair in scores.pairs] + [scores.mean]
    for region in REGIONS:
        for column, title in COLUMNS.items():
            digits = 2 if column == "epe" else 1
            cells = [title, *(_number(v.get(f"{column}_{region}"), digits) for v in values)]
            for line, cell in zip(blocks, cells, strict=True):
                line.append(cell)
    for name, title in ious.items():
        cells = [title, *(_number(v.get(name), 2) for v in values)]
        for line, cell in zip(blocks, cells, strict=True):
            line.append(cell)
    widths = [max(map(len, column)) for column in zip(*blocks, strict=True)]
    lines = [_aligned(line, widths) for line in blocks]
    lines.insert(0, _regions_line(widths, with_occlusion=bool(ious)))
    lines.insert(-1, "")
    about = [f"{len(scores.pairs):,} pairs, EPE in pixels, bad-N and D1 in percent, {folder}"]
    if scores.settings is not None:
        settings = scores.settings
        about.append(
            f"{settings.get('model')}, sha256 {str(settings.get('weights_sha256'))[:12]}, at most "
            f"{settings.get('size')} pixels a side"
        )
    return "\n".join([*lines, "", *about])


def _regions_line(widths: Sequence[int], *, with_occlusion: bool) -> str:
    line = " " * widths[0]
    for i, title in enumerate(REGIONS.values()):
        first = 1 + i * len(COLUMNS)
        line += "  " + title.ljust(sum(widths[first : first + len(COLUMNS)]) + 2 * len(COLUMNS) - 2)
    return (line + ("  occluded" if with_occlusion else "")).rstrip()


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join([row[0].ljust(widths[0]), *numbers])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _missing_text(names: Sequence[str]) -> str:
    said = "1 pair has no prediction and is left out of the means"
    if len(names) > 1:
        said = f"{len(names):,} pairs have no predictions and are left out of the means"
    return f"{said}: {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"


def _tell(message: str) -> None:
    print(f"quadtree: {' '.join(message.split())}", file=sys.stderr)
