# SPDX-License-Identifier: Apache-2.0
"""Labelled images from folders, npz files or a generator, and predictions of them."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from quadtree_attention.errors import DataError
from quadtree_attention.files import StrPath
from quadtree_attention.images import SUFFIXES, decode, to_image
from quadtree_attention.tasks.contract import Source, file_identity
from quadtree_attention.tasks.readers import check_folder, data_root, read_npz, reading, summary

Kind = Literal["auto", "folder", "npz"]


class Labelled(Source[int]):
    """Images with one label each; subclasses read the images."""

    path: Path  # file or folder of the images
    classes: list[str]
    labels: list[int]  # negative if unknown

    def identity(self, index: int) -> list[Any]:
        label = self.labels[index]
        return [*file_identity(self.path), index, self.classes[label] if label >= 0 else None]

    def images(self, index: int) -> tuple[Image.Image]:
        raise DataError(f"{self.path} has no image of {self.name(index)}; pass the data")

    def truth(self, index: int) -> int:
        if (label := self.labels[index]) < 0:
            raise DataError(f"{self.path}[{index}] {self.name(index)} has no label, got {label}")
        return label


class FolderSource(Labelled):
    """Images in one folder per class: `root/train/<class>/*.jpg`, `root/val/<class>/*.jpg`."""

    def __init__(self, root: Path, split: str) -> None:
        self.path = root / split
        expected = f"images are expected in {root}/train/<class>/ and {root}/val/<class>/"
        check_folder(self.path, expected)
        self.classes = sorted(folder.name for folder in self.path.iterdir() if folder.is_dir())
        files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted(p for p in (self.path / name).rglob("*") if p.is_file())
        ]
        images = [(path, label) for path, label in files if path.suffix.lower() in SUFFIXES]
        self.names = [str(path.relative_to(self.path)) for path, _ in images]
        self.labels = [label for _, label in images]
        other = (path for path, _ in files if path.suffix.lower() not in SUFFIXES)
        self.skipped = [f"{path}: not an image by its name" for path in other]
        if not self.names:
            raise DataError(
                f"there are no images in {self.path}/<class>/; names must end in "
                f"{', '.join(sorted(SUFFIXES))}"
            )

    def identity(self, index: int) -> list[Any]:
        return file_identity(self.path / self.names[index])  # the folder is the class

    def images(self, index: int) -> tuple[Image.Image]:
        return (to_image(self.path / self.names[index]),)


class NpzSource(Labelled):
    """JPEG files one after another in `root/train.npz` and `root/val.npz`.

    Arrays: `data` (uint8, all files), `offsets` (N + 1), `labels` (N) and, optionally, `names` (N).
    `root/classes.json` is optional and lists the classes as strings or as objects with a `name`.
    """

    def __init__(self, root: Path, split: str) -> None:
        self.path = root / f"{split}.npz"
        arrays = read_npz(self.path, ("data", "offsets", "labels"), ("names",))
        self._data, self._offsets, labels = (arrays[x] for x in ("data", "offsets", "labels"))
        names = arrays.get("names")
        for name, array in (("data", self._data), ("offsets", self._offsets), ("labels", labels)):
            if array.ndim != 1 or array.dtype.kind not in ("u" if name == "data" else "iu"):
                raise DataError(
                    f"{name} of {self.path} must be a list of "
                    f"{'bytes (uint8)' if name == 'data' else 'integers'}, got {array.dtype} of "
                    f"shape {array.shape}; write the file again"
                )
        counts = len(labels) > 0 and len(self._offsets) == len(labels) + 1
        named = names is None or names.shape == labels.shape
        inside = (self._offsets >= 0).all() and (self._offsets <= len(self._data)).all()
        ascending = (self._offsets[1:] >= self._offsets[:-1]).all()
        if not (counts and named and inside and ascending):
            raise DataError(
                f"the arrays of {self.path} do not belong together: {len(labels)} labels, "
                f"{len(self._offsets)} offsets into {len(self._data)} bytes; offsets must be one "
                "more than labels, ascending, and end inside the data, and names as many as labels"
            )
        self.labels = labels.tolist()
        numbered = [f"{split}-{index}" for index in range(len(labels))]
        self.names = numbered if names is None else _unique(names.tolist())
        self.classes = _class_names(root / "classes.json", max(self.labels) + 1)

    def images(self, index: int) -> tuple[Image.Image]:
        begin, end = self._offsets[index : index + 2]
        where = f"{self.path}[{index}] {self.name(index)}"
        return (decode(self._data[begin:end].tobytes(), where),)


class GeneratedSource(Labelled):
    """Gratings with noise, `size` pixels square; the class is their direction.

    Needs no data. The splits share no image.
    """

    def __init__(self, split: str, *, count: int, classes: int, size: int) -> None:
        self.path = Path(f"generated-{size}")
        self.classes = [f"{180 * i // classes} degrees" for i in range(classes)]
        self.names = [f"{split}-{index}" for index in range(count)]
        self.labels = [index % classes for index in range(count)]
        self._split, self._size = split, size

    def images(self, index: int) -> tuple[Image.Image]:
        rng = np.random.default_rng((("train", "val").index(self._split), index))
        angle = np.pi * (self.labels[index] + rng.uniform(-0.2, 0.2)) / len(self.classes)
        period = rng.uniform(6, 14)
        y, x = np.mgrid[: self._size, : self._size]
        along = x * np.cos(angle) + y * np.sin(angle)
        wave = np.sin(2 * np.pi * along / period + rng.uniform(0, 6))
        colour = rng.uniform(0.3, 1, 3)
        pixels = 128 + 80 * wave[..., None] * colour + rng.normal(0, 12, (*wave.shape, 3))
        return (Image.fromarray(pixels.clip(0, 255).astype(np.uint8)),)


class Predictions(Labelled):
    """A file of predictions, of this or an earlier version: logits, names and true labels.

    As a source it has the true labels for scores, and no images.

    Attributes:
        logits: (N, classes), float32.
        top: Requested number of classes per image.
    """

    def __init__(self, path: Path) -> None:
        arrays = read_npz(path, ("logits", "labels", "names", "info"))
        self.logits, labels, names = (arrays[x] for x in ("logits", "labels", "names"))
        try:
            info = json.loads(str(arrays["info"]))
            self.classes, self.top = [str(name) for name in info["classes"]], info.get("top", 5)
            count = len(self.classes)
            shapes = self.logits.shape, labels.shape, names.shape
            if self.logits.dtype != np.float32 or labels.dtype != np.int64:
                raise ValueError(f"logits are {self.logits.dtype} and labels {labels.dtype}")
            if shapes != ((len(labels), count), (len(labels),), (len(labels),)):
                raise ValueError(f"logits, labels and names of {shapes}, {count} classes differ")
            if not len(labels) or labels.min() < -1 or labels.max() >= count:
                raise ValueError(f"there are no labels, or some outside -1 to {count - 1}")
            if type(self.top) is not int or self.top < 1:
                raise ValueError(f"top must be an integer above 0, got {self.top!r}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{str(path)!r} holds no predictions: {error}; pass a file that quadtree evaluate "
                "classify has written"
            ) from error
        self.path = path
        self.labels, self.names = labels.tolist(), _unique(names.tolist())


def open_source(
    root: StrPath | None, *, split: str = "val", strict: bool = False, source: Kind = "auto"
) -> Labelled:
    """Open the labelled images of a split.

    Args:
        root: Folder of the splits, or a file of predictions, which contains the true labels.
        split: "train", "val", or the name of another split in `root`.
        strict: Raise an error if a folder has files that are not images, instead of skipping them.
        source: "folder" or "npz"; "auto": by the content of `root`.

    Raises:
        DataError: Files are missing or invalid.
        OptionError: `root` is missing.
    """
    root = data_root(root, source)
    if root.suffix == ".npz" and not root.is_dir():
        return Predictions(root)
    check_folder(root, "pass the one that holds train and val")
    if source == "auto":
        source = "npz" if (root / f"{split}.npz").exists() else "folder"
    found = NpzSource(root, split) if source == "npz" else FolderSource(root, split)
    if strict and found.skipped:
        raise DataError(
            f"{len(found.skipped)} files are no images: {summary(found.skipped)}; remove them, or "
            "leave out strict (--data.strict, --strict)"
        )
    return found


def _unique(names: Sequence[Any]) -> list[str]:
    """Names made unique: repeated names get their number."""
    uses = Counter(names)
    return [str(n) if uses[n] == 1 else f"{n} ({i})" for i, n in enumerate(names)]


def _class_names(path: Path, least: int) -> list[str]:
    if not path.exists():
        return [str(i) for i in range(least)]
    with reading(path, "it must list the classes as strings or objects with a name"):
        entries = json.loads(path.read_text())
        if isinstance(entries, dict):
            entries = entries.get("classes", list(entries.values()))
        names = [str(e["name"] if isinstance(e, dict) else e) for e in entries]
    if len(names) < least:
        raise DataError(f"{path} lists {len(names)} classes, the labels need {least}; add the rest")
    return names
