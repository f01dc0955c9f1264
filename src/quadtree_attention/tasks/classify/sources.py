# SPDX-License-Identifier: Apache-2.0
"""Where labelled images come from: folders, npz files, or a generator."""

import json
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.images import decode

Split = Literal["train", "val"]
Kind = Literal["auto", "folder", "npz", "generated"]
SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class ImageSource(Protocol):
    """Labelled images of one split."""

    classes: list[str]
    skipped: list[str]  # what was found but is no image, with the reason

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the image is called in messages and predictions."""

    def label(self, index: int) -> int: ...

    def read(self, index: int) -> Image.Image:
        """The image, RGB. Raises `DataError` naming it where it cannot be decoded."""


class FolderSource:
    """Images in one folder per class: `root/train/<class>/*.jpg`, `root/val/<class>/*.jpg`.

    Args:
        root: Folder with a folder per split.
        split: "train" or "val".
    """

    def __init__(self, root: Path, split: Split) -> None:
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

    def label(self, index: int) -> int:
        return self._items[index][1]

    def read(self, index: int) -> Image.Image:
        path = self._items[index][0]
        try:
            return decode(path.read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error


class NpzSource:
    """JPEG files one after another in `root/train.npz` and `root/val.npz`.

    Arrays: `data` (uint8, all files), `offsets` (N + 1), `labels` (N) and, optionally, `names` (N).
    `root/classes.json`, if there, lists the classes as strings or as objects with a `name`.

    Args:
        root: Folder of the files.
        split: "train" or "val".
    """

    def __init__(self, root: Path, split: Split) -> None:
        path = root / f"{split}.npz"
        try:
            with np.load(path, allow_pickle=False) as arrays:
                self._data: np.ndarray[Any, Any] = arrays["data"]
                self._offsets: np.ndarray[Any, Any] = arrays["offsets"]
                self._labels: np.ndarray[Any, Any] = arrays["labels"]
                self._names = arrays["names"].tolist() if "names" in arrays else None
        except FileNotFoundError:
            raise DataError(f"there is no file {path}; pass the folder that holds it") from None
        except Exception as error:  # damaged files fail in every possible way
            raise DataError(
                f"cannot read {path}: {error}; it must be an npz file with the arrays data, "
                "offsets and labels, and no Python objects"
            ) from error
        self.path = path
        self.skipped: list[str] = []
        self._check()
        self.classes = _class_names(root / "classes.json", int(self._labels.max()) + 1)

    def _check(self) -> None:
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
        named = self._names is None or len(self._names) == count
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
        return str(self._names[index]) if self._names else f"{self.path.stem}-{index}"

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def read(self, index: int) -> Image.Image:
        begin, end = self._offsets[index : index + 2]
        return decode(self._data[begin:end].tobytes(), f"{self.path}[{index}] {self.name(index)}")


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

    def label(self, index: int) -> int:
        return index % len(self.classes)

    def read(self, index: int) -> Image.Image:
        rng = np.random.default_rng((get_args(Split).index(self._split), index))
        angle = np.pi * (self.label(index) + rng.uniform(-0.2, 0.2)) / len(self.classes)
        period = rng.uniform(6, 14)
        y, x = np.mgrid[: self._size, : self._size]
        wave = np.sin(
            2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / period + rng.uniform(0, 6)
        )
        colour = rng.uniform(0.3, 1, 3)
        pixels = 128 + 80 * wave[..., None] * colour + rng.normal(0, 12, (*wave.shape, 3))
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def open_source(
    kind: Kind,
    root: str | Path | None,
    split: Split,
    *,
    generated_count: int = 512,
    generated_classes: int = 4,
    generated_size: int = 64,
) -> ImageSource:
    """The images of a split; "auto" looks whether `root` holds npz files or folders."""
    if kind == "generated":
        return GeneratedSource(
            split, count=generated_count, classes=generated_classes, size=generated_size
        )
    if root is None:
        raise OptionError(
            f"data from a {kind!r} source need a root, got none; pass --data.root FOLDER, or "
            "--data.source generated to try things out without data"
        )
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; pass the one that holds train and val")
    if kind == "auto":
        kind = "npz" if (root / f"{split}.npz").exists() else "folder"
    return NpzSource(root, split) if kind == "npz" else FolderSource(root, split)


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
