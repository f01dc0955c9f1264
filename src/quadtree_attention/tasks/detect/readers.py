# SPDX-License-Identifier: Apache-2.0
"""Images with objects, from files in the format of COCO.

Invalid entries of files of other tools are left out, counted by kind and reported with their id.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from quadtree_attention.errors import DataError
from quadtree_attention.files import StrPath
from quadtree_attention.images import to_image
from quadtree_attention.tasks.contract import Source, file_identity
from quadtree_attention.tasks.detect.rle import decode_mask, is_number, mask_problem, short
from quadtree_attention.tasks.readers import reading, summary

T = TypeVar("T")
Box = tuple[float, float, float, float]
Target = dict[str, Tensor]
LEAST_SIDE = 0.01  # minimum side of a box in pixels; thinner boxes have no area in float32
CLIPPED = "box clipped"  # the only kind of problem whose entry is kept
OVERHANG = 1.0  # pixels by which a box may exceed its image due to rounding


class Problem(Exception):  # noqa: N818 (also kept, as a record)
    """An invalid entry of a file: the kind of problem, and the reason."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)  # so that it can be pickled
        self.kind, self.reason = kind, reason


@dataclass(frozen=True)
class Annotation:
    """One object, or a crowd of objects."""

    id: int  # as in the file
    label: int  # 1 to the number of classes
    box: Box  # corners (x0, y0, x1, y1) in pixels, inside the image
    given: Box  # the box of the file: x, y, width, height
    area: float  # pixels, as in the file; without an entry, the area of the box
    crowd: bool  # True for several objects with a common annotation
    segmentation: Any = None  # polygons or run lengths, as in the file; None if not read


@dataclass(frozen=True)
class Truth:
    """The objects of one image; may be empty."""

    id: int
    path: Path
    width: int
    height: int
    annotations: Sequence[Annotation]

    @property
    def objects(self) -> int:
        """Number of objects without crowds."""
        return sum(not a.crowd for a in self.annotations)

    def target(self, *, masks: bool = False) -> Target:
        """Return the tensors of a target for training.

        `boxes` (N, 4) as x0, y0, x1, y1, `labels` (N,) from 1 on, `iscrowd` (N,), `area` (N,), and
        `masks` (N, H, W) bool if requested.
        """
        found = self.annotations
        target = {
            "boxes": torch.tensor([a.box for a in found], dtype=torch.float32).view(-1, 4),
            "labels": torch.tensor([a.label for a in found], dtype=torch.int64),
            "iscrowd": torch.tensor([int(a.crowd) for a in found], dtype=torch.int64),
            "area": torch.tensor([a.area for a in found], dtype=torch.float32),
        }
        if masks:
            drawn = np.zeros((len(found), self.height, self.width), dtype=bool)
            for i, annotation in enumerate(found):
                drawn[i] = decode_mask(annotation.segmentation, self.height, self.width)
            target["masks"] = torch.from_numpy(drawn)
        return target


class CocoFile(Source[Truth]):
    """The images and objects of one COCO file.

    Args:
        path: The JSON file.
        images: Folder of the images; None if images are not read, as for scores.
        masks: True: leave out objects without a valid mask. None: keep all segmentations
            unchecked. False: read none.
        strict: Raise an error for a file with invalid entries instead of leaving them out, also
            for boxes that extend beyond their image, which are otherwise clipped.
        check_images: Leave out images without a file.

    Raises:
        DataError: The file cannot be read, or contains no images or no categories.
    """

    classes: list[str]

    def __init__(
        self,
        path: StrPath,
        images: StrPath | None = None,
        *,
        masks: bool | None = False,
        strict: bool = False,
        check_images: bool = True,
    ) -> None:
        self.path, self.folder = Path(path), None if images is None else Path(images)
        self.masks, self.strict, self.check_images = masks, strict, check_images
        self.problems: list[Problem] = []
        with reading(self.path, "pass the JSON file of the objects"):
            content = json.loads(self.path.read_bytes())
            if not isinstance(content, dict):
                raise DataError(
                    f"{self.path} must be an object with images, annotations and categories, got a "
                    f"{type(content).__name__}; pass a COCO file of objects, not one of results"
                )
        found = self._read(content, "categories", "category", _category)
        self.categories = {i: name for i, name in sorted(found.items()) if name is not None}
        if not self.categories:
            raise DataError(f"{self.path} names no categories; add them with id and name")
        listing = json.dumps(list(self.categories.items())).encode()
        self.categories_id = hashlib.sha256(listing).hexdigest()[:12]
        self.classes = list(self.categories.values())
        self.label_of = {category: i for i, category in enumerate(self.categories, start=1)}
        self.category_of = {label: category for category, label in self.label_of.items()}
        self._files: dict[int, str] = {}  # file names of the images, by id
        self._images = self._read(content, "images", "image", self._image)
        self._read(content, "annotations", "annotation", self._annotation)
        self.truths = [truth for truth in self._images.values() if truth is not None]
        uses = Counter(self._files[truth.id] for truth in self.truths)
        names = ((self._files[truth.id], truth.id) for truth in self.truths)
        self.names = [n if uses[n] == 1 else f"{n} (image {number})" for n, number in names]
        if strict and self.problems:
            raise DataError(
                f"{len(self.problems)} entries of {self.path} cannot be used as they are: "
                f"{summary(self.skipped)}; fix them, or leave out strict (--data.strict, --strict)"
            )
        if not self.truths:
            why = f": {counted(self.problems)}" if self.problems else ""
            raise DataError(f"{self.path} has no image that can be used{why}; check its paths")

    @property
    def skipped(self) -> list[str]:  # type: ignore[override]
        return [problem.reason for problem in self.problems]

    def identity(self, index: int) -> list[Any]:
        truth = self.truths[index]
        numbers = [truth.id, truth.width, truth.height, self.categories_id]
        return file_identity(truth.path) + numbers

    def images(self, index: int) -> tuple[Image.Image]:
        truth = self.truths[index]
        image = to_image(truth.path)
        if image.size != (truth.width, truth.height):
            raise DataError(
                f"{truth.path} is {image.width}x{image.height}, {self.path} says "
                f"{truth.width}x{truth.height} of image {truth.id}; its boxes are of another image"
            )
        return (image,)

    def truth(self, index: int) -> Truth:
        return self.truths[index]

    # ---- content of the file

    def _read(
        self, content: dict[str, Any], key: str, what: str, read: Callable[[Any, int], T]
    ) -> dict[int, T | None]:
        """Return the entries of a list by id, None for invalid ones; record the problems."""
        entries = content.get(key)
        if not isinstance(entries, list):
            raise DataError(f"{self.path} must have a list of {key}, got {short(entries)}; add it")
        found: dict[int, T | None] = {}
        for place, entry in enumerate(entries):
            number = entry.get("id") if isinstance(entry, dict) else None
            try:
                if type(number) is not int:
                    raise Problem("broken entry", f"{place} in the list has no id")
                if number in found:
                    raise Problem("duplicate id", f"{number} is there twice")
                found[number] = None
                found[number] = read(entry, number)
            except Problem as problem:
                self._note(problem.kind, f"{what} {problem.reason}")
        return found

    def _note(self, kind: str, reason: str) -> None:
        self.problems.append(Problem(kind, f"{self.path}: {reason}"))

    def _image(self, entry: Mapping[str, Any], number: int) -> Truth:
        width, height, name = (entry.get(key) for key in ("width", "height", "file_name"))
        if not all(type(side) is int and side > 0 for side in (width, height)):
            raise Problem("broken entry", f"{number} has no width and height above 0")
        if not isinstance(name, str) or not name:
            raise Problem("broken entry", f"{number} has no file_name")
        path = Path(name) if self.folder is None else self.folder / name
        if self.folder is not None and self.check_images and not os.path.isfile(path):
            raise Problem("missing image", f"{number}: there is no file {path}")
        self._files[number] = name
        return Truth(number, path, cast(int, width), cast(int, height), [])

    def _annotation(self, entry: Mapping[str, Any], number: int) -> None:
        """Add an object to its image, unless the image was left out."""
        owner, category = (entry.get(key) for key in ("image_id", "category_id"))
        if type(owner) is not int or owner not in self._images:
            raise Problem("unknown image", f"{number} is of image {short(owner)}, not listed")
        if (image := self._images[owner]) is None:
            return
        if type(category) is not int or category not in self.label_of:
            raise Problem(
                "unknown category", f"{number} is of category {short(category)}, not listed"
            )
        box, crowd, area = entry.get("bbox"), entry.get("iscrowd", 0), entry.get("area")
        if not isinstance(box, list) or len(box) != 4 or not all(is_number(x) for x in box):
            raise Problem(
                "broken box", f"{number}: bbox must be 4 finite numbers, got {short(box)}"
            )
        if crowd not in (0, 1):
            raise Problem("broken entry", f"{number}: iscrowd must be 0 or 1, got {short(crowd)}")
        given: Box = (float(box[0]), float(box[1]), float(box[2]), float(box[3]))
        corners = self._clipped(given, image, number)
        segmentation = None if self.masks is False else entry.get("segmentation")
        if self.masks and (why := mask_problem(segmentation, image.height, image.width)):
            raise Problem("broken mask", f"{number}: {why}")
        pixels = float(area) if is_number(area) and area > 0 else given[2] * given[3]
        label = self.label_of[category]
        found = Annotation(number, label, corners, given, pixels, bool(crowd), segmentation)
        cast(list[Annotation], image.annotations).append(found)

    def _clipped(self, given: Box, image: Truth, number: int) -> Box:
        """Return the corners of a box, clipped to its image."""
        x, y, width, height = given
        what = f"{number}: the box {', '.join(f'{value:g}' for value in given)}"
        size = f"{image.width}x{image.height}"
        if min(width, height) < LEAST_SIDE:
            raise Problem("empty box", f"{what} has no width or no height")
        box = (
            min(max(x, 0.0), image.width),
            min(max(y, 0.0), image.height),
            min(max(x + width, 0.0), image.width),
            min(max(y + height, 0.0), image.height),
        )
        if min(box[2] - box[0], box[3] - box[1]) < LEAST_SIDE:
            raise Problem("box outside", f"{what} is outside the {size} image")
        if max(-x, -y, x + width - image.width, y + height - image.height) > OVERHANG:
            self._note(CLIPPED, f"annotation {what} extends beyond the {size} image; clipped")
        return box


def _category(entry: Mapping[str, Any], number: int) -> str:
    if not isinstance(name := entry.get("name"), str):
        raise Problem("broken entry", f"{number} has no name")
    return name


def open_source(
    root: StrPath | None,
    *,
    split: str = "val",
    strict: bool = False,
    images: StrPath | None = None,
    annotations: StrPath | None = None,
    masks: bool | None = None,
    check_images: bool = False,
) -> CocoFile:
    """Open the images and objects of one split.

    Default paths are `images/val` or `val` and `annotations/instances_val.json`, or those of COCO
    with the year: `val2017` and `annotations/instances_val2017.json`.

    Args:
        root: Folder of the data set; None if both paths are given.
        split: "train", "val", or the name of another split in `root`.
        strict: As in `CocoFile`.
        images: Folder of the images, if not at its default path.
        annotations: JSON file of the objects, if not at its default path.
        masks: As in `CocoFile`.
        check_images: Leave out images without a file; otherwise all images count in scores, which
            read no image.

    Raises:
        DataError: Files are missing or invalid.
    """
    if root is None and (images is None or annotations is None):
        raise DataError(
            f"there is no folder of the {split} images; pass --data.root, or both "
            f"--data.{split}_images and --data.{split}_annotations"
        )
    base, names = Path(root or ""), (split, f"{split}2017")
    if annotations is None:
        files = [base / "annotations" / f"instances_{name}.json" for name in names]
        annotations = _first(files, f"JSON file of the {split} objects", os.path.isfile)
    if images is None:
        folders = [base / "images" / split, *(base / name for name in names)]
        if check_images:
            images = _first(folders, f"folder of the {split} images", os.path.isdir)
        else:
            images = next(filter(os.path.isdir, folders), folders[0])
    elif not os.path.isdir(images):
        raise DataError(f"there is no folder {images} of the {split} images; check the path")
    return CocoFile(annotations, images, masks=masks, strict=strict, check_images=check_images)


def _first(paths: Sequence[Path], what: str, is_there: Callable[[Path], bool]) -> Path:
    if found := next(filter(is_there, paths), None):
        return found
    raise DataError(f"there is no {what}: neither {' nor '.join(map(str, paths))}; check the path")


def counted(problems: Iterable[Problem]) -> str:
    """Count by kind: "2 empty box, 1 missing image"."""
    kinds = Counter(problem.kind for problem in problems)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
