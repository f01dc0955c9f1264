# SPDX-License-Identifier: Apache-2.0
"""How well a segmenter does, in two loops: `predict` writes label maps, `score` reads them.

So a number can be worked out again, or for label maps of any other program, without the model.
"""

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.files import check_writable, make_folder, write_whole
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.segment.metrics import confusion, scores
from quadtree_attention.tasks.segment.sources import Array, SegmentSource, read_label_map

if TYPE_CHECKING:  # scoring needs no model
    from quadtree_attention.tasks.segment.predictor import Segmenter

SETTINGS = "settings.json"  # in a folder of label maps: what they were made with
NAMES = {  # of settings, in messages
    "model": "model",
    "weights_sha256": "weights",
    "size": "size",
    "sliding": "window and stride",
    "data": "data",
    "data_sha256": "images",
    "device": "device",
}


@dataclass(frozen=True)
class Predicted:
    """What `predict` did.

    Attributes:
        folder: Where the label maps are.
        images: How many were made.
        there: How many were there already.
        skipped: Images that could not be read, with the reason.
        images_per_second: Reading and writing included; 0 where none was made.
    """

    folder: Path
    images: int
    there: int
    skipped: tuple[str, ...]
    images_per_second: float


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class in percent, None where there is nothing to score; its true pixels."""

    name: str
    iou: float | None
    accuracy: float | None
    pixels: int


@dataclass(frozen=True)
class Scores:
    """Scores of the label maps of a split, in percent.

    Attributes:
        miou: Mean intersection over union of the classes that are anywhere.
        accuracy: Share of the pixels that have the right class.
        class_accuracy: Mean over classes of the share of their pixels that were found.
        images: Images that were scored.
        missing: Images without a label map; they are left out, not counted as wrong.
        skipped: Images whose truth cannot be read, with the reason.
        classes: Scores of every class.
        settings: What the label maps were made with, where that is known.
    """

    miou: float
    accuracy: float
    class_accuracy: float
    images: int
    missing: tuple[str, ...]
    skipped: tuple[str, ...]
    classes: tuple[ClassScore, ...]
    settings: dict[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def predict(
    segmenter: "Segmenter",
    source: SegmentSource,
    folder: str | os.PathLike[str],
    *,
    data: str,
    strict: bool = False,
    force: bool = False,
) -> Predicted:
    """Writes a label map for every image of a split; those that are there stay.

    Args:
        segmenter: What makes them.
        source: Images.
        folder: Where they go, as `<name>.png`; made if it is not there. `settings.json` says what
            they were made with.
        data: What the data are called there.
        strict: Fail at the first image that cannot be read.
        force: Make label maps again, also those by other settings.

    Raises:
        OptionError: The folder holds label maps by other settings, or cannot be written to.
        DataError: No image can be read, or one cannot with `strict`.
    """
    from tqdm import tqdm

    match_classes(source.classes, segmenter)
    names = [source.name(i) for i in range(len(source))]
    folder = _prepared(Path(folder), _settings(segmenter, source, data), names, force=force)
    targets = [folder / f"{name}.png" for name in names]
    if force:  # all of them now: what is left of an interrupted run is then of this one
        for target in targets:
            target.unlink(missing_ok=True)
    skipped: list[str] = []
    made = there = 0
    began = time.perf_counter()
    for i, target in enumerate(tqdm(targets, unit="image", leave=False, disable=None)):
        if target.exists():
            there += 1
            continue
        try:
            image, _ = source.read(i)
        except DataError as error:
            if strict:
                raise DataError(f"{error}; remove it, or leave out --strict") from error
            skipped.append(str(error))
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        segmenter(image).save(target)
        made += 1
    if not made and not there:
        raise DataError(f"no image can be used: {summary(skipped)}; check the files")
    speed = made / (time.perf_counter() - began) if made else 0.0
    return Predicted(folder, made, there, tuple(skipped), speed)


def score(source: SegmentSource, folder: str | os.PathLike[str], *, strict: bool = False) -> Scores:
    """Scores of the label maps in a folder.

    Args:
        source: The truth.
        folder: Has `<name>.png` for every image, with numbers of classes from 0 on.
        strict: Fail where one is missing, or a truth cannot be read, instead of leaving it out.

    Raises:
        DataError: There are none of these images, or one of them is no label map.
    """
    from tqdm import tqdm

    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder} of label maps; quadtree evaluate segment WEIGHTS --data "
            f"ROOT --out {folder} makes it"
        )
    count = len(source.classes)
    matrix = torch.zeros(count, count, dtype=torch.long)
    missing: list[str] = []
    skipped: list[str] = []
    images = 0
    for i in tqdm(range(len(source)), unit="image", leave=False, disable=None):
        path = folder / f"{source.name(i)}.png"
        try:
            truth = source.read_labels(i)
        except DataError as error:
            skipped.append(str(error))
            continue
        if not path.is_file():
            missing.append(source.name(i))
            continue
        predicted = _predicted(path, truth, count)
        matrix += confusion(torch.from_numpy(predicted), torch.from_numpy(truth), count)
        images += 1
    if strict and (bad := skipped + [f"{name}: has no label map" for name in missing]):
        raise DataError(
            f"{len(bad)} images cannot be scored: {summary(bad)}; correct them, or leave out "
            "--strict"
        )
    if not images:
        raise DataError(
            f"{folder} has label maps for none of {len(source)} images, such as "
            f"{source.name(0)}.png; pass the folder that quadtree evaluate segment has filled"
        )
    settings = _read_settings(folder)
    if settings is not None:
        settings.pop("images", None)
    return _scores(matrix, source.classes, images, missing, skipped, settings)


def match_classes(theirs: list[str], segmenter: "Segmenter") -> None:
    """Raises `CheckpointError` where the classes of the data are not those of the model."""
    ours = segmenter.names
    numbers = [str(label) for label in range(len(ours))]
    if theirs != ours and not (ours == numbers and len(theirs) == len(ours)):
        raise CheckpointError(
            f"the data have {len(theirs)} classes, {', '.join(theirs[:3])}, ...; the model of "
            f"{segmenter.path} tells {len(ours)} apart, {', '.join(ours[:3])}, ...; take weights "
            "and data of the same classes in the same order"
        )


def _predicted(path: Path, truth: Array, count: int) -> Array:
    labels = read_label_map(path).astype(np.int32)
    if labels.shape != truth.shape:
        raise DataError(
            f"{path} has {labels.shape[1]}x{labels.shape[0]} pixels, the truth "
            f"{truth.shape[1]}x{truth.shape[0]}; predict at the size of the images"
        )
    if (highest := int(labels.max())) >= count:
        raise DataError(
            f"{path} must have classes from 0 to {count - 1}, got {highest}; take predictions of "
            "the same classes"
        )
    return labels


def _scores(
    matrix: torch.Tensor,
    names: list[str],
    images: int,
    missing: list[str],
    skipped: list[str],
    settings: dict[str, Any] | None,
) -> Scores:
    found = scores(matrix)
    pixels = matrix.sum(dim=1).tolist()
    if not sum(pixels):
        raise DataError("no pixel of the truth has a class; there is nothing to score")
    rows = zip(names, found.iou, found.class_accuracy, pixels, strict=True)
    seen = [value for value in found.class_accuracy if not math.isnan(value)]
    return Scores(
        miou=found.miou,
        accuracy=found.accuracy,
        class_accuracy=sum(seen) / len(seen),
        images=images,
        missing=tuple(missing),
        skipped=tuple(skipped),
        classes=tuple(ClassScore(n, _number(i), _number(a), p) for n, i, a, p in rows),
        settings=settings,
    )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


# ---- the folder


def _settings(segmenter: "Segmenter", source: SegmentSource, data: str) -> dict[str, Any]:
    from quadtree_attention.files import file_sha256

    return {
        "model": segmenter.card["model"],
        "weights_sha256": file_sha256(segmenter.path),
        "size": segmenter.size,
        "sliding": None if segmenter.sliding is None else list(segmenter.sliding),
        "data": data,
        "data_sha256": source.fingerprint(),
        "device": segmenter.device.type,
    }


def _prepared(folder: Path, settings: dict[str, Any], names: list[str], *, force: bool) -> Path:
    """The folder, with settings noted: label maps of different ones must not get mixed."""
    make_folder(folder)
    note = folder / SETTINGS
    check_writable(note)
    noted = _read_settings(folder)
    if noted is None and any(folder.iterdir()):  # may be the data themselves
        raise OptionError(
            f"{folder} holds files, and no {SETTINGS} that says they are label maps of ours; write "
            "to another folder"
        )
    before, made = (settings, []) if noted is None else (noted, noted.pop("images", []))
    if before != settings and not force:
        changes = "; ".join(
            f"{NAMES[key]} {_shown(before.get(key))} there, {_shown(value)} now"
            for key, value in settings.items()
            if before.get(key) != value
        )
        raise OptionError(
            f"{folder} holds label maps by other settings: {changes}; write to another folder, or "
            "make them again with --force"
        )
    if before != settings:  # nothing that other settings have made stays
        for name in made:
            if ".." not in Path(name).parts and not Path(name).is_absolute():
                (folder / f"{name}.png").unlink(missing_ok=True)
    content = json.dumps({**settings, "images": names}, indent=2)
    write_whole(note, (content + "\n").encode())
    return folder


def _read_settings(folder: Path) -> dict[str, Any] | None:
    """What a folder says about its label maps; None where it says nothing that can be read."""
    try:
        found = json.loads((folder / SETTINGS).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() >= NAMES.keys() else None


def _shown(value: object) -> str:
    """Checksums are told apart by their start."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
