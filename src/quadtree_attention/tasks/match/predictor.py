# SPDX-License-Identifier: Apache-2.0
"""Two images in, matches out, in three lines.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> from quadtree_attention.models.matcher import matcher
    >>> from quadtree_attention.models.weights import save_weights
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> kwargs = {"dims": [16, 24, 32], "num_pairs": 1, "num_heads": 2, "fine_heads": 2}
    >>> model = matcher("quadtree_small", **kwargs)
    >>> card = {"model": "quadtree_small", "kwargs": kwargs, "task": "match"}
    >>> _ = save_weights(path, model.state_dict(), card)
    >>> matches = Matcher(path)(np.zeros((70, 90)), np.zeros((64, 120, 3)))
    >>> matches.keypoints0.shape[1]
    2
"""

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.images import ImageLike, to_image
from quadtree_attention.models.convert import check_fit
from quadtree_attention.models.matcher import FeatureMatcher, matcher
from quadtree_attention.models.weights import read_card, read_checkpoint
from quadtree_attention.tasks.match.estimate import (
    Estimator,
    Homography,
    Pose,
    homography,
    relative_pose,
)
from quadtree_attention.tasks.match.metrics import Array

SIZE = 640  # pixels of the longer side that images are matched at


@dataclass(frozen=True)
class Matches:
    """Points of two images that show the same; row i of one belongs to row i of the other.

    Attributes:
        keypoints0: (N, 2) pixels (x, y) of image 0 as it was given, upright; the centre of the
            first pixel is (0, 0).
        keypoints1: (N, 2) pixels of image 1.
        confidence: (N,), from 0 to 1.
        seconds: What matching took, reading aside.
        images: The two images, upright.
    """

    keypoints0: Array
    keypoints1: Array
    confidence: Array
    seconds: float = field(default=0.0, compare=False)
    images: tuple[Image.Image, Image.Image] | None = field(default=None, repr=False, compare=False)

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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `keypoints0`, `keypoints1` and `confidence` as npz, all or nothing."""
        target = Path(path)
        unfinished = target.with_name(target.name + ".unfinished")
        try:
            with unfinished.open("wb") as file:
                np.savez(
                    file,
                    keypoints0=self.keypoints0,
                    keypoints1=self.keypoints1,
                    confidence=self.confidence,
                )
            unfinished.replace(target)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OptionError(
                f"{target} cannot be written: {error.strerror or error}; write elsewhere"
            ) from error


class Matcher:
    """Matches two images of any size and kind.

    Args:
        path: Weights with their card, as `quadtree train match` writes them (`best.safetensors`).
        device: Where to run; None takes a GPU if there is one.
        size: Pixels of the longer side that images are matched at; smaller images stay as they are.
        threshold: Least confidence of a match; None takes that of the model.

    Raises:
        CheckpointError: The weights cannot be read, or are none of a matcher.
        OptionError: An option has a value that is not accepted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
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
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.card, model = load_matcher(path)
        if threshold is not None:
            model.coarse_matching.threshold = threshold
        self.model = model.to(self.device).eval()

    def __call__(self, image0: ImageLike, image1: ImageLike) -> Matches:
        """The matches of two images.

        Args:
            image0: A path, the bytes of a file, a PIL image, an array (H, W[, 3 or 4]) or a tensor
                (3, H, W); photos are turned as their EXIF tag says.
            image1: Likewise, of any other size.

        Raises:
            DataError: A file cannot be read as an image.
        """
        images = (to_image(image0), to_image(image1))
        began = time.perf_counter()
        small = [shrunk(image, self.size) for image in images]
        data = {f"image{i}": _grey(image).to(self.device) for i, image in enumerate(small)}
        with torch.inference_mode():
            found = self.model(data)
        points0, points1 = (
            _to_original(found[f"keypoints{i}"], small[i].size, images[i].size) for i in range(2)
        )
        confidence = found["confidence"].float().cpu().numpy()
        return Matches(points0, points1, confidence, time.perf_counter() - began, images)


def load_matcher(path: str | os.PathLike[str]) -> tuple[dict[str, Any], FeatureMatcher]:
    """The card and the matcher of a file of weights, which may be stored in half precision."""
    card = read_card(path)
    if (task := card.get("task", "match")) != "match":
        raise CheckpointError(f"{path} are weights for the task {task}, not for match")
    model = matcher(card["model"], **card["kwargs"])
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in read_checkpoint(path).items()
    }
    check_fit(model, tensors)
    model.load_state_dict(tensors)
    return card, model


def shrunk(image: Image.Image, size: int) -> Image.Image:
    """The image with a longer side of `size` pixels, unless it is smaller."""
    longer = max(image.size)
    if longer <= size:
        return image
    width, height = (max(1, round(side * size / longer)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)


def _grey(image: Image.Image) -> Tensor:
    """(1, 1, H, W) between 0 and 1."""
    pixels = np.asarray(image.convert("L"), np.float32) / 255
    return torch.from_numpy(pixels)[None, None]


def _to_original(points: Tensor, small: tuple[int, int], original: tuple[int, int]) -> Array:
    """Pixels of the image as given; edges of the two images, not centres of pixels, coincide."""
    scale = np.array([original[0] / small[0], original[1] / small[1]])
    return (points.double().cpu().numpy() + 0.5) * scale - 0.5
