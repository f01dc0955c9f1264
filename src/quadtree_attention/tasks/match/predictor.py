# SPDX-License-Identifier: Apache-2.0
"""Two images in, matches out, in three lines.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> from quadtree_attention.models import create, save_weights
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> kwargs = {"dims": [16, 24, 32], "num_pairs": 1, "num_heads": 2, "fine_heads": 2}
    >>> model = create("loftr_quadtree_small", **kwargs)
    >>> card = {"model": "loftr_quadtree_small", "kwargs": kwargs, "task": "match"}
    >>> _ = save_weights(path, model.state_dict(), card)
    >>> matches = Matcher(path)(np.zeros((70, 90)), np.zeros((64, 120, 3)))
    >>> matches.keypoints0.shape[1]
    2
"""

import io
import os
import time
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import write_whole
from quadtree_attention.images import ImageLike, to_image
from quadtree_attention.models.matcher import LoFTR
from quadtree_attention.models.registry import load_with_card, weights_path
from quadtree_attention.tasks.match.estimate import (
    Estimator,
    Homography,
    Pose,
    homography,
    relative_pose,
)
from quadtree_attention.tasks.match.metrics import Array
from quadtree_attention.tasks.predictor import out_of_memory, usable_device
from quadtree_attention.viz.canvas import save_picture

SIZE = 640  # pixels of the longer side that images are matched at
LEAST = 0.25  # of that for the shorter side of long images, which else are nothing but borders
MOST_PIXELS = 2  # of an image that is matched, over those of a square of that size


@dataclass(frozen=True, eq=False)
class Matches:
    """Points of two images that show the same; row i of one belongs to row i of the other.

    Attributes:
        keypoints0: (N, 2) pixels (x, y) of image 0 as it was given, upright; the centre of the
            first pixel is (0, 0).
        keypoints1: (N, 2) pixels of image 1.
        confidence: (N,), from 0 to 1.
        seconds: What matching took, reading aside.
        images: The two images, upright.
        sizes: (width, height) that they were matched at.
    """

    keypoints0: Array
    keypoints1: Array
    confidence: Array
    seconds: float = 0.0
    images: tuple[Image.Image, Image.Image] | None = field(default=None, repr=False)
    sizes: tuple[tuple[int, int], tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self.confidence)

    def best(self, count: int) -> "Matches":
        """The `count` most confident ones, best first."""
        order = np.argsort(-self.confidence, kind="stable")[:count]
        return replace(
            self,
            keypoints0=self.keypoints0[order],
            keypoints1=self.keypoints1[order],
            confidence=self.confidence[order],
        )

    def homography(self, estimator: Estimator = "poselib", **options: Any) -> Homography | None:
        """The homography from image 0 to image 1, or None; see `estimate.homography`."""
        return homography(self.keypoints0, self.keypoints1, estimator=estimator, **options)

    def relative_pose(
        self, K0: Array, K1: Array, estimator: Estimator = "poselib", **options: Any
    ) -> Pose | None:
        """The motion from camera 0 to camera 1, or None; see `estimate.relative_pose`."""
        points = self.keypoints0, self.keypoints1
        return relative_pose(*points, K0, K1, estimator=estimator, **options)

    def draw(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        images: tuple[ImageLike, ImageLike] | None = None,
        max_lines: int | None = None,
        title: str | None = None,
    ) -> Image.Image:
        """A picture of the matches, coloured by confidence; see `draw.draw`.

        Args:
            path: File to write as well, all or nothing; its suffix tells the format.
            images: The two images, where the matches do not have them (as after `load`).
            max_lines: Matches to show at most, spread evenly.
            title: What to write above them; None counts them.
        """
        from quadtree_attention.tasks.match.draw import MAX_LINES, draw

        limit = MAX_LINES if max_lines is None else max_lines
        picture = draw(self, images=images, max_lines=limit, title=title)
        if path is not None:
            save_picture(picture, path)
        return picture

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `keypoints0`, `keypoints1` and `confidence` as npz, all or nothing."""
        content = io.BytesIO()
        np.savez(
            content,
            keypoints0=self.keypoints0,
            keypoints1=self.keypoints1,
            confidence=self.confidence,
        )
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The matches of a file from `save`, or from anyone who writes the same three arrays.

        Raises:
            DataError: The file cannot be read, or does not hold matches.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = [stored[name] for name in ("keypoints0", "keypoints1", "confidence")]
        except FileNotFoundError as error:
            raise DataError(f"there is no file {str(path)!r}; check the path") from error
        except KeyError as error:
            raise DataError(f"{path} holds no matches: {error.args[0]}; match again") from error
        except Exception as error:  # damaged files fail in every possible way
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"cannot read {path}: {reason}; match again") from error
        points0, points1, confidence = arrays
        count = confidence.size
        numbers = all(array.dtype.kind in "fiu" for array in arrays)
        shapes = points0.shape, points1.shape, confidence.shape
        if not numbers or shapes != ((count, 2), (count, 2), (count,)):
            raise DataError(
                f"{path} must hold keypoints0 and keypoints1 (N, 2) and confidence (N,), got "
                f"{', '.join(map(str, shapes))} of {', '.join(str(a.dtype) for a in arrays)}; "
                "match again"
            )
        return cls(points0, points1, confidence)


class Matcher:
    """Matches two images of any size and kind.

    Args:
        path: Weights with their card, as `quadtree train match` (`best.safetensors`) and `quadtree
            convert` write them; None takes those that come with the package.
        device: Where to run; None takes a GPU if there is one.
        size: Pixels of the longer side that images are matched at; smaller images stay as they are,
            and very long ones keep more, so that their shorter side does not vanish.
        threshold: Least confidence of a match; None takes that of the model.

    Raises:
        CheckpointError: The weights cannot be read, or are none of a matcher.
        OptionError: An option has a value that is not accepted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device | None = None,
        size: int = SIZE,
        threshold: float | None = None,
    ) -> None:
        if size < 16:
            raise OptionError(f"size must be at least 16 pixels, got {size}; pass a larger one")
        if threshold is not None and not 0 <= threshold < 1:
            raise OptionError(f"threshold must be from 0 to below 1, got {threshold}; pass such")
        self.size = size
        self.device = usable_device(device)
        self.path = weights_path(path, "match")
        self.card, model = load_matcher(self.path)
        if threshold is not None:
            model.coarse_matching.threshold = threshold
        self.model = model.to(self.device).eval()

    @classmethod
    def from_pretrained(cls, name: str = "default", **options: Any) -> Self:
        """A matcher with weights that come with the package; nothing is downloaded.

        Args:
            name: "default", the only one so far.
            **options: Those of `Matcher`.

        Raises:
            OptionError: There are no weights of that name.
            CheckpointError: They were not installed.
        """
        return cls(weights_path(name, "match"), **options)

    def __call__(self, image0: ImageLike, image1: ImageLike) -> Matches:
        """The matches of two images.

        Args:
            image0: A path, the bytes of a file, a PIL image, an array (H, W[, 3 or 4]) or a tensor
                (3, H, W); photos are turned as their EXIF tag says.
            image1: Likewise, of any other size.

        Raises:
            DataError: A file cannot be read as an image.
            OptionError: There is too little memory.
        """
        images = (to_image(image0), to_image(image1))
        began = time.perf_counter()
        small = (shrunk(images[0], self.size), shrunk(images[1], self.size))
        found = self._found(*small)
        points0, points1 = (
            _to_original(found[f"keypoints{i}"], small[i].size, images[i].size) for i in range(2)
        )
        confidence = found["confidence"].float().cpu().numpy()
        seconds = time.perf_counter() - began
        sizes = small[0].size, small[1].size
        return Matches(points0, points1, confidence, seconds, images, sizes)

    def _found(self, image0: Image.Image, image1: Image.Image) -> dict[str, Tensor]:
        data = {"image0": _grey(image0).to(self.device), "image1": _grey(image1).to(self.device)}
        try:
            with torch.inference_mode():
                return self.model(data)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise OptionError(
                f"images of {image0.size} and {image1.size} pixels do not fit into the memory of "
                f"{self.device}; pass a smaller size, or another device"
            ) from error


def load_matcher(path: str | os.PathLike[str]) -> tuple[dict[str, Any], LoFTR]:
    """The card and the matcher of a file of weights, which may be stored in half precision."""
    card, model = load_with_card(path, task="match")
    return card, cast(LoFTR, model)


def shrunk(image: Image.Image, size: int) -> Image.Image:
    """The image with a longer side of `size` pixels, unless it is smaller.

    Of an image that is more than four times as long as wide the shorter side gets `LEAST` * size
    pixels, as far as the image then has no more than `MOST_PIXELS` * size * size.
    """
    longer, shorter = max(image.size), min(image.size)
    scale = max(size / longer, LEAST * size / shorter)
    scale = min(scale, (MOST_PIXELS * size * size / (longer * shorter)) ** 0.5)
    if longer <= size or scale >= 1:
        return image
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)


def _grey(image: Image.Image) -> Tensor:
    """(1, 1, H, W) between 0 and 1."""
    pixels = np.asarray(image.convert("L"), np.float32) / 255
    return torch.from_numpy(pixels)[None, None]


def _to_original(points: Tensor, small: tuple[int, int], original: tuple[int, int]) -> Array:
    """Pixels of the image as given; edges of the two images, not centres of pixels, coincide."""
    scale = np.array([original[0] / small[0], original[1] / small[1]])
    return (points.double().cpu().numpy() + 0.5) * scale - 0.5
