# SPDX-License-Identifier: Apache-2.0
"""Conversion of paths, bytes, arrays and tensors to upright RGB images."""

import io
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from quadtree_attention.errors import (
    DataError,
    DTypeError,
    MissingDependencyError,
    QuadtreeAttentionError,
    ShapeError,
)

try:
    from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"reading images needs pillow, got {error}; pip install 'quadtree-attention[models]'"
    ) from error

Array: TypeAlias = np.ndarray[Any, Any]
ImageLike: TypeAlias = str | os.PathLike[str] | bytes | Image.Image | Array | Tensor
SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
CHANNELS = (1, 3, 4)  # grey, RGB, RGBA


def to_image(image: ImageLike) -> Image.Image:
    """Returns an upright 8-bit RGB image of a path, bytes, a PIL image, an array or a tensor.

    Raises:
        DataError: A file cannot be read as an image.
        ShapeError: The shape of an array or tensor is not an image's.
        DTypeError: Its dtype is not supported.
    """
    if isinstance(image, str | os.PathLike):
        return decode(read_bytes(image), str(image))
    if isinstance(image, bytes):
        return decode(image, f"the {len(image)} bytes")
    if isinstance(image, Image.Image):
        with _failures_named(getattr(image, "filename", "") or "the image"):
            return _rgb(ImageOps.exif_transpose(image))
    if isinstance(image, Tensor):
        return _rgb(Image.fromarray(_pixels(_channels_last(image), "(3, H, W)", image.shape)))
    if isinstance(image, np.ndarray):
        return _rgb(Image.fromarray(_pixels(image, "(H, W), (H, W, 3) or (H, W, 4)", image.shape)))
    raise DTypeError(
        "an image must be a path, bytes, a PIL image, an array or a tensor, got "
        f"{type(image).__name__}; pass one of them, or a list of them"
    )


def image_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Returns width and height of an image file, upright; only its header is read.

    Raises:
        DataError: The file cannot be read as an image.
    """
    with opened(read_bytes(path), str(path)) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


def images_inside(folder: Path) -> list[str]:
    """Returns the sorted names of the images in a folder, without subfolders.

    Raises:
        DataError: There are no images, or the folder cannot be read.
    """
    try:
        inside = sorted(str(p) for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise DataError(f"cannot look into the folder {folder}: {error.strerror}") from error
    if not inside:
        raise DataError(
            f"there are no images in the folder {folder}: names must end in "
            f"{', '.join(sorted(SUFFIXES))}; folders inside it are not searched"
        )
    return inside


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a file; raises a `DataError` with its path."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}; check the path") from error


def decode(data: bytes, name: str) -> Image.Image:
    """Returns an upright RGB image from the bytes of a file; `name` is for messages."""
    with opened(data, name) as image:
        return _rgb(ImageOps.exif_transpose(image))


@contextmanager
def opened(data: bytes, name: str) -> Iterator[Image.Image]:
    """Decodes the bytes of a file without conversion; errors become a `DataError`."""
    if not data:
        raise DataError(f"cannot decode {name}: it is empty; get it again")
    with _failures_named(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large images and damaged tags, which are harmless
        with Image.open(io.BytesIO(data)) as image:
            yield image


@contextmanager
def _failures_named(name: str) -> Iterator[None]:
    """Turns errors of a decoder into a `DataError` with the name of the image."""
    try:
        yield
    except QuadtreeAttentionError as error:
        raise type(error)(f"{name}: {error}") from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"cannot decode {name}: it is not an image, or its format is not supported by Pillow; "
            "save it as PNG or JPEG"
        ) from error
    except Image.DecompressionBombError as error:
        raise DataError(f"cannot decode {name}: {error}; make it smaller first") from error
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"cannot decode {name}: {reason}; the file is damaged, get it again"
        ) from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow would clip values above 255
        values = np.asarray(image).clip(0, 2**16 - 1).astype(np.uint16)
        return Image.fromarray(_pixels(values, "(H, W)", values.shape)).convert("RGB")
    if image.mode == "F":
        values = np.asarray(image)
        return Image.fromarray(_pixels(values, "(H, W)", values.shape)).convert("RGB")
    if image.has_transparency_data:
        # The colour of transparent pixels is invisible and often noise
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _channels_last(image: Tensor) -> Array:
    image = image.detach().cpu()
    if image.is_floating_point():
        image = image.float()  # numpy has no bfloat16
    return (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()


def _pixels(values: Array, accepted: str, shape: Iterable[int]) -> Array:
    """Converts an image to uint8, (H, W) or (H, W, 3 or 4)."""
    colours = values.ndim == 3 and values.shape[2] in CHANNELS
    if not (values.ndim == 2 or colours) or values.size == 0:
        raise ShapeError(f"an image must be {accepted}, got {tuple(shape)}; move its axes")
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if values.dtype == np.uint16:
        return (values / 257).round().astype(np.uint8)
    if values.dtype.kind != "f":
        raise DTypeError(
            f"an image must be uint8, uint16 or float, got {values.dtype}; convert it to one"
        )
    low, high = float(values.min()), float(values.max())
    if not (low >= -1e-3 and high <= 1 + 1e-3):  # resizing may overshoot a little; NaN fails
        raise DataError(
            f"an image of floats must lie between 0 and 1, got {low:g} to {high:g}; divide by 255, "
            "and leave normalising to the model"
        )
    return (values.clip(0, 1) * 255).round().astype(np.uint8)
