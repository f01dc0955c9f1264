# SPDX-License-Identifier: Apache-2.0
"""Images with objects, from files in the format of COCO.

Files of other tools may have entries that cannot be used. These are left out, counted by kind and
named with their id.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from quadtree_attention.errors import DataError
from quadtree_attention.files import StrPath
from quadtree_attention.images import to_image
from quadtree_attention.tasks.contract import file_identity
from quadtree_attention.tasks.detect.rle import decode_mask, is_number, mask_problem, short
from quadtree_attention.tasks.readers import summary

Box = tuple[float, float, float, float]
Target = dict[str, Tensor]
LEAST_SIDE = 0.01  # pixels of a box; thinner ones have no area once they are float32
CLIPPED = "box clipped"  # the one kind of problem that leaves nothing out
NO_MASK = "broken mask"  # leaves an object out where masks are asked for
OVERHANG = 1.0  # pixels that a box may stick out of its image by rounding


@dataclass(frozen=True)
class Problem:
    """Something in a file that cannot be used as it is."""

    kind: str
    reason: str  # with the file and the id


@dataclass(frozen=True)
class Annotation:
    """One object, or a crowd of them.

    Attributes:
        id: As in the file.
        label: 1 to the number of classes.
        box: Corners (x0, y0, x1, y1) in pixels, inside the image.
        given: The box as the file has it: x, y, width, height.
        area: Pixels, as the file has them; without an entry, those of the box.
        crowd: Whether these are many objects that were not told apart.
        segmentation: Polygons or run lengths, as the file has them; None if not read.
    """

    id: int
    label: int
    box: Box
    given: Box
    area: float
    crowd: bool
    segmentation: Any = None


@dataclass(frozen=True)
class Truth:
    """The objects of one image; often none."""

    id: int
    path: Path
    width: int
    height: int
    annotations: tuple[Annotation, ...]

    @property
    def objects(self) -> int:
        """Number of objects without crowds."""
        return sum(not a.crowd for a in self.annotations)

    def target(self, *, masks: bool = False) -> Target:
        """Tensors for a network.

        `boxes` (N, 4) as x0, y0, x1, y1, `labels` (N,) from 1 on, `iscrowd` (N,), `area` (N,), and
        `masks` (N, H, W) of bool where they are asked for.
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


class CocoFile:
    """A `Source` of the images and objects of one COCO file.

    Args:
        path: The JSON file.
        images: Folder of the images; None if they are not needed, as for scores.
        masks: Whether masks are needed: objects without a usable one are left out. None keeps them
            as they are.
        strict: Refuse a file with entries that cannot be used as they are instead of leaving them
            out, also with boxes that extend beyond their image, which else are clipped.
        check_images: Leave out images without a file.

    Raises:
        DataError: The file cannot be read, or holds no images or no categories.
    """

    def __init__(
        self,
        path: StrPath,
        images: StrPath | None = None,
        *,
        masks: bool | None = False,
        strict: bool = False,
        check_images: bool = True,
    ) -> None:
        self.path = Path(path)
        self.folder = None if images is None else Path(images)
        self.masks = masks
        self.strict = strict
        self.check_images = check_images
        self.problems: list[Problem] = []
        content = _read_json(self.path)
        self.categories = self._categories(_entries(content, "categories", self.path))
        listing = json.dumps(list(self.categories.items())).encode()
        self.categories_id = hashlib.sha256(listing).hexdigest()[:12]
        self.classes = list(self.categories.values())
        self.label_of = {category: i for i, category in enumerate(self.categories, start=1)}
        self.category_of = {label: category for category, label in self.label_of.items()}
        self.truths = self._truths(
            _entries(content, "images", self.path), _entries(content, "annotations", self.path)
        )
        if strict and self.problems:
            raise DataError(
                f"{len(self.problems)} entries of {self.path} cannot be used as they are: "
                f"{summary(self.skipped)}; mend them, or leave out strict (--data.strict, --strict)"
            )
        if not self.truths:
            why = f": {counted(self.problems)}" if self.problems else ""
            raise DataError(f"{self.path} has no image that can be used{why}; check its paths")

    @property
    def skipped(self) -> list[str]:
        return [problem.reason for problem in self.problems]

    def __len__(self) -> int:
        return len(self.truths)

    def name(self, index: int) -> str:
        return self.names[index]

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

    # ---- what the file says

    def _problem(self, kind: str, reason: str) -> None:
        self.problems.append(Problem(kind, f"{self.path}: {reason}"))

    def _categories(self, entries: Sequence[Any]) -> dict[int, str]:
        """Names by id, in the order of the ids."""
        found: dict[int, str] = {}
        for place, entry in enumerate(entries):
            number = _id_of(entry)
            if number is None or not isinstance(entry.get("name"), str):
                self._problem("broken entry", f"category {place} has no id or no name")
            elif number in found:
                self._problem("duplicate id", f"category {number} is there twice")
            else:
                found[number] = entry["name"]
        if not found:
            raise DataError(f"{self.path} names no categories; add them with id and name")
        return dict(sorted(found.items()))

    def _truths(self, entries: Sequence[Any], annotations: Sequence[Any]) -> list[Truth]:
        sizes: dict[int, _Entry] = {}
        gone: set[int] = set()  # images that are left out, and their annotations with them
        for place, entry in enumerate(entries):
            number = _id_of(entry)
            if number is None:
                self._problem("broken entry", f"image {place} in the list has no id")
            elif number in sizes or number in gone:
                self._problem("duplicate id", f"image {number} is there twice")
            elif (found := self._image(entry, number)) is None:
                gone.add(number)
            else:
                sizes[number] = found
        seen: set[int] = set()
        for place, entry in enumerate(annotations):
            number = _id_of(entry)
            if number is None:
                self._problem("broken entry", f"annotation {place} in the list has no id")
            elif number in seen:
                self._problem("duplicate id", f"annotation {number} is there twice")
            else:
                seen.add(number)
                self._add(entry, number, sizes, gone)
        uses = Counter(entry.name for entry in sizes.values())
        self.names = [
            e.name if uses[e.name] == 1 else f"{e.name} (image {number})"
            for number, e in sizes.items()
        ]
        return [
            Truth(number, e.path, e.width, e.height, tuple(e.annotations))
            for number, e in sizes.items()
        ]

    def _image(self, entry: Mapping[str, Any], number: int) -> "_Entry | None":
        width, height, name = (entry.get(key) for key in ("width", "height", "file_name"))
        if not (_is_count(width) and _is_count(height)):
            self._problem("broken entry", f"image {number} has no width and height above 0")
            return None
        if not isinstance(name, str) or not name:
            self._problem("broken entry", f"image {number} has no file_name")
            return None
        path = Path(name) if self.folder is None else self.folder / name
        if self.folder is not None and self.check_images and not os.path.isfile(path):
            self._problem("missing image", f"image {number}: there is no file {path}")
            return None
        return _Entry(name, path, width, height)

    def _add(
        self, entry: Mapping[str, Any], number: int, images: dict[int, "_Entry"], gone: set[int]
    ) -> None:
        where = f"annotation {number}"
        owner, category = (_whole(entry.get(key)) for key in ("image_id", "category_id"))
        if owner in gone:  # reported once, with the image
            return
        if owner is None or owner not in images:
            shown = short(entry.get("image_id"))
            self._problem("unknown image", f"{where} is of image {shown}, which is not listed")
            return
        if category is None or category not in self.label_of:
            shown = short(entry.get("category_id"))
            self._problem("unknown category", f"{where} is of category {shown}, not listed")
            return
        if found := self._annotation(entry, self.label_of[category], images[owner], where):
            images[owner].annotations.append(found)

    def _annotation(
        self, entry: Mapping[str, Any], label: int, image: "_Entry", where: str
    ) -> Annotation | None:
        given = _box(entry.get("bbox"))
        if given is None:
            shown = short(entry.get("bbox"))
            self._problem("broken box", f"{where}: bbox must be 4 finite numbers, got {shown}")
            return None
        crowd, area = entry.get("iscrowd", 0), entry.get("area")
        if crowd not in (0, 1):
            self._problem("broken entry", f"{where}: iscrowd must be 0 or 1, got {short(crowd)}")
            return None
        if (box := self._clipped(given, image, where)) is None:
            return None
        segmentation = None if self.masks is False else entry.get("segmentation")
        if self.masks and (why := mask_problem(segmentation, image.height, image.width)):
            self._problem(NO_MASK, f"{where}: {why}")
            return None
        if not is_number(area) or area <= 0:
            area = given[2] * given[3]
        return Annotation(entry["id"], label, box, given, float(area), bool(crowd), segmentation)

    def _clipped(self, given: Box, image: "_Entry", where: str) -> Box | None:
        """Corners of a box inside its image; None if nothing is left of it."""
        x, y, width, height = given
        size = f"{image.width}x{image.height}"
        shown = ", ".join(f"{value:g}" for value in given)
        if min(width, height) < LEAST_SIDE:
            self._problem("empty box", f"{where}: the box {shown} has no width or no height")
            return None
        box = (
            min(max(x, 0.0), image.width),
            min(max(y, 0.0), image.height),
            min(max(x + width, 0.0), image.width),
            min(max(y + height, 0.0), image.height),
        )
        if min(box[2] - box[0], box[3] - box[1]) < LEAST_SIDE:
            self._problem("box outside", f"{where}: the box {shown} is outside the {size} image")
            return None
        over = max(-x, -y, x + width - image.width, y + height - image.height)
        if over > OVERHANG:  # kept: what is inside is right
            self._problem(
                CLIPPED, f"{where}: the box {shown} sticks out of the {size} image; clipped"
            )
        return box


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
    """The images and objects of one split, by the names that such folders usually have.

    Those are `images/val` or `val`, and `annotations/instances_val.json`, or COCO's own with the
    year: `val2017` and `annotations/instances_val2017.json`.

    Args:
        root: Folder of it all; None if both paths are given.
        split: "train", "val", or any other name there.
        strict: As in `CocoFile`.
        images: Folder of the images, where it has another name.
        annotations: JSON file of the objects, where it has another name.
        masks: As in `CocoFile`.
        check_images: Leave out images without a file; else all count in scores, for which no image
            is read.

    Raises:
        DataError: There are no such files, or they cannot be used.
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
    found = next((path for path in paths if is_there(path)), None)
    if found is None:
        raise DataError(
            f"there is no {what}: neither {' nor '.join(map(str, paths))}; check the path"
        )
    return found


@dataclass
class _Entry:
    """An image while its annotations are collected."""

    name: str
    path: Path
    width: int
    height: int
    annotations: list[Annotation] = field(default_factory=list)


def counted(problems: Iterable[Problem]) -> str:
    """How many of each kind: "2 empty box, 1 missing image"."""
    kinds = Counter(problem.kind for problem in problems)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"there is no file {path}; pass the JSON file of the objects") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path} as JSON: {reason}; get it again") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} must be an object with images, annotations and categories, got a "
            f"{type(content).__name__}; pass a COCO file of objects, not one of results"
        )
    return content


def _entries(content: dict[str, Any], key: str, path: Path) -> list[Any]:
    entries = content.get(key)
    if not isinstance(entries, list):
        raise DataError(f"{path} must have a list of {key}, got {short(entries)}; add it")
    return entries


def _id_of(entry: Any) -> int | None:
    return _whole(entry.get("id")) if isinstance(entry, dict) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _box(value: Any) -> Box | None:
    if not isinstance(value, list) or len(value) != 4 or not all(is_number(x) for x in value):
        return None
    x, y, width, height = (float(number) for number in value)
    return x, y, width, height


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0
