# SPDX-License-Identifier: Apache-2.0
"""`quadtree segment`: what every pixel of images shows."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.cli.inputs import STDIN, complain, expand
from quadtree_attention.errors import CheckpointError, OptionError, QuadtreeAttentionError
from quadtree_attention.files import check_writable, make_folder
from quadtree_attention.tasks.contract import checked_suffix
from quadtree_attention.tasks.segment.predictor import Segmenter
from quadtree_attention.tasks.segment.result import LabelMapCodec, Segmentation
from quadtree_attention.viz.canvas import FORMATS, picture_format

PICTURE, PICTURES = Path("segments.png"), Path("segments")  # of one image, of many


@dataclass(frozen=True)
class Request:
    """What is to be segmented, as it was typed; None is what was not."""

    images: Sequence[str]
    weights: Path | None = None
    out: Path | None = None
    save: Path | None = None
    device: str | None = None
    size: int | None = None
    window: int | None = None
    stride: int | None = None


@dataclass(frozen=True)
class Job:
    """An image, and the files that it becomes."""

    image: str
    picture: Path | None
    labels: Path | None

    @property
    def written(self) -> list[str]:
        return [str(path) for path in (self.picture, self.labels) if path is not None]


def run(request: Request, *, as_json: bool) -> bool:
    """Writes pictures and label maps of all images; whether all could be read."""
    if request.weights is None:
        raise OptionError(
            "segmenting needs weights, got no --weights; train some with quadtree train segment "
            "--config RECIPE, which writes best.safetensors (recipes/segment has recipes; "
            "debug.yaml takes a minute and no data)"
        )
    segmenter = Segmenter.from_pretrained(
        request.weights,
        device=request.device or "auto",
        shorter_side=request.size,
        window=request.window,
        stride=request.stride,
    )
    paths, failed = expand(request.images)
    results: list[dict[str, Any]] = []
    for job in _with_bar(_jobs(paths, request, as_json=as_json), as_json=as_json):
        try:
            found = segmenter(sys.stdin.buffer.read() if job.image == STDIN else job.image)
        except CheckpointError:
            raise  # not the image's fault
        except QuadtreeAttentionError as error:
            failed = True
            complain(error)
            results.append({"image": job.image, "error": str(error)})
            continue
        _write(found, job)
        if as_json:
            results.append({"image": job.image, **found.to_dict(), "written": job.written})
        else:
            print(printable(as_text(found, job)), flush=True)
    if as_json:
        print(json.dumps(results, indent=2))
    return not failed


def as_text(found: Segmentation, job: Job) -> str:
    written = f", written to {' and '.join(job.written)}" if job.written else ""
    return f"{job.image}\n{found.to_text()}{written}"


def _write(found: Segmentation, job: Job) -> None:
    if job.labels is not None:
        found.save(job.labels)
    if job.picture is not None:
        found.draw(job.picture, title=None if job.image == STDIN else Path(job.image).name)


# ---- where results go


def _jobs(paths: Sequence[str], request: Request, *, as_json: bool) -> list[Job]:
    """Images with their targets, which are looked at before the slow part."""
    if not paths:
        return []
    many = len(paths) > 1 or any(Path(image).is_dir() for image in request.images)
    out = request.out
    if out is None and request.save is None and not as_json:
        out = PICTURES if many else PICTURE
    pictures = _targets("--out", out, paths, many=many, suffixes=tuple(FORMATS))
    labels = _targets("--save", request.save, paths, many=many, suffixes=(".png",))
    for picture in filter(None, pictures):
        picture_format(picture)
    for label_map in filter(None, labels):
        checked_suffix(label_map, LabelMapCodec())
    _check_different([*pictures, *labels], paths)
    for given, targets in ((out, pictures), (request.save, labels)):
        if given is not None and given not in targets:  # a folder
            make_folder(given)
    for target in filter(None, [*pictures, *labels]):
        check_writable(target)
    return [Job(*job) for job in zip(paths, pictures, labels, strict=True)]


def _targets(
    option: str, given: Path | None, paths: Sequence[str], *, many: bool, suffixes: tuple[str, ...]
) -> Sequence[Path | None]:
    """A file for every image: the one that was named, or one of a folder."""
    if given is None:
        return [None] * len(paths)
    if many and given.suffix.lower() in suffixes and not given.is_dir():
        raise OptionError(
            f"{option} must be a folder for {len(paths)} images, got {str(given)!r}; name one"
        )
    if not many and given.suffix and not given.is_dir():  # whether of a right format or not
        return [given]
    return [given / f"{'stdin' if path == STDIN else Path(path).stem}.png" for path in paths]


def _check_different(targets: Iterable[Path | None], inputs: Sequence[str]) -> None:
    """No result may replace an image, or another result."""
    images = {os.path.realpath(path) for path in inputs if path != STDIN}
    used: set[str] = set()
    for target in filter(None, targets):
        place = os.path.realpath(target)
        if place in images:
            raise OptionError(
                f"{str(target)!r} is an input, it must not be replaced; write elsewhere"
            )
        if place in used:
            raise OptionError(
                f"two results would be {str(target)!r}; write pictures and label maps to different "
                "folders, and images of the same name one after the other"
            )
        used.add(place)


def _with_bar(jobs: Sequence[Job], *, as_json: bool) -> Iterator[Job]:
    """Shows a progress bar in a terminal, unless the answers appear there anyway."""
    shown = not as_json and sys.stdout.isatty()
    hidden = True if shown or len(jobs) == 1 else None
    return iter(tqdm(jobs, unit="image", leave=False, disable=hidden))
