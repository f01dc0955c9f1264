# SPDX-License-Identifier: Apache-2.0
"""Files of disparity: PFM, PNG and NPY, with their conventions for unknown pixels."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from quadtree_attention import checks
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import StrPath
from quadtree_attention.images import Array, opened, read_bytes
from quadtree_attention.tasks.readers import reading

READ = (".pfm", ".png", ".npy", ".npz")
WRITTEN = (".npy", ".pfm", ".png")
KITTI_SCALE = 256.0  # factor of values in 16-bit PNG
LARGEST = 65535 / KITTI_SCALE  # maximum disparity of a 16-bit PNG
_PFM = re.compile(rb"\s*(P[fF])\s+(\d{1,9})\s+(\d{1,9})\s+(\S{1,40})(?:\r\n|\s|\Z)")  # header


@dataclass(frozen=True)
class DisparityMap:
    """Disparity of one view in pixels; a pixel at x is at x - values in the right view."""

    values: Array  # (H, W) float32, 0 where not known
    known: Array  # (H, W) bool


def read_disparity(
    path: StrPath, scale: float | None = None, *, truth: bool = True
) -> DisparityMap:
    """Read a file of disparity; infinite, NaN, zero and negative values are unknown.

    If all disparities are negative, their sign is flipped, since Scene Flow stores the disparities
    of one side negated.

    Args:
        path: .pfm of either byte order; .png with one channel; .npy, or .npz with the array
            `disparity` or one array only.
        scale: Divisor of stored values; None: 256 for a 16-bit PNG, as in KITTI, and 1 for
            floating-point numbers. Required for an 8-bit PNG.
        truth: True for ground truth. A prediction keeps negative values, and values that are not
            finite become 0.

    Raises:
        DataError: The file cannot be read, is damaged, or contains something else.
        OptionError: The scale is not positive.
    """
    path = Path(path)
    checks.above(0, scale=scale)
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise DataError(
            f"disparity is read from {', '.join(READ)}, got {path}; convert it to one of them"
        )
    values, own = _READERS[suffix](read_bytes(path), path)
    if scale is None and own is None:
        raise DataError(
            f"{path} is a PNG of 8 bits, whose values are disparities times a scale that it does "
            "not tell; pass the scale, in a data set as disparity_scale in meta.json"
        )
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, which is unknown
        stored = values.astype(np.float32)
    values = stored / np.float32(own if scale is None else scale)
    known = np.isfinite(values)
    if truth:
        known &= values != 0
        if known.any() and (values[known] < 0).all():
            values = -values
        known &= values > 0
    return DisparityMap(np.where(known, values, np.float32(0)), known)


def encode_disparity(values: Array, suffix: str) -> bytes:
    """Encode disparities in the format of a suffix.

    Values that are not finite are written as unknown: NaN in .npy, infinite in .pfm and 0 in .png.
    A PNG has 16 bits, the disparity times 256; its smallest known value is 1 / 256.

    Args:
        values: (H, W) pixels.
        suffix: .npy, .pfm or .png.

    Raises:
        OptionError: The values do not fit into the format.
    """
    values = np.asarray(values, np.float32)
    if values.ndim != 2 or values.size == 0:
        raise OptionError(
            f"disparity must be (height, width) to be written, got {values.shape}; pass one image's"
        )
    known = np.isfinite(values)
    if suffix == ".png":
        return _png(values, known)
    values = np.where(known, values, np.float32(np.nan if suffix == ".npy" else np.inf))
    if suffix == ".pfm":
        height, width = values.shape
        return f"Pf\n{width} {height}\n-1\n".encode() + values[::-1].astype("<f4").tobytes()
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def _read_pfm(content: bytes, path: Path) -> tuple[Array, float]:
    """Return the values, upper row first. The magnitude of the scale in the header is ignored."""
    header = _PFM.match(content)
    try:
        kind, *numbers = header.groups() if header else ()
        width, height, scale = int(numbers[0]), int(numbers[1]), float(numbers[2])
        if min(width, height) < 1 or not np.isfinite(scale):
            raise ValueError
    except (ValueError, IndexError):
        raise DataError(
            f"cannot read {path}: it does not start as a PFM file, with Pf, width, height and "
            "scale; get it again"
        ) from None
    if kind == b"PF":
        raise DataError(f"{path} has three channels, disparity has one; convert it")
    pixels, count = content[header.end() :] if header else b"", width * height
    if len(pixels) < 4 * count:
        raise DataError(
            f"{path} ends too early: {width}x{height} pixels take {4 * count} bytes, got "
            f"{len(pixels)}; get it again"
        )
    values = np.frombuffer(pixels, "<f4" if scale < 0 else ">f4", count)
    return values.reshape(height, width)[::-1], 1.0


def _read_png(content: bytes, path: Path) -> tuple[Array, float | None]:
    with opened(content, str(path)) as image:
        mode, values = image.mode, np.asarray(image)
    if mode.startswith("I"):
        return values, KITTI_SCALE
    if mode != "L":
        raise DataError(
            f"{path} must have one channel of 8 or 16 bits to be disparity, got mode {mode}; a "
            "picture of disparity in colours cannot be read back"
        )
    return values, None


def _read_npy(content: bytes, path: Path) -> tuple[Array, float]:
    advice = "it must hold one array, or one that is called disparity, and no Python objects"
    with reading(path, advice):
        values = np.load(io.BytesIO(content), allow_pickle=False)
        if not isinstance(values, np.ndarray):
            names = values.files
            values = values["disparity" if "disparity" in names or len(names) != 1 else names[0]]
    if values.ndim == 3 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 2 or values.size == 0 or values.dtype.kind not in "fiu":
        raise DataError(
            f"disparity must be numbers of shape (height, width), got {values.dtype} of shape "
            f"{values.shape} in {path}; write the file again"
        )
    return values, 1.0


def _png(values: Array, known: Array) -> bytes:
    steps = np.where(known, values, 0).astype(np.float64) * KITTI_SCALE
    if steps.max() > 65535.5 or steps.min() < 0:
        raise OptionError(
            f"a PNG of 16 bits holds disparities from 0 to {LARGEST:.2f} pixels, got "
            f"{steps.min() / KITTI_SCALE:.2f} to {steps.max() / KITTI_SCALE:.2f}; write .pfm or "
            ".npy instead"
        )
    steps = np.where(known, steps.round().clip(1, 65535), 0)
    file = io.BytesIO()
    Image.fromarray(steps.astype(np.uint16)).save(file, format="PNG")
    return file.getvalue()


_READERS: dict[str, Callable[[bytes, Path], tuple[Array, float | None]]] = {
    ".pfm": _read_pfm,
    ".png": _read_png,
    ".npy": _read_npy,
    ".npz": _read_npy,
}
