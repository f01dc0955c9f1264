# SPDX-License-Identifier: Apache-2.0
"""Objects found in an image, and their files: the result format of COCO."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from quadtree_attention.errors import DataError
from quadtree_attention.images import Array
from quadtree_attention.tasks.contract import Codec, Result, Source
from quadtree_attention.tasks.detect.readers import CocoFile
from quadtree_attention.tasks.detect.rle import decode_mask, encode_mask, is_number, mask_problem
from quadtree_attention.tasks.readers import match_classes, reading


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Detections(Result):
    """Objects of one image, highest score first.

    Attributes:
        boxes: (N, 4) corners x0, y0, x1, y1 in pixels of the image as given.
        labels: (N,) int64, from 1 on.
        names: Names of the classes.
        scores: (N,) confidence in [0, 1].
        segmentations: Masks as COCO's compressed run lengths; None without masks.
    """

    task: ClassVar[str] = "detect"

    boxes: Array
    labels: Array
    names: tuple[str, ...]
    scores: Array
    segmentations: tuple[dict[str, Any], ...] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def masks(self) -> Array | None:
        """Masks (N, H, W) bool; None without masks."""
        if self.segmentations is None:
            return None
        width, height = self.images[0].size if self.images else (0, 0)
        masks = [decode_mask(one, *one["size"]) for one in self.segmentations]
        return np.stack(masks) if masks else np.zeros((0, height, width), dtype=bool)

    def to_dict(self) -> dict[str, Any]:
        """Return size of the image, time, and objects with masks as COCO's run lengths."""
        objects: list[dict[str, Any]] = []
        for i, name in enumerate(self.names):
            entry: dict[str, Any] = {
                "name": name,
                "label": int(self.labels[i]),
                "score": round(float(self.scores[i]), 6),
                "box": [round(float(value), 3) for value in self.boxes[i]],
            }
            if self.segmentations is not None:
                entry["segmentation"] = self.segmentations[i]
            objects.append(entry)
        width, height = self.images[0].size if self.images else (None, None)
        seconds = round(self.seconds, 4)
        return {"width": width, "height": height, "objects": objects, "seconds": seconds}

    def to_text(self) -> str:
        """Return a line of counts, and one for each object."""
        counts = ", ".join(f"{count} {name}" for name, count in Counter(self.names).most_common())
        lines = [f"{counts or 'nothing found'}  ({self.seconds:.2f} s)"]
        for name, score, box in zip(self.names, self.scores, self.boxes, strict=True):
            x0, y0, x1, y1 = (round(float(value)) for value in box)
            lines.append(f"  {score * 100:5.1f} %  {name}  x {x0}-{x1}, y {y0}-{y1}")
        return "\n".join(lines)


class DetectionsCodec(Codec[Detections]):
    """The result format of COCO: a list of objects with boxes as x, y, width and height.

    With a COCO file as source, images and categories have its ids, and unknown ids raise an error.
    Otherwise `image_id` is the name of the sample, and `category_name` is added. Labels index
    `classes`, or the classes of the source if `classes` is None.
    """

    suffixes = (".json",)
    together = True

    def __init__(
        self, source: Source[Any] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        super().__init__(source, classes)
        self.category_of: dict[int, int] = {}  # by label
        self.ids: dict[str, int] = {}  # by name of the sample
        self.sizes: dict[int, tuple[int, int]] = {}  # height and width, by id
        self.coco = source if isinstance(source, CocoFile) else None
        if self.coco is not None:
            self.classes = classes = classes or self.coco.classes
            places = match_classes(self.coco.classes, classes)
            self.category_of = dict(zip((p + 1 for p in places), self.coco.categories, strict=True))
            self.ids = {self.coco.name(i): image.id for i, image in enumerate(self.coco.truths)}
            self.sizes = {image.id: (image.height, image.width) for image in self.coco.truths}

    def nothing(self) -> Detections:
        return self._found([])

    def encode(self, found: Mapping[str, Detections], suffix: str) -> bytes:
        entries = [entry for name, one in found.items() for entry in self._entries(name, one)]
        return json.dumps(entries).encode()

    def decode(self, path: Path) -> dict[str, Detections]:
        with reading(path, "pass a file of results that quadtree evaluate detect has written"):
            entries = json.loads(path.read_bytes())
            if not isinstance(entries, list):
                raise ValueError(f"it must be a list of results, got a {type(entries).__name__}")
        masks = all(isinstance(entry, dict) and "segmentation" in entry for entry in entries)
        by_image: dict[int | str, list[dict[str, Any]]] = {}
        for place, entry in enumerate(entries):
            problem = self._problem(entry)
            if problem is None and masks:
                problem = mask_problem(entry["segmentation"], *self._size(entry))
            if problem is not None:
                raise DataError(f"result {place} of {str(path)!r} cannot be scored: {problem}")
            by_image.setdefault(entry["image_id"], []).append(entry)
        if self.source is None and not entries:  # one image without objects
            by_image[path.stem] = []
        names: dict[Any, str] = {number: name for name, number in self.ids.items()}
        return {
            names.get(image, str(image)): self._found(found, masks=masks)
            for image, found in by_image.items()
        }

    def _entries(self, name: str, found: Detections) -> Iterator[dict[str, Any]]:
        """Yield the entries of one image, without classes that the data do not have."""
        for i, label in enumerate(found.labels.tolist()):
            if self.coco is not None and label not in self.category_of:
                continue
            x0, y0, x1, y1 = (float(value) for value in found.boxes[i])
            entry = {
                "image_id": name if self.coco is None else self.ids[name],
                "category_id": self.category_of.get(label, label),
                "bbox": [round(value, 3) for value in (x0, y0, x1 - x0, y1 - y0)],
                "score": round(float(found.scores[i]), 6),
            }
            if self.coco is None:
                entry["category_name"] = found.names[i]
            if found.segmentations is not None:
                entry["segmentation"] = found.segmentations[i]
            yield entry

    def _found(self, entries: Sequence[dict[str, Any]], *, masks: bool = False) -> Detections:
        """Return the objects of one image, in the order of the file."""
        label_of = {category: label for label, category in self.category_of.items()}
        labels = [label_of.get(entry["category_id"], entry["category_id"]) for entry in entries]
        boxes = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        if self.classes is None:
            names = [str(entry.get("category_name", entry["category_id"])) for entry in entries]
        else:
            names = [self.classes[label - 1] for label in labels]
        return Detections(
            boxes=boxes,
            labels=np.array(labels, dtype=np.int64),
            names=tuple(names),
            scores=np.array([entry["score"] for entry in entries], dtype=np.float64),
            segmentations=tuple(map(self._compressed, entries)) if masks else None,
        )

    def _compressed(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return a mask of any format as compressed run lengths."""
        mask = entry["segmentation"]
        if isinstance(mask, dict) and isinstance(mask["counts"], str):
            return {"size": mask["size"], "counts": mask["counts"]}
        return encode_mask(decode_mask(mask, *self._size(entry)))

    def _size(self, entry: dict[str, Any]) -> tuple[int, int]:
        """Return height and width of the image from the source, else from the mask."""
        if self.coco is not None:
            return self.sizes[entry["image_id"]]
        match entry["segmentation"]:
            case {"size": [int(height), int(width)]}:
                return height, width
        return 0, 0  # equals the size of no mask

    def _problem(self, entry: Any) -> str | None:
        if not isinstance(entry, dict):
            return f"it must be an object, got a {type(entry).__name__}"
        image, category = entry.get("image_id"), entry.get("category_id")
        if self.coco is not None:
            known: Any = (("image", image, self.sizes), ("category", category, self.coco.label_of))
            for what, number, listed in known:
                if type(number) is not int or number not in listed:
                    return f"{self.coco.path} does not list its {what} {number!r}; pass its data"
        elif not isinstance(image, int | str) or type(category) is not int:
            return f"it must have an image_id and a category_id, got {image!r} and {category!r}"
        elif self.classes is not None and not 1 <= category <= len(self.classes):
            return f"its category_id must be from 1 to {len(self.classes)}, got {category}"
        box, score = entry.get("bbox"), entry.get("score")
        numbers = [*box, score] if isinstance(box, list) and len(box) == 4 else [None]
        if not all(is_number(number) for number in numbers):
            return f"it must have a bbox of 4 finite numbers and a score, got {box!r} and {score!r}"
        return None
