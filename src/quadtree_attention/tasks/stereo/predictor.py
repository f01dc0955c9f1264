# SPDX-License-Identifier: Apache-2.0
"""Left and right image in, disparity out, in three lines.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> from quadtree_attention.models import create, save_weights
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> kwargs = {"dims": [8, 8, 8, 8], "dim": 16, "num_layers": 1, "num_heads": 2}
    >>> model = create("sttr", **kwargs)
    >>> card = {"model": "sttr", "kwargs": kwargs, "task": "stereo"}
    >>> _ = save_weights(path, model.state_dict(), card)
    >>> found = StereoMatcher(path)(np.zeros((32, 60)), np.zeros((32, 60, 3)))
    >>> found.disparity.shape
    (32, 60)
"""

import os
import time
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.images import Array, ImageLike, to_image
from quadtree_attention.models.registry import load_with_card, weights_path
from quadtree_attention.models.stereo import STTR
from quadtree_attention.tasks.predictor import out_of_memory, usable_device
from quadtree_attention.tasks.stereo.checks import pair_warnings, result_warnings
from quadtree_attention.tasks.stereo.filling import fill_hidden
from quadtree_attention.tasks.stereo.formats import write_disparity
from quadtree_attention.viz.canvas import save_picture

SIZE = 800  # pixels of the longer side that pairs are matched at, at most: it was trained so wide
SMALL = 640  # below which pairs are enlarged: cells are of two pixels, and what is thin is lost
LARGEST_SCALE = 2.0  # by which they are; there is no more in an image then
LEAST_SIDE = 16  # pixels of the shorter side, below which there is nothing to compare


@dataclass(frozen=True, eq=False)
class Disparity:
    """How far to the left the right image shows what each pixel of the left image shows.

    Attributes:
        disparity: (H, W) float32, pixels of the images as they were given: what is at (x, y) on the
            left is at (x - disparity, y) on the right. Where the right image does not show it, what
            is behind is continued (`filling`).
        occlusion: (H, W) float32, the probability from 0 to 1 that the right image does not show
            it.
        seconds: What it took, reading aside.
        size: (width, height) that the pair was matched at.
        image: The left image, upright.
        warnings: Sentences about what looks wrong with the pair or the result.
    """

    disparity: Array
    occlusion: Array
    seconds: float = 0.0
    size: tuple[int, int] | None = None
    image: Image.Image | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = ()

    def depth(self, focal: float, baseline: float, *, offset: float = 0.0) -> Array:
        """(H, W) float32, the way from the camera along its axis, in the unit of `baseline`.

        It is baseline * focal / (disparity + offset), and infinite where that is not positive.

        Args:
            focal: Focal length of the rectified images as they were given, in pixels.
            baseline: Way from the left camera to the right one.
            offset: Pixels by which the right camera's centre is further right than the left one's
                (`doffs` of Middlebury).

        Raises:
            OptionError: A length is not positive, or the offset not finite.
        """
        check_cameras(focal, baseline, offset)
        apart = self.disparity.astype(np.float64) + offset
        far = np.full(apart.shape, np.inf)
        return np.divide(focal * baseline, apart, out=far, where=apart > 0).astype(np.float32)

    def draw(
        self, path: str | os.PathLike[str] | None = None, *, title: str | None = None
    ) -> Image.Image:
        """A picture of the disparities, beside the left image; see `draw.draw`.

        Args:
            path: File to write as well, all or nothing; its suffix tells the format.
            title: What to write above them; None tells their range.
        """
        from quadtree_attention.tasks.stereo.draw import draw

        picture = draw(self, title=title)
        if path is not None:
            save_picture(picture, path)
        return picture

    def draw_occlusion(self, path: str | os.PathLike[str] | None = None) -> Image.Image:
        """A grey picture of the size of the image, white where the right image does not show it."""
        from quadtree_attention.tasks.stereo.draw import draw_occlusion

        picture = draw_occlusion(self)
        if path is not None:
            save_picture(picture, path)
        return picture

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the disparities, all or nothing: .npy, .pfm, or .png (16 bits, times 256)."""
        write_disparity(path, self.disparity)


class StereoMatcher:
    """Finds the disparities of rectified pairs of any size and kind.

    Args:
        path: Weights with their card, as `quadtree train stereo` (`best.safetensors`) writes them;
            None takes those that come with the package.
        device: Where to run; None takes a GPU if there is one.
        size: Most pixels of the longer side that pairs are matched at, None means 800; pairs below
            640 are enlarged to it, at most twofold. Disparities are in pixels of the images as
            given all the same.
        max_disparity: Largest disparity to look for, in pixels of the images as given; None takes
            that of the weights, in pixels of what the network sees, mostly the whole width. A small
            one saves mistakes and memory.

    Raises:
        CheckpointError: The weights cannot be read, or are none of a stereo network.
        OptionError: An option has a value that is not accepted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device | None = None,
        size: int | None = None,
        max_disparity: float | None = None,
    ) -> None:
        size = SIZE if size is None else size
        if size < LEAST_SIDE:
            raise OptionError(
                f"size must be at least {LEAST_SIDE} pixels, got {size}; pass a larger one"
            )
        if max_disparity is not None and not 0 < max_disparity < np.inf:
            raise OptionError(
                f"max_disparity must be above 0 pixels, got {max_disparity}; pass a larger one, or "
                "leave it out"
            )
        self.size = size
        self.max_disparity = max_disparity
        self.device = usable_device(device)
        self.path = weights_path(path, "stereo")
        self.card, model = load_stereo(self.path)
        self.model = model.to(self.device).eval()

    @classmethod
    def from_pretrained(cls, name: str = "default", **options: Any) -> Self:
        """A stereo matcher with weights that come with the package; nothing is downloaded.

        Args:
            name: "default", the only one so far.
            **options: Those of `StereoMatcher`.

        Raises:
            OptionError: There are no weights of that name.
            CheckpointError: They were not installed.
        """
        return cls(weights_path(name, "stereo"), **options)

    def __call__(self, left: ImageLike, right: ImageLike) -> Disparity:
        """The disparities of a rectified pair.

        Args:
            left: A path, the bytes of a file, a PIL image, an array (H, W[, 3 or 4]) or a tensor
                (3, H, W); photos are turned as their EXIF tag says.
            right: Likewise, of the same size.

        Raises:
            DataError: A file cannot be read as an image, or the images are no pair.
            OptionError: There is too little memory.
        """
        images = to_image(left), to_image(right)
        check_pair(*images)
        began = time.perf_counter()
        warnings = pair_warnings(*images)
        width, height = images[0].size
        size = working_size(images[0].size, self.size)
        scale = width / size[0]
        if self.max_disparity is not None:
            if self.max_disparity > width:
                warnings += (
                    f"max_disparity is {self.max_disparity:g}, more than the width of the images; "
                    f"{width} was taken",
                )
            self.model.max_disparity = min(self.max_disparity, width) / scale
        found = self._found(*(_pixels(image, size).to(self.device) for image in images))
        disparity, occlusion = (resized(x, (height, width)).numpy() for x in found)
        disparity = (disparity * scale).clip(0, width)
        seconds = time.perf_counter() - began
        warnings += result_warnings(disparity, occlusion, scale=scale)
        return Disparity(disparity, occlusion, seconds, size, images[0], warnings)

    def _found(self, image0: Tensor, image1: Tensor) -> tuple[Tensor, Tensor]:
        """Disparity and occlusion (h, w) in pixels of what the network sees, on the CPU."""
        try:
            with torch.inference_mode():
                output = self.model({"image0": image0, "image1": image1})
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise OptionError(
                f"a pair of {image0.shape[-1]}x{image0.shape[-2]} pixels does not fit into the "
                f"memory of {self.device}; pass a smaller size, or another device"
            ) from error
        disparity, occlusion = (x[0].float().cpu() for x in (output.disparity, output.occlusion))
        filled = fill_hidden(disparity.numpy(), occlusion.numpy())
        return torch.from_numpy(filled), occlusion


def load_stereo(path: str | os.PathLike[str]) -> tuple[dict[str, Any], STTR]:
    """The card and the network of a file of weights, which may be stored in half precision."""
    card, model = load_with_card(path, task="stereo")
    return card, cast(STTR, model)


def check_cameras(focal: float, baseline: float, offset: float = 0.0) -> None:
    """Raises `OptionError` where these are of no cameras; see `Disparity.depth`."""
    for name, value in (("focal", focal), ("baseline", baseline)):
        if not 0 < value < np.inf:
            raise OptionError(f"{name} must be above 0, got {value}; pass that of the cameras")
    if not np.isfinite(offset):
        raise OptionError(f"offset must be finite, got {offset}; pass that of the cameras")


def check_pair(left: Image.Image, right: Image.Image) -> None:
    """Raises `DataError` where two images cannot be a rectified pair."""
    if left.size != right.size:
        sizes = f"{left.width}x{left.height} on the left, {right.width}x{right.height} on the right"
        raise DataError(
            f"the images of a pair must have the same size, got {sizes}; pass two that were "
            "rectified together"
        )
    if min(left.size) < LEAST_SIDE:
        raise DataError(
            f"the images of a pair must have at least {LEAST_SIDE} pixels a side, got "
            f"{left.width}x{left.height}; pass larger ones"
        )


def working_size(size: tuple[int, int], longer: int) -> tuple[int, int]:
    """Width and height with a longer side of at most `longer` pixels and a shorter of some."""
    scale = min(max(1.0, min(LARGEST_SCALE, SMALL / max(size))), longer / max(size))
    width, height = (max(LEAST_SIDE, round(side * scale)) for side in size)
    return width, height


def resized(values: Tensor, size: tuple[int, int]) -> Tensor:
    """A map (h, w) at (height, width): smooth surfaces stay smooth, edges stay edges.

    Between two surfaces there is nothing half as far, so what interpolation puts there is replaced
    by the nearest value.
    """
    if values.shape == size:
        return values
    maps = values[None, None]
    smooth = F.interpolate(maps, size=size, mode="bilinear", align_corners=False)
    nearest = F.interpolate(maps, size=size, mode="nearest-exact")
    return torch.where((smooth - nearest).abs() < 1.0, smooth, nearest)[0, 0]


def _pixels(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """(1, 3, H, W) between 0 and 1."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    pixels = np.asarray(image, np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()
