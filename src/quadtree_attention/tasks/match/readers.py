# SPDX-License-Identifier: Apache-2.0
"""Files that list pairs of images, one pair per line, in the format of SuperGlue.

The number of words of a line determines its content:

    2   image0 image1
    4   image0 image1 rotation0 rotation1
    11  image0 image1 and 9 numbers of a homography, pixels of image 0 to those of image 1
    22  image0 image1 rotation0 rotation1, 9 numbers of K0 and 9 of K1
    38  as 22, and 16 numbers of the motion from camera 0 to camera 1

Matrices are written row by row. A rotation is the number of quarter turns counter-clockwise that
make the image upright. Names with spaces are quoted as in a shell: "my desk/1.jpg". Blank lines and
lines that begin with # are skipped. The homography is an extension of this package, for images of
planes.

Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "pairs.txt"
    >>> _ = path.write_text("desk/1.jpg desk/2.jpg 0 1")
    >>> (pair,) = read_pairs(path)
    >>> pair.name, pair.rotation1
    ('1__2', 1)
"""

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from PIL import Image

from quadtree_attention.checks import one_of
from quadtree_attention.errors import DataError
from quadtree_attention.files import StrPath
from quadtree_attention.images import Array, image_size, to_image
from quadtree_attention.tasks.contract import Source, file_identity
from quadtree_attention.tasks.readers import reading

QUOTES = ('"', "'")
ROTATIONS = ("0", "1", "2", "3")
WORDS = (
    "2 (image0 image1), 4 (and rotation0 rotation1), 11 (image0 image1 and a homography), 22 "
    "(image0 image1 rotation0 rotation1 K0 K1) or 38 (and T_0to1)"
)
LONGEST = 240  # maximum bytes of a name; with a suffix, file systems accept 255
ROUNDING = 1e-2  # maximum deviation of a written rotation from a rotation


@dataclass(frozen=True, eq=False)
class PairLine:
    """One line of a file of pairs; None: not in the line."""

    line: int  # its number, from 1
    image0: str  # path relative to the folder of the images
    image1: str
    rotation0: int = 0  # quarter turns counter-clockwise that make the image upright, 0 to 3
    rotation1: int = 0
    K0: Array | None = None  # camera (3, 3) of image 0, before rotation
    K1: Array | None = None
    T_0to1: Array | None = None  # true motion (4, 4) from camera 0 to 1, before rotation
    H_0to1: Array | None = None  # true homography (3, 3) from pixels of image 0 to those of image 1
    name: str = ""  # of files about the pair, `<stem0>__<stem1>`; see `read_pairs`
    folder: Path = Path()  # of the images

    def __post_init__(self) -> None:
        if not self.name:
            stems = (PurePath(image).stem for image in (self.image0, self.image1))
            object.__setattr__(self, "name", "__".join(stems))

    @property
    def paths(self) -> tuple[Path, Path]:
        """Files of both images."""
        return self.folder / self.image0, self.folder / self.image1

    def read_images(self) -> tuple[Image.Image, Image.Image]:
        """Read both images and rotate them; raise `DataError` with the path of the file."""
        image0, image1 = map(to_image, self.paths)
        return _turned(image0, self.rotation0), _turned(image1, self.rotation1)

    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Width and height of both images before rotation; raises `DataError` with the path."""
        path0, path1 = self.paths
        return image_size(path0), image_size(path1)


class PairsSource(Source[PairLine]):
    """The pairs of a file. Lines with equal images and rotations share name and prediction."""

    def __init__(self, pairs: Sequence[PairLine]) -> None:
        self.pairs = pairs
        self.names = [pair.name for pair in pairs]

    def identity(self, index: int) -> list[Any]:
        pair = self.pairs[index]
        return [*file_identity(*pair.paths), pair.rotation0, pair.rotation1]

    def images(self, index: int) -> tuple[Image.Image, Image.Image]:
        return self.pairs[index].read_images()

    def truth(self, index: int) -> PairLine:
        """Return the line of a pair; it has a pose or a homography."""
        pair = self.pairs[index]
        if pair.T_0to1 is None and pair.H_0to1 is None:
            raise DataError(
                f"line {pair.line} of the pairs, {pair.name}, has no truth to compare with; write "
                "K0, K1 and T_0to1 or a homography behind the images"
            )
        return pair


def open_source(
    root: StrPath,
    *,
    split: str = "val",
    strict: bool = False,
    images: StrPath | None = None,
    truth: bool = True,
) -> PairsSource:
    """Open the pairs of a file.

    Args:
        root: The file of pairs.
        split: "val": a file of pairs has no splits.
        strict: No effect: images are read when their pair is matched.
        images: Folder of the images; None: folder of the file.
        truth: Raise an error for pairs without a true pose or homography.

    Raises:
        DataError: The file cannot be read or is empty, a line is invalid or lacks the truth, or
            the folder of images does not exist.
    """
    one_of(("val",), split=split)
    source = PairsSource(read_pairs(root, images))
    if truth:
        for index in range(len(source)):
            source.truth(index)
    return source


def _turned(image: Image.Image, rotation: int) -> Image.Image:
    turn = f"ROTATE_{90 * rotation}"  # in degrees, counter-clockwise
    return image.transpose(Image.Transpose[turn]) if rotation else image


def read_pairs(path: StrPath, images: StrPath | None = None) -> list[PairLine]:
    """Read the pairs of a file; `images` None: the images are in the folder of the file.

    The name of a pair is `<stem0>__<stem1>`. If two different pairs would have the same name, both
    are named by their whole paths, with "-" for "/" (`desk-1__desk-2`). If these are equal, too,
    the line is appended (`desk-1__desk-2-17`). Lines with equal images and rotations have one name.
    """
    path = Path(path)
    with reading(path, "pass a file of pairs, text in UTF-8"):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    folder = path.parent if images is None else Path(images)
    if not folder.is_dir():
        raise DataError(f"there is no folder of images {str(folder)!r}; check --images")
    pairs = [
        replace(_parse_line(f"{path}, line {number}", number, line), folder=folder)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.strip().startswith("#")
    ]
    if not pairs:
        raise DataError(f"{path} lists no pairs; write one to a line: image0 image1")
    pairs = _with_unique_names(pairs)
    if long := next((p for p in pairs if len(os.fsencode(p.name)) > LONGEST), None):
        raise DataError(
            f"{path}, line {long.line}: the names of the images are too long to name a file after "
            f"them both, got {long.name[:40]}...; shorten them, or let --images be a deeper folder"
        )
    return pairs


def _parse_line(where: str, number: int, line: str) -> PairLine:
    words = line.split()
    if any(word.startswith(QUOTES) for word in words):
        reader = shlex.shlex(line, posix=True)
        reader.whitespace_split, reader.commenters, reader.escape = True, "", ""
        try:
            words = list(reader)
        except ValueError as error:
            try:
                return _parse(where, number, words)  # a name that starts with a quote
            except DataError:
                raise DataError(
                    f"{where}: a quotation is not closed, got {line.strip()}; quote a whole name, "
                    "one with ' by \""
                ) from error
    return _parse(where, number, words)


def _parse(where: str, number: int, words: Sequence[str]) -> PairLine:
    if len(words) not in (2, 4, 11, 22, 38):
        raise DataError(
            f"{where}: a line must have {WORDS} words, got {len(words)}; quote paths with spaces"
        )
    image0, image1, *rest = words
    if len(words) == 11:
        homography = _matrix(where, "the homography", rest, 3)
        if not np.linalg.cond(homography) < 1e12:
            raise DataError(f"{where}: the homography has no inverse, got {' '.join(rest)}; fix it")
        return PairLine(number, image0, image1, H_0to1=homography)
    for i, word in enumerate(rest[:2]):
        if word not in ROTATIONS:
            raise DataError(
                f"{where}: rotation{i} must be 0, 1, 2 or 3 quarter turns, got {word!r}; write 0 "
                "for an image that is upright"
            )
    (rotation0, rotation1), cameras = map(int, rest[:2] or "00"), rest[2:]
    K0, K1 = (
        _camera(where, f"K{i}", cameras[9 * i : 9 * i + 9]) if cameras else None for i in range(2)
    )
    T_0to1 = None
    if motion := cameras[18:]:
        T_0to1 = _matrix(where, "T_0to1", motion, 4)
        turn = T_0to1[:3, :3]
        rigid = np.abs(turn @ turn.T - np.eye(3)).max() < ROUNDING and np.linalg.det(turn) > 0
        if not rigid or T_0to1[3].tolist() != [0, 0, 0, 1]:
            raise DataError(
                f"{where}: T_0to1 must be a rotation and a translation over 0 0 0 1, got "
                f"{' '.join(motion)}; fix the line"
            )
    return PairLine(number, image0, image1, rotation0, rotation1, K0, K1, T_0to1)


def _matrix(where: str, what: str, words: Sequence[str], side: int) -> Array:
    try:
        matrix = np.array([float(word) for word in words]).reshape(side, side)
    except ValueError as error:
        got = str(error).rpartition(": ")[2]
        raise DataError(
            f"{where}: {what} must be {side * side} numbers, got {got}; fix the line"
        ) from error
    if not np.isfinite(matrix).all():
        raise DataError(f"{where}: {what} must be finite, got {' '.join(words)}; fix the line")
    return matrix


def _camera(where: str, what: str, words: Sequence[str]) -> Array:
    matrix = _matrix(where, what, words, 3)
    if matrix[0, 0] <= 0 or matrix[1, 1] <= 0 or matrix[2].tolist() != [0, 0, 1]:
        raise DataError(
            f"{where}: {what} must be fx 0 cx 0 fy cy 0 0 1 with fx and fy above 0, got "
            f"{' '.join(words)}; fix the line"
        )
    return matrix


def _with_unique_names(pairs: list[PairLine]) -> list[PairLine]:
    first: dict[tuple[str, str, int, int], int] = {}  # first line of each pair
    for p in pairs:
        first.setdefault(_matched(p), p.line)
    for longer in (_by_paths, lambda p: f"{_by_paths(p)}-{first[_matched(p)]}"):
        owners = Counter(name for name, _ in {(p.name, _matched(p)) for p in pairs})
        pairs = [replace(p, name=longer(p)) if owners[p.name] > 1 else p for p in pairs]
    return pairs


def _matched(pair: PairLine) -> tuple[str, str, int, int]:
    """Identity of a pair: everything that its matches depend on."""
    return pair.image0, pair.image1, pair.rotation0, pair.rotation1


def _by_paths(pair: PairLine) -> str:
    paths = (PurePath(image) for image in (pair.image0, pair.image1))
    return "__".join("-".join([*p.parent.relative_to(p.anchor).parts, p.stem]) for p in paths)
