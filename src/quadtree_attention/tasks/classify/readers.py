# SPDX-License-Identifier: Apache-2.0
"""Labelled images from folders, npz files or a generator, and predictions of them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import StrPath
from quadtree_attention.images import SUFFIXES, Array, decode, to_image
from quadtree_attention.tasks.contract import Source, file_identity
from quadtree_attention.tasks.readers import read_npz, summary

Split = Literal["train", "val"]
Kind = Literal["auto", "folder", "npz", "generated"]


class FolderSource:
    """Images in one folder per class: `root/train/<class>/*.jpg`, `root/val/<class>/*.jpg`.

    Args:
        root: Folder with a folder per split.
        split: "train", "val", or any other name there.
    """

    def __init__(self, root: Path, split: str) -> None:
        self.root = root / split
        if not self.root.is_dir():
            raise DataError(
                f"there is no folder {self.root}; images are expected in "
                f"{root}/train/<class>/ and {root}/val/<class>/"
            )
        self.classes = sorted(folder.name for folder in self.root.iterdir() if folder.is_dir())
        self.skipped = []
        self._items: list[tuple[Path, int]] = []
        for label, name in enumerate(self.classes):
            for path in sorted(p for p in (self.root / name).rglob("*") if p.is_file()):
                if path.suffix.lower() in SUFFIXES:
                    self._items.append((path, label))
                else:
                    self.skipped.append(f"{path}: not an image by its name")
        if not self._items:
            raise DataError(
                f"there are no images in {self.root}/<class>/; names must end in "
                f"{', '.join(sorted(SUFFIXES))}"
            )

    def __len__(self) -> int:
        return len(self._items)

    def name(self, index: int) -> str:
        return str(self._items[index][0].relative_to(self.root))

    def identity(self, index: int) -> list[Any]:
        path, label = self._items[index]
        return [*file_identity(path), self.classes[label]]

    def images(self, index: int) -> tuple[Image.Image]:
        return (to_image(self._items[index][0]),)

    def truth(self, index: int) -> int:
        return self._items[index][1]


class NpzSource:
    """JPEG files one after another in `root/train.npz` and `root/val.npz`.

    Arrays: `data` (uint8, all files), `offsets` (N + 1), `labels` (N) and, optionally, `names` (N).
    `root/classes.json`, if there, lists the classes as strings or as objects with a `name`.

    Args:
        root: Folder of the files.
        split: "train", "val", or any other name there.
    """

    def __init__(self, root: Path, split: str) -> None:
        self.path = root / f"{split}.npz"
        arrays = read_npz(self.path, ("data", "offsets", "labels"), ("names",))
        self._data, self._offsets = arrays["data"], arrays["offsets"]
        self._labels, names = arrays["labels"], arrays.get("names")
        self.skipped: list[str] = []
        self._check(names)
        self._names = _unique(names.tolist()) if names is not None else None
        self.classes = _class_names(root / "classes.json", int(self._labels.max()) + 1)

    def _check(self, names: Array | None) -> None:
        arrays = {"data": self._data, "offsets": self._offsets, "labels": self._labels}
        for name, array in arrays.items():
            if array.ndim != 1 or array.dtype.kind not in ("u" if name == "data" else "iu"):
                raise DataError(
                    f"{name} of {self.path} must be a list of "
                    f"{'bytes (uint8)' if name == 'data' else 'integers'}, got {array.dtype} of "
                    f"shape {array.shape}; write the file anew"
                )
        count = len(self._labels)
        counts = count > 0 and len(self._offsets) == count + 1
        named = names is None or names.shape == self._labels.shape
        inside = (self._offsets >= 0).all() and (self._offsets <= len(self._data)).all()
        ascending = (self._offsets[1:] >= self._offsets[:-1]).all()
        if not (counts and named and inside and ascending):
            raise DataError(
                f"the arrays of {self.path} do not belong together: {len(self._labels)} labels, "
                f"{len(self._offsets)} offsets into {len(self._data)} bytes; offsets must be one "
                "more than labels, ascending, and end inside the data, and names as many as labels"
            )

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return self._names[index] if self._names else f"{self.path.stem}-{index}"

    def identity(self, index: int) -> list[Any]:
        return [*file_identity(self.path), index, int(self._labels[index])]

    def images(self, index: int) -> tuple[Image.Image]:
        begin, end = self._offsets[index : index + 2]
        where = f"{self.path}[{index}] {self.name(index)}"
        return (decode(self._data[begin:end].tobytes(), where),)

    def truth(self, index: int) -> int:
        if (label := int(self._labels[index])) < 0:
            raise DataError(f"{self.path}[{index}] {self.name(index)} has no label, got {label}")
        return label


class GeneratedSource:
    """Gratings with noise; the class is their direction. For trying things out without data.

    Args:
        split: "train" or "val", which share no image.
        count: Images.
        classes: Classes.
        size: Pixels of a side.
    """

    def __init__(self, split: Split, *, count: int, classes: int, size: int) -> None:
        self.classes = [f"{180 * i // classes} degrees" for i in range(classes)]
        self.skipped: list[str] = []
        self._split = split
        self._count = count
        self._size = size

    def __len__(self) -> int:
        return self._count

    def name(self, index: int) -> str:
        return f"{self._split}-{index}"

    def identity(self, index: int) -> list[Any]:
        return [self._size, len(self.classes)]

    def truth(self, index: int) -> int:
        return index % len(self.classes)

    def images(self, index: int) -> tuple[Image.Image]:
        rng = np.random.default_rng((get_args(Split).index(self._split), index))
        angle = np.pi * (self.truth(index) + rng.uniform(-0.2, 0.2)) / len(self.classes)
        period = rng.uniform(6, 14)
        y, x = np.mgrid[: self._size, : self._size]
        wave = np.sin(
            2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / period + rng.uniform(0, 6)
        )
        colour = rng.uniform(0.3, 1, 3)
        pixels = 128 + 80 * wave[..., None] * colour + rng.normal(0, 12, (*wave.shape, 3))
        return (Image.fromarray(pixels.clip(0, 255).astype(np.uint8)),)


class PredictionsSource:
    """The images of a file of predictions: their names and true labels, without the pixels.

    Args:
        path: File that `quadtree evaluate classify` has written.
    """

    skipped: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        read = read_predictions(path)
        self.path = path
        self.classes = read.classes
        self._names, self._labels = read.names, read.labels.tolist()

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def identity(self, index: int) -> list[Any]:
        return [*file_identity(self.path), self._labels[index]]

    def images(self, index: int) -> tuple[Image.Image]:
        raise DataError(f"{self.path} has no image of {self.name(index)}; pass the data")

    def truth(self, index: int) -> int:
        if (label := self._labels[index]) < 0:
            raise DataError(f"{self.path} has no true label of {self.name(index)}; pass the data")
        return int(label)


def open_source(
    root: StrPath | None,
    *,
    split: str = "val",
    strict: bool = False,
    source: Kind = "auto",
) -> Source[int]:
    """The labelled images of a split.

    Args:
        root: Folder of the splits; or a file of predictions, which has the true labels.
        split: "train", "val", or any other name there.
        strict: Refuse folders with files that are no images instead of leaving these out.
        source: "folder" or "npz"; "auto" looks whether `root` holds npz files or folders.

    Raises:
        DataError: There are no such files, or they cannot be used.
        OptionError: There is no root.
    """
    if root is None:
        raise OptionError(
            f"data from a {source!r} source need a root, got none; pass --data.root FOLDER, or "
            "--data.source generated to try things out without data"
        )
    root = Path(root)
    if root.suffix == ".npz" and not root.is_dir():
        return PredictionsSource(root)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; pass the one that holds train and val")
    if source == "auto":
        source = "npz" if (root / f"{split}.npz").exists() else "folder"
    found = NpzSource(root, split) if source == "npz" else FolderSource(root, split)
    if strict and found.skipped:
        raise DataError(
            f"{len(found.skipped)} files are no images: {summary(found.skipped)}; remove them, or "
            "leave out strict (--data.strict, --strict)"
        )
    return found


@dataclass(frozen=True)
class Predictions:
    """What a file of predictions holds.

    Attributes:
        logits: (N, classes), float32.
        labels: (N,) true labels, int64; -1 if unknown.
        names: Of the images.
        classes: Names of the classes.
        top: Classes per image that were asked for.
    """

    logits: Array
    labels: Array
    names: list[str]
    classes: list[str]
    top: int


def read_predictions(path: Path) -> Predictions:
    """The predictions in a file of this or an earlier version.

    Raises:
        DataError: There is no such file, or it holds no predictions.
    """
    arrays = read_npz(path, ("logits", "labels", "names", "info"))
    logits, labels, names = (arrays[name] for name in ("logits", "labels", "names"))
    problem = None
    try:
        info = json.loads(str(arrays["info"]))
        classes, top = [str(name) for name in info["classes"]], info.get("top", 5)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem, classes, top = f"info must be JSON with the classes, got {error!r}", [], 5
    count = len(classes)
    shapes = logits.shape, labels.shape, names.shape
    if problem is None and (logits.dtype != np.float32 or labels.dtype != np.int64):
        problem = f"logits are {logits.dtype} and labels {labels.dtype}"
    elif problem is None and shapes != ((len(labels), count), (len(labels),), (len(labels),)):
        problem = f"logits, labels and names of {shapes} and {count} classes do not fit"
    elif problem is None and not (len(labels) and -1 <= labels.min() <= labels.max() < count):
        problem = f"there are no labels, or some outside -1 to {count - 1}"
    elif problem is None and not (isinstance(top, int) and top > 0):
        problem = f"top must be an integer above 0, got {top!r}"
    if problem is not None:
        raise DataError(
            f"{str(path)!r} holds no predictions: {problem}; pass a file that quadtree evaluate "
            "classify has written"
        )
    return Predictions(logits, labels, _unique(names.tolist()), classes, top)


def _unique(names: Sequence[Any]) -> list[str]:
    """The names, those that are there twice with their number."""
    uses = Counter(names)
    return [str(n) if uses[n] == 1 else f"{n} ({i})" for i, n in enumerate(names)]


def _class_names(path: Path, least: int) -> list[str]:
    if not path.exists():
        return [str(i) for i in range(least)]
    try:
        entries = json.loads(path.read_text())
        if isinstance(entries, dict):
            entries = entries.get("classes", list(entries.values()))
        names = [str(e["name"] if isinstance(e, dict) else e) for e in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"cannot read {path}: {error!r}; it must list the classes as strings or objects with "
            "a name"
        ) from error
    if len(names) < least:
        raise DataError(f"{path} lists {len(names)} classes, the labels need {least}; add the rest")
    return names
