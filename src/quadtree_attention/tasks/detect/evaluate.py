# SPDX-License-Identifier: Apache-2.0
"""How well a detector does, in two loops: `predict` runs the model, `score` reads what it wrote.

What it writes is the result format of COCO, so that other programs can score it too, and this one
can score theirs. Beside it, `NAME.settings.json` says how it was made.
"""

import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from quadtree_attention.errors import (
    CheckpointError,
    DataError,
    MissingDependencyError,
    OptionError,
)
from quadtree_attention.files import check_writable, replacing
from quadtree_attention.tasks.detect.coco import CLIPPED, NO_MASK, CocoFile
from quadtree_attention.tasks.detect.masks import decode_mask, encode_mask, is_number, mask_problem

if TYPE_CHECKING:  # scoring needs no models
    from quadtree_attention.tasks.detect.predictor import Detections, Detector

Kind = Literal["bbox", "segm"]
MOST = 100  # detections of an image that count, the surest ones, as COCO has it
SETTINGS = {  # what results depend on; else they are not those asked for
    "weights_sha256": "weights",
    "model": "model",
    "size": "size",
    "max_size": "limit of the longer side",
    "data": "data",
    "data_sha256": "images",
    "device": "device",
}


@dataclass(frozen=True)
class Predicted:
    """What `predict` did."""

    path: Path
    reused: bool  # the file was there, with the same settings
    skipped: tuple[str, ...]  # images without an answer, with the reason


@dataclass(frozen=True)
class Precision:
    """Average precision in percent, by COCO's rules; None where there are no such objects.

    Attributes:
        ap: Mean over overlaps (IoU) of 0.50 to 0.95.
        ap50: At an overlap of 0.50.
        ap75: At an overlap of 0.75.
        small: `ap` of objects below 32x32 pixels.
        medium: Of those below 96x96 pixels.
        large: Of larger ones.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    small: float | None
    medium: float | None
    large: float | None


@dataclass(frozen=True)
class ClassScore:
    """`ap` of one class in percent; None where it has no objects, or results no masks."""

    name: str
    objects: int
    box: float | None
    mask: float | None


@dataclass(frozen=True)
class Scores:
    """Scores of a file of results; `mask` is None where it has boxes alone.

    Attributes:
        box: Scores of the boxes.
        mask: Scores of the masks.
        images: How many count.
        objects: How many count for boxes.
        detections: Results of the file.
        left_out: Entries of the file of objects that cannot be used.
        no_mask: Objects that count for boxes, but have no mask that can be used, with the reason;
            none where results have boxes alone.
        classes: Scores by class.
        settings: How the results were made, where that is known.
    """

    box: Precision
    mask: Precision | None
    images: int
    objects: int
    detections: int
    left_out: int
    no_mask: tuple[str, ...]
    classes: tuple[ClassScore, ...]
    settings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, with the number of objects without a mask in place of the reasons."""
        return {**asdict(self), "no_mask": len(self.no_mask)}


def predict(
    weights: str | os.PathLike[str],
    source: CocoFile,
    out: str | os.PathLike[str],
    *,
    data: str = "",
    size: int | None = None,
    batch_size: int = 1,
    device: str | torch.device | None = None,
    strict: bool = False,
    force: bool = False,
) -> Predicted:
    """Runs a detector over images and writes what it finds, in full or not at all.

    A file that is there already is used as it is if it was made by the same call: the same weights
    and settings, and the same images.

    Args:
        weights: Weights that `Detector` takes.
        source: Images, and categories, which are matched with the classes of the weights by name.
        out: File to write, `.json`.
        data: What to call the images, in the settings and in messages.
        size: Pixels of the shorter side that images are looked at with; None takes that of the
            weights.
        batch_size: Images that go through the model together.
        device: Where to run; None takes a GPU if there is one.
        strict: Fail at the first image that cannot be read, instead of leaving it out.
        force: Replace results that are there.

    Raises:
        OptionError: An option is not accepted, or other results are there already.
        CheckpointError: The weights cannot be read, or belong to other classes.
        DataError: The images cannot be read, or the file not be written.
    """
    from quadtree_attention.tasks.detect.predictor import Detector

    out = Path(out)
    if out.suffix != ".json":
        raise OptionError(f"results are written as .json, got {str(out)!r}; name it so")
    if batch_size < 1:
        raise OptionError(f"batch_size must be at least 1, got {batch_size}; pass a larger one")
    check_writable(out, source.path)
    model = Detector(weights, device=device, score=0.0, size=size)
    categories = match_classes(source, model)
    settings = _settings(model, source, data)
    if out.exists() and (info := _reusable(out, settings, strict=strict, force=force)) is not None:
        return Predicted(out, reused=True, skipped=tuple(info.get("skipped", ())))
    began = time.perf_counter()
    results, skipped = _results(model, source, categories, batch_size, strict=strict)
    info = {
        **settings,
        "weights": Path(weights).name,
        "skipped": skipped,
        "batch_size": batch_size,
        "images_per_second": (len(source) - len(skipped)) / (time.perf_counter() - began),
    }
    _write(out, results, info)
    return Predicted(out, reused=False, skipped=tuple(skipped))


def score(
    path: str | os.PathLike[str],
    annotations: str | os.PathLike[str],
    *,
    strict: bool = False,
) -> Scores:
    """Scores of results in a file, of this program or another.

    All images of the file of objects count; one without results has none of its objects found.

    Args:
        path: Results: a list of image_id, category_id, bbox (x, y, width, height), score and, for
            masks, segmentation as run lengths or polygons.
        annotations: COCO file of the true objects; the images are not needed.
        strict: Refuse objects that cannot be used as they are, their masks included where results
            have some, instead of leaving them out.

    Raises:
        DataError: A file cannot be read, or results are not of these images.
    """
    truth = CocoFile(annotations, strict=strict)
    results = read_results(path, truth)
    box, by_class = _evaluate("bbox", truth, results)
    mask, masks_by_class = None, dict.fromkeys(by_class)
    no_mask: tuple[str, ...] = ()
    if results and all("segmentation" in result for result in results):
        truth_masks = CocoFile(annotations, masks=True, strict=strict)
        no_mask = tuple(p.reason for p in truth_masks.problems if p.kind == NO_MASK)
        encoded = _with_run_lengths(path, results, truth_masks)
        mask, masks_by_class = _evaluate("segm", truth_masks, encoded)
    objects = Counter(a.label for image in truth.images for a in image.annotations if not a.crowd)
    classes = tuple(
        ClassScore(name, objects[label], by_class[category], masks_by_class[category])
        for (category, name), label in zip(
            truth.categories.items(), truth.label_of.values(), strict=True
        )
    )
    return Scores(
        box=box,
        mask=mask,
        images=len(truth),
        objects=objects.total(),
        detections=len(results),
        left_out=sum(problem.kind != CLIPPED for problem in truth.problems),
        no_mask=no_mask,
        classes=classes,
        settings=_read_settings(Path(path)) or {},
    )


def read_results(path: str | os.PathLike[str], truth: CocoFile) -> list[dict[str, Any]]:
    """The results in a file, checked against the images and categories they must be of.

    Raises:
        DataError: There is no such file, or it holds no results of these images.
    """
    try:
        results = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"there is no file {str(path)!r}; quadtree evaluate detect WEIGHTS --data ROOT "
            f"--out {path} writes it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{str(path)!r} cannot be read as JSON: {error}; pass a file of results"
        ) from error
    if not isinstance(results, list):
        raise DataError(
            f"{str(path)!r} holds no results: it must be a list, got a {type(results).__name__}; "
            "pass a file that quadtree evaluate detect has written"
        )
    images = {image.id for image in truth.images}
    for place, result in enumerate(results):
        if why := _result_problem(result, images, truth):
            raise DataError(f"result {place} of {str(path)!r} cannot be scored: {why}")
    return results


def match_classes(source: CocoFile, model: "Detector") -> dict[int, int]:
    """The data's category for every label of the model that they have: by name, or by number
    where the weights name none.

    Raises:
        CheckpointError: The data have classes that the model does not know.
    """
    ours = model.names
    numbers = [str(label) for label in range(1, len(ours) + 1)]
    if ours == source.classes or (ours == numbers and len(source.classes) == len(ours)):
        return dict(source.category_of)
    label_of = {name: label for label, name in enumerate(ours, start=1)}
    unknown = [name for name in source.classes if name not in label_of]
    if unknown or len(label_of) < len(ours):
        raise CheckpointError(
            f"the data have {len(source.classes)} classes, {_few(source.classes)}; the model of "
            f"{model.path} tells {len(ours)} apart, {_few(ours)}; it does not know "
            f"{_few(unknown)}, or has a name twice; take weights and data of the same classes"
        )
    return {label_of[name]: category for category, name in source.categories.items()}


# ---- running the model


def _results(
    model: "Detector",
    source: CocoFile,
    categories: dict[int, int],
    batch_size: int,
    *,
    strict: bool,
) -> tuple[list[dict[str, Any]], list[str]]:
    from tqdm import tqdm

    results: list[dict[str, Any]] = []
    skipped: list[str] = []
    with tqdm(total=len(source), unit="image", leave=False, disable=None) as bar:
        for start in range(0, len(source), batch_size):
            batch = {}
            places = range(start, min(start + batch_size, len(source)))
            for place in places:
                try:
                    batch[source.images[place].id] = source.image(place)
                except DataError as error:
                    if strict:
                        raise DataError(f"{error}; mend it, or leave out --strict") from error
                    skipped.append(str(error))
            if batch:
                answers = model.many(list(batch.values()))
                for number, found in zip(batch, answers, strict=True):
                    results += as_results(number, found, categories)
            bar.update(len(places))
    if len(skipped) == len(source):
        raise DataError(
            f"none of {len(source)} images can be read, the first because: {skipped[0]}"
        )
    return results, skipped


def as_results(image: int, found: "Detections", categories: dict[int, int]) -> list[dict[str, Any]]:
    """Detections of one image as COCO writes results; classes without a category are left out."""
    results = []
    for i, label in enumerate(found.labels.tolist()):
        if label not in categories:
            continue
        x0, y0, x1, y1 = (float(value) for value in found.boxes[i])
        result: dict[str, Any] = {
            "image_id": image,
            "category_id": categories[label],
            "bbox": [round(value, 3) for value in (x0, y0, x1 - x0, y1 - y0)],
            "score": round(float(found.scores[i]), 6),
        }
        if found.masks is not None:
            result["segmentation"] = encode_mask(found.masks[i])
        results.append(result)
    return results


# ---- scoring


def _evaluate(
    kind: Kind, truth: CocoFile, results: list[dict[str, Any]]
) -> tuple[Precision, dict[int, float | None]]:
    """Scores of boxes or masks, and `ap` by category."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"scores need faster-coco-eval, got {error}; pip install 'quadtree-attention[train]'"
        ) from error
    content = _as_coco(truth)
    # The size of a mask is its own, not that of its box
    left_out = "segmentation" if kind == "bbox" else "bbox"
    kept = [{k: v for k, v in result.items() if k != left_out} for result in results]
    known = COCO(content)
    found = known.loadRes(kept) if kept else COCO({**content, "annotations": []})
    run = COCOeval_faster(known, found, kind, print_function=_silent)
    run.params.maxDets = [1, 10, MOST]
    run.evaluate()
    run.accumulate()
    # (overlaps, recalls, categories, sizes, limits); -1 where there are no objects
    precision = np.asarray(run.eval["precision"])[..., -1]
    overlaps = np.asarray(run.params.iouThrs)
    at = {50: np.isclose(overlaps, 0.5), 75: np.isclose(overlaps, 0.75)}
    every, small, medium, large = (precision[..., size] for size in range(4))
    found_scores = Precision(
        ap=_mean(every),
        ap50=_mean(every[at[50]]),
        ap75=_mean(every[at[75]]),
        small=_mean(small),
        medium=_mean(medium),
        large=_mean(large),
    )
    by_class = {c: _mean(every[:, :, k]) for k, c in enumerate(run.params.catIds)}
    return found_scores, by_class


def _as_coco(truth: CocoFile) -> dict[str, Any]:
    """What is left of a file of objects, in its own format: boxes as they were given.

    Objects are counted anew, from 1: the library takes a match with id 0 for none.
    """
    listed = [(image.id, a) for image in truth.images for a in image.annotations]
    return {
        "images": [{"id": i.id, "width": i.width, "height": i.height} for i in truth.images],
        "categories": [{"id": number, "name": name} for number, name in truth.categories.items()],
        "annotations": [
            {
                "id": number,
                "image_id": image,
                "category_id": truth.category_of[a.label],
                "bbox": list(a.given),
                "area": a.area,
                "iscrowd": int(a.crowd),
                **({"segmentation": a.segmentation} if truth.masks else {}),
            }
            for number, (image, a) in enumerate(listed, start=1)
        ],
    }


def _mean(precision: Any) -> float | None:
    known = precision[precision > -1]
    return float(known.mean() * 100) if known.size else None


def _result_problem(result: Any, images: set[int], truth: CocoFile) -> str | None:
    if not isinstance(result, dict):
        return f"it must be an object, got a {type(result).__name__}"
    image, category = result.get("image_id"), result.get("category_id")
    if type(image) is not int or image not in images:
        return f"{truth.path} does not list its image {image!r}; pass the data it was made on"
    if type(category) is not int or category not in truth.label_of:
        return f"{truth.path} does not list its category {category!r}; pass the data of these"
    box, value = result.get("bbox"), result.get("score")
    numbers = [*box, value] if isinstance(box, list) and len(box) == 4 else [None]
    if not all(is_number(number) for number in numbers):
        return f"it must have a bbox of 4 finite numbers and a score, got {box!r} and {value!r}"
    return None


def _with_run_lengths(
    path: str | os.PathLike[str], results: list[dict[str, Any]], truth: CocoFile
) -> list[dict[str, Any]]:
    """The results with masks as compressed run lengths, the one form that the library takes."""
    sizes = {image.id: (image.height, image.width) for image in truth.images}
    encoded = []
    for place, result in enumerate(results):
        found, size = result["segmentation"], sizes[result["image_id"]]
        if why := mask_problem(found, *size):
            raise DataError(f"result {place} of {str(path)!r} cannot be scored: {why}")
        if not isinstance(found, dict) or not isinstance(found["counts"], str):
            found = encode_mask(decode_mask(found, *size))
        encoded.append({**result, "segmentation": found})
    return encoded


def _silent(*_: Any, **__: Any) -> None:
    pass


# ---- the files


def settings_path(path: str | os.PathLike[str]) -> Path:
    """Where the settings of results lie: `results.settings.json` for `results.json`."""
    return Path(path).with_suffix(".settings.json")


def _settings(model: "Detector", source: CocoFile, data: str) -> dict[str, Any]:
    from quadtree_attention.files import file_sha256

    listing = [[image.id, image.path.name, image.width, image.height] for image in source.images]
    listing.append(list(source.categories.items()))
    return {
        "weights_sha256": file_sha256(model.path),
        "model": model.card["model"],
        "size": model.size,
        "max_size": model.max_size,
        "data": data,
        "data_sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
        "device": model.device.type,
    }


def _write(out: Path, results: list[dict[str, Any]], info: dict[str, Any]) -> None:
    content = json.dumps(results).encode()
    info = {**info, "results_sha256": hashlib.sha256(content).hexdigest()}
    try:
        with replacing(out) as file:
            file.write(content)
        with replacing(settings_path(out)) as file:
            file.write((json.dumps(info, indent=2) + "\n").encode())
    except OSError as error:
        raise DataError(
            f"{out} cannot be written: {error.strerror or error}; make room or write elsewhere"
        ) from error


def _read_settings(path: Path) -> dict[str, Any] | None:
    """The settings of results, if they lie beside them and belong to them."""
    try:
        info = json.loads(settings_path(path).read_bytes())
        content = path.read_bytes()
    except (OSError, ValueError, RecursionError):
        return None
    belongs = isinstance(info, dict) and (
        info.get("results_sha256") == hashlib.sha256(content).hexdigest()
    )
    return info if belongs else None


def _reusable(
    out: Path, settings: dict[str, Any], *, strict: bool, force: bool
) -> dict[str, Any] | None:
    """The settings of a file that holds what would be computed; None if it is to be replaced.

    Raises `OptionError` where it must not be.
    """
    info = _read_settings(out)
    if info is None:  # also with force: it may be the data themselves
        raise OptionError(
            f"{str(out)!r} is there already, and no {settings_path(out).name} beside it says how "
            "it was made; write to another name"
        )
    if force:
        return None
    differing = [key for key in SETTINGS if info.get(key) != settings[key]]
    if differing:
        changes = "; ".join(
            f"{SETTINGS[key]} {_shown(info.get(key))} there, {_shown(settings[key])} now"
            for key in differing
        )
        raise OptionError(
            f"{str(out)!r} holds results of other settings: {changes}; write to another name, or "
            "replace it with --force"
        )
    if strict and info.get("skipped"):
        raise OptionError(
            f"{str(out)!r} was made without --strict and leaves out {len(info['skipped'])} images; "
            "write to another name, or replace it with --force"
        )
    return info


def _shown(value: object) -> str:
    """Checksums are told apart by their start."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "none"
