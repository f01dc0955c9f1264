# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate segment`: how good label maps are, after making them if need be."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.cli.segment import sliding_of
from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.segment.evaluate import Predicted, Scores, predict, score
from quadtree_attention.tasks.segment.sources import SegmentSource, open_source

FOLDER = Path("label_maps")
SHOWN = 30  # classes that are listed; all of them are in the JSON


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, as it was typed; None is what was not."""

    weights: Path | None = None
    predictions: Path | None = None
    data: Path | None = None
    split: str = "val"
    out: Path | None = None
    size: int | None = None
    window: int | None = None
    stride: int | None = None
    device: str | None = None
    strict: bool = False
    force: bool = False


ALWAYS = ("predictions", "data", "split", "strict")  # options of scoring alone


def run(request: Request, *, as_json: bool) -> None:
    if request.data is None:
        raise OptionError(
            "evaluating needs the truth, got no --data; pass --data ROOT, a folder with images, "
            "labels and classes.json"
        )
    if request.predictions is not None:
        _check_nothing_else(request)
    source = open_source("auto", request.data, request.split)
    if source.skipped:
        _tell(f"left out {len(source.skipped)} files: {summary(source.skipped)}")
    folder, done = request.predictions, None
    if folder is None:
        done = _predict(request, source)
        folder = done.folder
    scores = score(source, folder, strict=request.strict)
    for name, left_out in (("no label map", scores.missing), ("no usable truth", scores.skipped)):
        if left_out:
            _tell(f"left out {len(left_out)} images with {name}: {summary(left_out)}")
    found = json.dumps(scores.as_dict(), indent=2)
    print(found if as_json else printable(as_text(scores, folder, done)))


def _check_nothing_else(request: Request) -> None:
    others = [
        "WEIGHTS" if field.name == "weights" else "--" + field.name
        for field in fields(request)
        if field.name not in ALWAYS and getattr(request, field.name) != field.default
    ]
    if others:
        raise OptionError(
            f"--predictions scores label maps as they are, got {', '.join(others)} as well; leave "
            "out one or the other"
        )


def _predict(request: Request, source: SegmentSource) -> Predicted:
    if request.weights is None:
        raise OptionError(
            "evaluating needs WEIGHTS, got none; quadtree train segment --config RECIPE writes "
            "best.safetensors; or score label maps with --predictions DIR"
        )
    from quadtree_attention.tasks.segment.predictor import Segmenter

    assert request.data is not None
    segmenter = Segmenter(
        request.weights,
        device=request.device,
        size=request.size,
        sliding=sliding_of(request.window, request.stride),
    )
    done = predict(
        segmenter,
        source,
        request.out or FOLDER,
        data=f"{request.data.resolve().name}/{request.split}",
        strict=request.strict,
        force=request.force,
    )
    for reason in done.skipped:
        _tell(f"skipped: {reason}")
    if done.there:
        _tell(f"{done.folder} holds {done.there} label maps already; --force makes them again")
    return done


def as_text(scores: Scores, folder: Path, done: Predicted | None) -> str:
    rows = {
        "images": f"{scores.images:,}, {len(scores.missing) + len(scores.skipped):,} left out",
        "mIoU": f"{scores.miou:.2f} %",
        "pixels": f"{scores.accuracy:.2f} % right, {scores.class_accuracy:.2f} % by class",
        "label maps": str(folder),
    }
    if (s := scores.settings) is not None:
        size = (
            "as large as they are" if s["size"] is None else f"with a shorter side of {s['size']}"
        )
        windows = "" if s["sliding"] is None else f", windows {s['sliding'][0]}/{s['sliding'][1]}"
        rows = {
            "model": f"{s['model']}, sha256 {s['weights_sha256'][:12]}",
            "data": f"{s['data']}, images {size}{windows}",
            **rows,
        }
    if done is not None and done.images_per_second:
        rows["throughput"] = f"{done.images_per_second:.1f} images/s with reading and writing"
    lines = [f"{name:11}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, "", *_classes_text(scores)])


def _classes_text(scores: Scores) -> Sequence[str]:
    seen = sorted((c for c in scores.classes if c.iou is not None), key=lambda c: c.iou or 0.0)
    total = sum(c.pixels for c in seen)
    title = "IoU by class"
    if len(seen) > SHOWN:
        title += f", the {SHOWN} worst of {len(seen):,}; --json lists all"
    return [
        title,
        *(
            f"  {c.iou:6.2f} %  {c.pixels / total * 100:5.1f} % of pixels  {c.name}"
            for c in seen[:SHOWN]
        ),
    ]


def _tell(message: str) -> None:
    print(f"quadtree: {message}", file=sys.stderr)
