# SPDX-License-Identifier: Apache-2.0
"""`quadtree detect`: which objects images show, and where."""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.cli.inputs import STDIN, complain, expand
from quadtree_attention.errors import OptionError, QuadtreeAttentionError
from quadtree_attention.files import check_writable, make_folder
from quadtree_attention.tasks.detect.predictor import SCORE, Detections, Detector
from quadtree_attention.viz.canvas import FORMATS, picture_format

PICTURE, FOLDER = Path("detections.png"), Path("detections")


@dataclass(frozen=True)
class Request:
    """What is to be looked at, as it was typed; None is what was not."""

    images: Sequence[str]
    weights: Path | None = None
    out: Path | None = None
    score: float = SCORE
    size: int | None = None
    device: str | None = None


def run(request: Request, *, as_json: bool) -> bool:
    """Finds the objects of every image and draws them; whether all could be read."""
    if request.weights is None:
        raise OptionError(
            "detecting needs weights, got no --weights; train some with quadtree train detect "
            "--config RECIPE, which writes best.safetensors; recipes/detect/debug.yaml "
            "does it in a minute, to see that everything works"
        )
    paths, failed = expand(request.images)
    targets = _targets(request, paths, as_json=as_json)
    detector = Detector(
        request.weights, device=request.device, score=request.score, size=request.size
    )
    results: list[dict[str, Any]] = []
    shown = not as_json and sys.stdout.isatty()  # what is found appears there anyway
    bar = tqdm(paths, unit="image", leave=False, disable=True if shown else None)
    for path in bar:
        target = targets.get(path)
        try:
            found = detector(sys.stdin.buffer.read() if path == STDIN else path)
            if target is not None:
                found.draw(target)
        except QuadtreeAttentionError as error:
            failed = True
            complain(error)
            results.append({"image": path, "error": str(error)})
            continue
        if as_json:
            results.append(_as_dict(path, found, target))
        else:
            tqdm.write(printable(as_text(path, found, target)), file=sys.stdout)
    if as_json:
        print(json.dumps(results, indent=2))
    return not failed


def as_text(path: str, found: Detections, target: Path | None) -> str:
    """One line for an image, one for each object."""
    kinds = Counter(found.names)
    counted = ", ".join(f"{count} {name}" for name, count in kinds.most_common())
    lines = [f"{path}  {counted or 'nothing found'}  ({found.seconds:.2f} s)"]
    for name, score, box in zip(found.names, found.scores, found.boxes, strict=True):
        x0, y0, x1, y1 = (round(float(value)) for value in box)
        lines.append(f"  {score * 100:5.1f} %  {name}  x {x0}-{x1}, y {y0}-{y1}")
    if target is not None:
        lines.append(f"  written  {target}")
    return "\n".join(lines)


def _as_dict(path: str, found: Detections, target: Path | None) -> dict[str, Any]:
    return {
        "image": path,
        "width": found.image.width,
        "height": found.image.height,
        "objects": found.as_dicts(),
        "seconds": round(found.seconds, 4),
        "written": None if target is None else str(target),
    }


def _targets(request: Request, paths: Sequence[str], *, as_json: bool) -> dict[str, Path]:
    """Where the picture of each image goes; nowhere with JSON and without --out."""
    out = request.out
    if (out is None and as_json) or not paths:
        return {}
    asked_one = len(request.images) == 1 and len(paths) == 1
    one_file = asked_one and not (request.images[0] != STDIN and os.path.isdir(request.images[0]))
    if out is None:
        out = PICTURE if one_file else FOLDER
    is_folder = out.is_dir() or (not one_file and out.suffix.lower() not in FORMATS)
    if one_file and not is_folder:
        picture_format(out)
        check_writable(out, *paths)
        return {paths[0]: out}
    if not is_folder:
        raise OptionError(
            f"pictures of {len(paths)} images go to a folder, got the file {str(out)!r}; name a "
            "folder with --out"
        )
    return _into_folder(out, paths)


def _into_folder(folder: Path, paths: Sequence[str]) -> dict[str, Path]:
    make_folder(folder)
    check_writable(folder / PICTURE)
    targets: dict[str, Path] = {}
    taken = {Path(os.path.realpath(path)) for path in paths if path != STDIN}  # never replaced
    for path in paths:
        stem = "stdin" if path == STDIN else Path(path).stem
        names = (f"{stem}.png", *(f"{stem}-{i}.png" for i in range(2, 2 * len(paths) + 2)))
        places = (Path(os.path.realpath(folder / name)) for name in names)
        place = next(place for place in places if place not in taken)
        taken.add(place)
        targets[path] = folder / place.name
    return targets
