# SPDX-License-Identifier: Apache-2.0
"""The photographs of a folder, and their cameras."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import ExifTags

from quadtree_attention import checks
from quadtree_attention.errors import DataError
from quadtree_attention.files import StrPath
from quadtree_attention.images import Array, images_inside, opened, read_bytes

GUESS = 1.2  # default focal length over the longer side
FULL_FRAME = math.hypot(36.0, 24.0)  # mm, the diagonal of 35 mm film
PER_UNIT = {2: 25.4, 3: 10.0, 4: 1.0}  # mm in a unit of EXIF's focal plane resolution
Sharing = str  # "auto", "one" or "each"
SHARING = ("auto", "one", "each")


@dataclass(frozen=True)
class Photo:
    """A photograph that can be read.

    Args:
        name: Its file name.
        path: Path of the file.
        size: Width and height, upright.
        focal: Focal length in pixels from EXIF, or None.
        camera: Make, model, lens and focal length from EXIF; "" if missing.
        turned: True if the EXIF orientation requires a rotation or reflection.
    """

    name: str
    path: str
    size: tuple[int, int]
    focal: float | None
    camera: str = ""
    turned: bool = False


@dataclass(frozen=True)
class Photos:
    """The photographs of a folder.

    Args:
        used: Usable photographs, by name.
        left_out: Reasons for skipping the others, by name.
    """

    used: Sequence[Photo]
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class View:
    """The camera of one or several photographs.

    Args:
        size: Width and height.
        focal: Focal length in pixels.
        known: True if given or from EXIF; otherwise it is a default.
        matrix: Camera matrix (3, 3) if calibrated; it is not refined.
    """

    size: tuple[int, int]
    focal: float
    known: bool
    matrix: Array | None = None


def read_photos(folder: StrPath) -> Photos:
    """Read the headers of the photographs in a folder, without decoding pixels.

    Raises:
        DataError: Fewer than two photographs can be read.
    """
    used, left_out, seen = [], {}, dict[str, str]()
    for path in images_inside(Path(folder)):
        name = Path(path).name
        try:
            data = read_bytes(path)
            photo = _photo(name, path, data)
        except DataError as error:
            left_out[name] = str(error)
            continue
        same = seen.setdefault(hashlib.sha256(data).hexdigest(), name)
        if same != name:
            left_out[name] = f"the same file as {same}"
        else:
            used.append(photo)
    if len(used) < 2:
        why = "".join(f"; {name}: {reason}" for name, reason in list(left_out.items())[:2])
        raise DataError(
            f"a reconstruction needs two photographs or more, {folder} has {len(used)} that can be "
            f"used{why}; add photographs"
        )
    return Photos(used, left_out)


def cameras(
    photos: Sequence[Photo],
    *,
    sharing: Sharing = "auto",
    focal: float | None = None,
    matrix: Array | None = None,
) -> tuple[list[View], list[int]]:
    """Return cameras, and the index of the camera of each photograph.

    Args:
        photos: The photographs.
        sharing: "auto": photographs of the same size and EXIF camera share a camera; "one": all of
            the same size; "each": every photograph has its own.
        focal: Focal length of all photographs in pixels; None: from EXIF, or a default.
        matrix: Camera matrix (3, 3) of all photographs, which is not refined.
    """
    checks.one_of(SHARING, cameras=sharing)
    checks.above(0, focal=focal)
    found: list[View] = []
    by_key: dict[object, int] = {}
    chosen = []
    for i, photo in enumerate(photos):
        lens = (photo.camera, photo.focal) if sharing == "auto" else None
        key = i if sharing == "each" else (photo.size, lens)
        if key not in by_key:
            by_key[key] = len(found)
            given = matrix[[0, 1], [0, 1]].mean() if matrix is not None else focal or photo.focal
            guess = GUESS * max(photo.size)
            found.append(View(photo.size, float(given or guess), given is not None, matrix))
        chosen.append(by_key[key])
    return found, chosen


def _photo(name: str, path: str, data: bytes) -> Photo:
    with opened(data, path) as image:
        image.draft("L", (64, 64))
        image.load()  # a damaged file fails here
        width, height = _stored_size(data, path)
        exif = image.getexif()
        turn = exif.get(ExifTags.Base.Orientation, 1)
        details = exif.get_ifd(ExifTags.IFD.Exif)
    size = (height, width) if turn in (5, 6, 7, 8) else (width, height)
    focal = _focal(details, size)
    words = [exif.get(ExifTags.Base.Make), exif.get(ExifTags.Base.Model)]
    words += [details.get(ExifTags.Base.LensModel), details.get(ExifTags.Base.FocalLength)]
    camera = " ".join(str(word).strip() for word in words if word)
    return Photo(name, path, size, focal, camera, turn not in (0, 1))


def _stored_size(data: bytes, path: str) -> tuple[int, int]:
    with opened(data, path) as image:
        return image.size


def _focal(details: Mapping[int, object], size: tuple[int, int]) -> float | None:
    """Focal length in pixels, from the sensor's size or the 35 mm equivalent.

    Equivalent focal lengths have the same angle along the diagonal (CIPA DCG-001).
    """

    def number(tag: int) -> float:
        try:
            value = float(details.get(tag, 0))  # type: ignore[arg-type]
        except (TypeError, ValueError, ZeroDivisionError):
            return 0.0
        return value if math.isfinite(value) and value > 0 else 0.0

    film = number(ExifTags.Base.FocalLengthIn35mmFilm)
    if film:
        return film / FULL_FRAME * math.hypot(*size)
    focal = number(ExifTags.Base.FocalLength)
    density = number(ExifTags.Base.FocalPlaneXResolution)
    pixels = max(number(ExifTags.Base.ExifImageWidth), number(ExifTags.Base.ExifImageHeight))
    unit = PER_UNIT.get(int(number(ExifTags.Base.FocalPlaneResolutionUnit) or 2))
    if not (focal and density and pixels and unit):
        return None
    sensor = pixels / density * unit
    return focal / sensor * max(size) if np.isfinite(sensor) and sensor > 0 else None
