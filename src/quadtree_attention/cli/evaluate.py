# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate`: how well trained models do."""

import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast

from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.classify.evaluate import Predicted, Scores, predict, score

WORST = 10  # classes that are listed; all of them are in the JSON


@dataclass(frozen=True)
class ClassifyRequest:
    """What is to be evaluated, as it was typed; None is what was not."""

    weights: Path | None = None
    predictions: Path | None = None
    data: Path | None = None
    split: str = "val"
    out: Path | None = None
    batch_size: int = 64
    size: int | None = None
    device: str | None = None
    dtype: str = "float32"
    workers: int | None = None
    strict: bool = False
    force: bool = False


def classify(request: ClassifyRequest, *, as_json: bool) -> None:
    path = request.predictions
    if path is None:
        path = _predict(request).path
    else:
        _check_nothing_else(request)
    scores = score(path)
    print(json.dumps(asdict(scores), indent=2) if as_json else printable(as_text(scores, path)))


def _check_nothing_else(request: ClassifyRequest) -> None:
    others = [
        "WEIGHTS" if field.name == "weights" else "--" + field.name.replace("_", "-")
        for field in fields(request)
        if field.name != "predictions" and getattr(request, field.name) != field.default
    ]
    if others:
        raise OptionError(
            f"--predictions scores a file as it is, got {', '.join(others)} as well; leave out "
            "one or the other"
        )


def _predict(request: ClassifyRequest) -> Predicted:
    if request.weights is None or request.data is None:
        missing = "WEIGHTS" if request.weights is None else "--data"
        raise OptionError(
            f"evaluating needs WEIGHTS and --data ROOT, got no {missing}; or score a file of "
            "predictions with --predictions FILE"
        )
    from quadtree_attention.tasks.classify.predictor import Precision
    from quadtree_attention.tasks.classify.sources import Split, open_source
    from quadtree_attention.tasks.readers import summary

    # Splits of other names than those of training are read the same way
    source = open_source("auto", request.data, cast(Split, request.split))
    done = predict(
        request.weights,
        source,
        request.out or Path("predictions.npz"),
        data=f"{request.data.resolve().name}/{request.split}",
        image_size=request.size,
        batch_size=request.batch_size,
        device=request.device,
        dtype=cast(Precision, request.dtype),
        workers=request.workers,
        strict=request.strict,
        force=request.force,
    )
    if source.skipped:
        _tell(f"left out {len(source.skipped)} files: {summary(source.skipped)}")
    for reason in done.skipped:
        _tell(f"skipped: {reason}")
    if done.reused:
        _tell(f"{done.path} holds these predictions already; --force makes them again")
    return done


def as_text(scores: Scores, path: Path) -> str:
    s = scores.settings
    rows = {
        "model": f"{s['model']}, sha256 {s['weights_sha256'][:12]}",
        "data": f"{s['data']}, {scores.images:,} images, {scores.skipped:,} skipped",
        "input": f"{s['image_size']} pixels, the middle {s['crop'] * 100:g} % of the image",
        "top-1": f"{scores.top1:.2f} %",
        "top-5": f"{scores.top5:.2f} %",
        "throughput": f"{scores.images_per_second:.1f} images/s with reading, {s['device']}, "
        f"{s['dtype']}",
        "predictions": str(path),
    }
    lines = [f"{name:11}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, "", *_classes_text(scores)])


def _classes_text(scores: Scores) -> list[str]:
    seen = [c for c in scores.classes if c.top1 is not None]
    worst = sorted(seen, key=lambda c: c.top1 or 0.0)[:WORST]
    title = "top-1 by class"
    if len(worst) < len(seen):
        title += f", the {WORST} worst of {len(seen):,}; --json lists all"
    return [title, *(f"  {c.top1:6.2f} %  {c.images:5,} images  {c.name}" for c in worst)]


def printable(text: str) -> str:
    """The text with ? for what the output has no character for."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "replace").decode(encoding)


def _tell(message: str) -> None:
    print(f"quadtree: {message}", file=sys.stderr)
