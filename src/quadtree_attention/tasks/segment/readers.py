# SPDX-License-Identifier: Apache-2.0
"""Images with a class for every pixel, from folders or a generator.

Label maps are images of one channel with 8 or 16 bits, or with a palette; pixel values are class
numbers. They are read as int16, with `IGNORE` for pixels without a class.
"""

import colorsys
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image, ImageDraw

from quadtree_attention.checks import one_of
from quadtree_attention.errors import DataError
from quadtree_attention.files import StrPath
from quadtree_attention.images import SUFFIXES, Array, opened, read_bytes, to_image
from quadtree_attention.tasks.contract import Source, file_identity
from quadtree_attention.tasks.readers import check_folder, data_root, reading, summary
from quadtree_attention.tasks.segment.metrics import IGNORE
from quadtree_attention.viz.palette import Colour, colour, distinct

Kind = Literal["auto", "folder", "ade20k"]
MOST_CLASSES = 2**15 - 1  # maximum of int16
LABEL_SUFFIXES = frozenset({".bmp", ".gif", ".png", ".tif", ".tiff"})  # lossless formats
CLASSES = "classes.json"
ADE20K_CLASSES, ADE20K_NAMES = 150, "objectInfo150.txt"
ADE20K_SPLITS = {"train": "training", "val": "validation"}
SHAPES = ("background", "disc", "square", "triangle")  # classes of the generated source
_HUES = (0.6, 0.0, 0.33, 0.15)


def open_source(
    root: StrPath | None, *, split: str, strict: bool = False, layout: Kind = "auto"
) -> "FolderSource":
    """Open the images of a split.

    Args:
        root: Folder of the data.
        split: "train" or "val", or the name of the folder.
        strict: Raise an error for a file with an unsupported name, instead of leaving it out.
        layout: "folder", "ade20k", or "auto" (by what is in `root`).

    Raises:
        OptionError: The layout does not exist, or `root` is missing.
        DataError: The data cannot be read.
    """
    one_of(get_args(Kind), source=layout)
    root = data_root(root, layout)
    check_folder(root, "pass the one that holds images and labels")
    annotated = (root / "annotations" / "training").is_dir()
    source = FolderSource(
        root, split, ade20k=layout == "ade20k" or (layout == "auto" and annotated)
    )
    if strict:
        refuse(source.skipped, split)
    return source


def refuse(bad: Sequence[str], split: str) -> None:
    """Raise `DataError` for files of a split that cannot be used, if there are any."""
    if bad:
        raise DataError(
            f"{len(bad)} files of {split} cannot be used: {summary(bad)}; correct or remove them, "
            "or leave out strict"
        )


@dataclass(frozen=True)
class Classes:
    """Meaning of the values of label maps."""

    names: list[str]
    palette: list[Colour]  # colour of each class
    ignored: tuple[int, ...]  # values of pixels that belong to no class
    first: int = 0  # value of the first class

    def table(self) -> Array:
        """Table from 16-bit values to classes, `IGNORE`, or `IGNORE` - 1 for unknown values."""
        table = np.full(2**16, IGNORE - 1, np.int16)
        table[self.first : self.first + len(self.names)] = np.arange(len(self.names))
        table[list(self.ignored)] = IGNORE
        return table


class FolderSource(Source[Array]):
    """Images and label maps of the same name in two folders, which may have subfolders.

    The files are `root/images/<split>/*.jpg`, `root/labels/<split>/*.png` and `root/classes.json`:
    `{"classes": ["sky", "road"], "ignore_index": 255, "palette": [[70, 130, 180], [128, 64, 128]]}`
    The last two entries are optional: by default 255 is ignored unless it is a class, and the
    palette is that of this package. With `ade20k`, the layout is ADE20K's: `images/training`,
    `annotations/training`, `.../validation`, 150 classes from 1 on, 0 for no class, names from
    `objectInfo150.txt`.
    """

    classes: list[str]

    def __init__(self, root: Path, split: str, *, ade20k: bool = False) -> None:
        folder = ADE20K_SPLITS.get(split, split) if ade20k else split
        images = root / "images" / folder
        labels = root / ("annotations" if ade20k else "labels") / folder
        for path in (images, labels):
            check_folder(
                path,
                "images are expected in images/<split>, label maps in labels/<split> (of ADE20K: "
                "annotations/<split>)",
            )
        self.meaning = _ade20k_classes(root) if ade20k else read_classes(root / CLASSES)
        self.classes, self.palette = self.meaning.names, self.meaning.palette
        self._table = self.meaning.table()
        self.skipped: list[str] = []
        self._images = self._by_name(images, SUFFIXES, "an image")
        self._labels = self._by_name(labels, LABEL_SUFFIXES, "a label map")
        self.names = sorted(self._images.keys() & self._labels)
        for name in sorted(self._images.keys() - self._labels.keys()):
            self.skipped.append(f"{self._images[name]}: has no label map in {labels}")
        for name in sorted(self._labels.keys() - self._images.keys()):
            self.skipped.append(f"{self._labels[name]}: has no image in {images}")
        if not self.names:
            found = f": {summary(self.skipped)}" if self.skipped else ""
            raise DataError(
                f"there are no images with label maps in {images} and {labels}{found}; both "
                " need files of the same names, the label maps with "
                f"{', '.join(sorted(LABEL_SUFFIXES))}"
            )

    def _by_name(self, folder: Path, suffixes: frozenset[str], what: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).with_suffix("").as_posix()
            if path.suffix.lower() not in suffixes:
                self.skipped.append(f"{path}: not {what} by its name")
            elif name in found:
                self.skipped.append(f"{path}: {found[name].name} has the same name")
            else:
                found[name] = path
        return found

    def identity(self, index: int) -> list[Any]:
        return file_identity(self._images[self.names[index]])

    def images(self, index: int) -> tuple[Image.Image]:
        path, label_path = (found[self.names[index]] for found in (self._images, self._labels))
        image = to_image(path)
        try:
            with opened(read_bytes(label_path), str(label_path)) as label_map:
                size = label_map.size
        except DataError:  # `truth` reports it
            return (image,)
        if image.size != size:
            raise DataError(
                f"{label_path} has {size[0]}x{size[1]} pixels, its image {path.name} "
                f"{image.width}x{image.height}; both need the same"
            )
        return (image,)

    def truth(self, index: int) -> Array:
        path = self._labels[self.names[index]]
        values = read_label_map(path)
        labels = self._table[values]
        if (unknown := labels < IGNORE).any():
            last = self.meaning.first + len(self.classes) - 1
            raise DataError(
                f"{path} has pixels of unknown classes {_few(np.unique(values[unknown]))}; known "
                f"are {self.meaning.first} to {last}, and "
                f"{_few(self.meaning.ignored) or 'no value'} for none"
            )
        return labels


class GeneratedSource(Source[Array]):
    """Coloured shapes on noise; the class is the shape. Needs no data.

    Args:
        split: "train" or another; splits share no images.
        count: Number of images.
        size: Shorter side in pixels; every second image has an aspect ratio of 1.5.
    """

    def __init__(self, split: str, *, count: int, size: int) -> None:
        self.names = [f"{split}-{index}" for index in range(count)]
        self.classes, self.palette = list(SHAPES), distinct(len(SHAPES))
        self._split, self._size = split, size

    def identity(self, index: int) -> list[Any]:
        return [self._split, index, self._size]

    def images(self, index: int) -> tuple[Image.Image]:
        return (self._sample(index)[0],)

    def truth(self, index: int) -> Array:
        return self._sample(index)[1]

    def _sample(self, index: int) -> tuple[Image.Image, Array]:
        rng = np.random.default_rng((self._split == "train", index))
        size = (self._size * 3 // 2 if index % 2 else self._size, self._size)  # width, height
        labels = _drawn_shapes(rng, size)
        tones = []
        for hue in _HUES:
            hue += rng.uniform(-0.06, 0.06)
            lightness, saturation = rng.uniform(0.35, 0.65), rng.uniform(0.4, 0.9)
            tones.append(colorsys.hls_to_rgb(hue % 1, lightness, saturation))
        pixels = 255 * np.array(tones)[labels] + rng.normal(0, 20, (*labels.shape, 3))
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), labels


def read_classes(path: Path, *, first: int = 0) -> Classes:
    """Read the classes of a data set from `classes.json`; `first` is the value of the first one."""
    accepted = '{"classes": ["sky", "road"], "ignore_index": 255}, palette optional'
    with reading(path, f"it must be like {accepted}"):
        entries = json.loads(path.read_text(encoding="utf-8"))
        entries = {"classes": entries} if isinstance(entries, list) else entries
        names = [str(e["name"] if isinstance(e, dict) else e) for e in entries["classes"]]
        taken = range(first, first + len(names))
        ignored = entries.get("ignore_index", [] if 255 in taken else [255])
        values = tuple(int(v) for v in (ignored if isinstance(ignored, list) else [ignored]))
        colours = [colour(c) for c in entries.get("palette") or distinct(len(names))]
    if not 1 <= len(names) <= MOST_CLASSES or len(set(names)) < len(names):
        raise DataError(
            f"{path} must list 1 to {MOST_CLASSES} different classes, got {len(names)}, "
            f"{len(set(names))} of them different; it must be like {accepted}"
        )
    if len(colours) != len(names):
        raise DataError(f"{path} has {len(colours)} colours for {len(names)} classes; match them")
    if not all(0 <= value < 2**16 for value in values):
        raise DataError(f"{path} must ignore values from 0 to 65535, got {ignored}; correct it")
    if both := [value for value in values if value in taken]:
        raise DataError(
            f"{path} must ignore values that are no class, got {_few(both)} among the classes "
            f"{taken[0]} to {taken[-1]}; pass other values, or [] for none"
        )
    return Classes(names, colours, values, first)


def read_label_map(path: str | Path) -> Array:
    """Read the values of a label map (H, W), uint16; palette images give indices, not colours.

    Raises:
        DataError: The file cannot be read, has more than one channel, or values outside of 16
            bits.
    """
    with opened(read_bytes(path), str(path)) as image:
        mode, values = image.mode, np.asarray(image)
    if values.ndim != 2 or mode == "F":
        raise DataError(
            f"{path} must be a label map of one channel, of 8 or 16 bits or with a palette, got "
            f"an image of mode {mode}; write numbers of classes, not colours"
        )
    outside = (values < 0) | (values >= 2**16)  # possible in files of 32 bits
    if outside.any():
        found = _few(np.unique(values[outside]).tolist())
        raise DataError(
            f"{path} must be a label map with values from 0 to 65535, got {found}; write such, "
            "also for pixels of no class"
        )
    return values.astype(np.uint16)


def _ade20k_classes(root: Path) -> Classes:
    if (root / CLASSES).exists():
        own = read_classes(root / CLASSES, first=1)
        return Classes(own.names, own.palette, (0,), first=1)
    names = [str(number) for number in range(1, ADE20K_CLASSES + 1)]
    table = root / ADE20K_NAMES
    if table.exists():
        with reading(table, "remove it, or get it again"):
            # Idx, Ratio, Train, Val, Stuff, Name, with tabs between them
            rows = table.read_text(encoding="utf-8").splitlines()[1:]
            listed = [row.split("\t")[-1].split(",")[0].strip() for row in rows if row.strip()]
        if len(listed) != ADE20K_CLASSES:
            raise DataError(
                f"{table} must name {ADE20K_CLASSES} classes, got {len(listed)}; remove it, or get "
                "it again"
            )
        # Some names occur twice, for different classes
        names = [n if listed.count(n) == 1 else f"{n} {i}" for i, n in enumerate(listed, start=1)]
    return Classes(names, distinct(len(names)), (0,), first=1)


def _drawn_shapes(rng: np.random.Generator, size: tuple[int, int]) -> Array:
    canvas = Image.new("L", size, 0)
    pen = ImageDraw.Draw(canvas)
    for _ in range(rng.integers(2, 5)):
        label = int(rng.integers(1, len(SHAPES)))
        radius = rng.uniform(0.12, 0.28) * min(size)
        x, y = rng.uniform(0, size[0]), rng.uniform(0, size[1])
        box = (x - radius, y - radius, x + radius, y + radius)
        if label == 1:
            pen.ellipse(box, fill=label)
        elif label == 2:
            pen.rectangle(box, fill=label)
        else:
            pen.polygon([(box[0], box[3]), (box[2], box[3]), (x, box[1])], fill=label)
    return np.asarray(canvas).astype(np.int16)


def _few(values: Collection[int]) -> str:
    return ", ".join(map(str, list(values)[:5])) + (", ..." if len(values) > 5 else "")
