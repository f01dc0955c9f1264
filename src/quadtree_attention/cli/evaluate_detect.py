# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate detect`: how many objects a detector finds, and how well."""

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.detect.coco import CocoFile, counted, objects_of, open_split
from quadtree_attention.tasks.detect.evaluate import Precision, Scores, predict, score
from quadtree_attention.tasks.readers import summary

OUT = Path("results.json")
WORST = 10  # classes that are listed; all of them are in the JSON
COLUMNS = {
    "AP": "ap",
    "AP50": "ap50",
    "AP75": "ap75",
    "AP small": "small",
    "AP medium": "medium",
    "AP large": "large",
}


@dataclass(frozen=True)
class DetectRequest:
    """What is to be evaluated, as it was typed; None is what was not."""

    weights: Path | None = None
    predictions: Path | None = None
    data: Path | None = None
    split: str = "val"
    out: Path | None = None
    batch_size: int = 1
    size: int | None = None
    device: str | None = None
    strict: bool = False
    force: bool = False


WITH_PREDICTIONS = ("predictions", "data", "split", "strict")


def run(request: DetectRequest, *, as_json: bool) -> None:
    if request.data is None:
        raise OptionError(
            "evaluating needs the images and objects, got no --data ROOT; pass the folder that "
            "holds annotations/instances_val.json"
        )
    if request.predictions is None:
        source = open_split(request.data, request.split, strict=request.strict)
    else:  # no image is looked at
        _check_nothing_else(request)
        source = CocoFile(objects_of(request.data, request.split), strict=request.strict)
    if source.problems:
        reasons = [problem.reason for problem in source.problems]
        _tell(
            f"{len(reasons)} entries cannot be used as they are ({counted(source.problems)}): "
            f"{summary(reasons)}"
        )
    path = request.predictions
    if path is None:
        if request.weights is None:
            raise OptionError(
                "evaluating needs WEIGHTS, got none; train some with quadtree train detect "
                "--config RECIPE, or score a file of results with --predictions FILE"
            )
        path = request.out or OUT
        done = predict(
            request.weights,
            source,
            path,
            data=f"{request.data.resolve().name}/{request.split}",
            size=request.size,
            batch_size=request.batch_size,
            device=request.device,
            strict=request.strict,
            force=request.force,
        )
        for reason in done.skipped:
            _tell(f"skipped: {reason}")
        if done.reused:
            _tell(f"{path} holds these results already; --force makes them again")
    scores = score(path, source.path, strict=request.strict)
    if scores.no_mask:
        _tell(
            f"{len(scores.no_mask)} objects count for boxes alone, as their masks cannot be used: "
            f"{summary(scores.no_mask)}"
        )
    found = json.dumps(scores.as_dict(), indent=2)
    print(found if as_json else printable(as_text(scores, path)))


def _check_nothing_else(request: DetectRequest) -> None:
    others = [
        "WEIGHTS" if field.name == "weights" else "--" + field.name.replace("_", "-")
        for field in fields(request)
        if field.name not in WITH_PREDICTIONS and getattr(request, field.name) != field.default
    ]
    if others:
        raise OptionError(
            f"--predictions scores a file as it is, got {', '.join(others)} as well; leave out "
            "one or the other"
        )


def as_text(scores: Scores, path: Path) -> str:
    s = scores.settings
    rows = {}
    if s:
        rows["model"] = f"{s['model']}, sha256 {s['weights_sha256'][:12]}"
    data = f"{s['data']}, " if s.get("data") else ""
    rows["data"] = f"{data}{scores.images:,} images, {scores.objects:,} objects"
    rows["found"] = f"{scores.detections:,} detections"
    if s:
        rows["input"] = f"shorter side {s['size']} pixels, longer at most {s['max_size']}"
        rows["throughput"] = f"{s['images_per_second']:.2f} images/s with reading, {s['device']}"
    rows["results"] = str(path)
    lines = [f"{name:11}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, "", *_table(scores), "", *_classes_text(scores)])


def _table(scores: Scores) -> list[str]:
    found = {"box": scores.box, "mask": scores.mask}
    lines = [f"{'':4}  " + "  ".join(f"{name:>9}" for name in COLUMNS)]
    for name, precision in found.items():
        if precision is not None:
            lines.append(f"{name:4}  " + "  ".join(_cells(precision)))
    return lines


def _cells(precision: Precision) -> list[str]:
    return [f"{_percent(getattr(precision, key)):>9}" for key in COLUMNS.values()]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _classes_text(scores: Scores) -> list[str]:
    seen = [c for c in scores.classes if c.box is not None]
    worst = sorted(seen, key=lambda c: c.box or 0.0)[:WORST]
    title = "AP by class" if scores.mask is None else "AP by class, box and mask"
    if len(worst) < len(seen):
        title += f", the {WORST} worst of {len(seen):,}; --json lists all"
    lines = [title]
    for c in worst:
        mask = "" if scores.mask is None else f"  {_percent(c.mask):>6}"
        lines.append(f"  {_percent(c.box):>6}{mask}  {c.objects:5,} objects  {c.name}")
    return lines


def _tell(message: str) -> None:
    print(f"quadtree: {message}", file=sys.stderr)
