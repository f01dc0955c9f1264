# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate segment`: how good label maps are, after making them if need be."""

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.contract import Scores, Source, get_task
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.segment.readers import open_source
from quadtree_attention.tasks.store import Store

FOLDER = Path("label_maps")


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
    from quadtree_attention.tasks.evaluation import score

    task = get_task("segment")
    source = open_source(request.data, split=request.split)
    if source.skipped:
        _tell(f"left out {len(source.skipped)} files: {summary(source.skipped)}")
    if request.predictions is None:
        store = _predict(request, source)
    else:
        store = Store.open(request.predictions, task, source)
    scores = score(task, source, store, strict=request.strict)
    for name, left_out in (("no label map", scores.missing), ("no usable truth", scores.skipped)):
        if left_out:
            _tell(f"left out {len(left_out)} images with {name}: {summary(left_out)}")
    found = json.dumps(scores.to_dict(), indent=2)
    print(found if as_json else printable(as_text(scores, store)))


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


def _predict(request: Request, source: Source[Any]) -> Store:
    if request.weights is None:
        raise OptionError(
            "evaluating needs WEIGHTS, got none; quadtree train segment --config RECIPE writes "
            "best.safetensors; or score label maps with --predictions DIR"
        )
    from quadtree_attention.tasks.evaluation import predicted
    from quadtree_attention.tasks.segment.predictor import Segmenter

    segmenter = Segmenter.from_pretrained(
        request.weights,
        device=request.device or "auto",
        shorter_side=request.size,
        window=request.window,
        stride=request.stride,
    )
    folder = request.out or FOLDER
    store, skipped = predicted(
        segmenter, source, folder, strict=request.strict, force=request.force
    )
    for reason in skipped:
        _tell(f"skipped: {reason}")
    return store


def as_text(scores: Scores, store: Store) -> str:
    rows = {"label maps": str(store.path)}
    if (s := scores.settings) is not None:
        options = ", ".join(f"{k} {v}" for k, v in s["options"].items() if v is not None)
        rows |= {
            "model": f"{s['model']}, sha256 {s['weights_sha256'][:12]}",
            "options": options or "as trained",
        }
    lines = [f"{name:14}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, scores.to_text()])


def _tell(message: str) -> None:
    print(f"quadtree: {message}", file=sys.stderr)
