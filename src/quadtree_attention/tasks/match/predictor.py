# SPDX-License-Identifier: Apache-2.0
"""Predictor of matches between two images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.images import Array, ImageLike, to_image
from quadtree_attention.tasks.contract import Prepared
from quadtree_attention.tasks.match import TASK
from quadtree_attention.tasks.match.guided import GUIDED, Found, Guide, Guided, View, stacked
from quadtree_attention.tasks.match.result import Matches
from quadtree_attention.tasks.predictor import Predictor

SIZE = 640  # default longer side of images in pixels
SMALLEST = 16  # minimum of `size`
LEAST = 0.25  # minimum shorter side of long images over `size`, since borders have no matches
MOST_PIXELS = 2  # maximum number of pixels of a resized image, over size * size


@dataclass(frozen=True)
class Preprocess:
    """Reduction of images to a longer side of `size` pixels, in grey; see `shrunk`."""

    size: int

    def __call__(self, image0: ImageLike, image1: ImageLike) -> Prepared:
        images = to_image(image0), to_image(image1)
        grey = (shrunk(image, self.size).convert("L") for image in images)
        pixels = (np.asarray(image, np.float32)[None] / 255 for image in grey)
        inputs = tuple(map(torch.from_numpy, pixels))
        flat = [i for i, values in enumerate(inputs) if _is_flat(values)]
        return Prepared(
            images,
            inputs,
            key=tuple(values.shape for values in inputs),
            warnings=tuple(f"image {i} has one grey value only: nothing can match" for i in flat),
        )


class Matcher(Predictor[Matches]):
    """Predictor of corresponding points of two images of any size.

    Images are resized to a longer side of `size` pixels, 640 by default. Smaller images are not
    enlarged, and very long images are reduced less, to keep a usable shorter side.

    Args:
        network: The network.
        card: Its card.
        size: Pixels of the longer side, at least 16.
        threshold: Minimum confidence of a match; None: default of the network.
        top: Maximum number of matches, the most confident first; None: all.
        guided: Alignment of images with a large relative rotation or scale, which are then matched
            again. "auto": if the first pass has few inliers, a rotation above 40 degrees or a scale
            above 1.5; "always"; or "never".
        **common: Arguments of `Predictor`.

    Raises:
        OptionError: An option has a value that is not accepted.

    Example:
        >>> import numpy as np
        >>> image = np.random.default_rng(0).integers(0, 256, (48, 64), dtype=np.uint8)
        >>> matches = Matcher.from_pretrained(size=64)(image, image)
        >>> matches.keypoints0.shape == (len(matches.confidence), 2)
        True
    """

    task = TASK

    def __init__(
        self,
        network: nn.Module,
        card: dict[str, Any],
        *,
        size: int | None = None,
        threshold: float | None = None,
        top: int | None = None,
        guided: Guided = "auto",
        **common: Any,
    ) -> None:
        checks.count(SMALLEST, size=size)
        checks.count(1, top=top)
        checks.at_least(0, threshold=threshold)
        if threshold is not None and threshold >= 1:
            raise OptionError(f"threshold must be in [0, 1), got {threshold}")
        checks.one_of(GUIDED, guided=guided)
        own: dict[str, Any] = {"threshold": threshold, "top": top, "guided": guided}
        super().__init__(network, card, size=size, **own, **common)
        self.threshold = threshold
        self.top = top
        self.preprocess = Preprocess(SIZE if size is None else size)
        self.guide: Guide | None = None
        if guided != "never":
            self.guide = Guide(self._match_views, self.preprocess.size, always=guided == "always")

    def forward(self, batch: Sequence[Prepared]) -> list[dict[str, Tensor]]:
        image0, image1 = self.stack(batch)
        found = self.network({"image0": image0, "image1": image1}, threshold=self.threshold)
        return _by_pair(found, len(batch))

    def finish(self, raw: dict[str, Tensor], item: Prepared) -> Matches:
        flat = any(map(_is_flat, item.inputs))
        if flat:  # the feature maps show only the borders of the image
            raw = {name: values[:0] for name, values in raw.items()}
        points: list[Array] = []  # edges of image and input coincide, not pixel centres
        for i, (image, seen) in enumerate(zip(item.images, item.inputs, strict=True)):
            scale = np.array([image.width / seen.shape[-1], image.height / seen.shape[-2]])
            points.append((raw[f"keypoints{i}"].double().numpy() + 0.5) * scale - 0.5)
        points0, points1 = points
        matches = Matches(points0, points1, raw["confidence"].float().numpy())
        if self.guide is not None and not flat:
            better = self.guide(item.images, (points0, points1, matches.confidence))
            if better is not None:
                matches = Matches(*better[0], seen=better[1])
        return matches if self.top is None else matches.best(self.top)

    def _match_views(self, view0: View, views1: Sequence[View]) -> list[Found]:
        """Match a view of image 0 with each of several views of image 1."""
        network: Any = self.network
        with self._precision():
            maps0, maps1 = (
                network.maps(pixels.to(self.device), mask if mask is None else mask.to(self.device))
                for pixels, mask in (stacked([view0]), stacked(views1))
            )
            if len(views1) > 1:  # run the CNN once for image 0
                parts = {name: getattr(maps0, name) for name in ("coarse", "fine", "mask")}
                several = {
                    name: part.expand(len(views1), *part.shape[1:])
                    for name, part in parts.items()
                    if part is not None
                }
                maps0 = replace(maps0, **several)
            found = network.pair(maps0, maps1, threshold=self.threshold)
        return [
            (
                one["keypoints0"].double().numpy(),
                one["keypoints1"].double().numpy(),
                one["confidence"].float().numpy(),
            )
            for one in _by_pair(found, len(views1))
        ]


def _by_pair(found: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Split the matches of a batch by pair, on the CPU."""
    arrays = {name: values.cpu() for name, values in found.items()}
    pair = arrays.pop("batch_indexes")
    return [{name: values[pair == i] for name, values in arrays.items()} for i in range(count)]


def shrunk(image: Image.Image, size: int) -> Image.Image:
    """Reduce an image to a longer side of `size` pixels; smaller images are unchanged.

    With an aspect ratio above four, the shorter side becomes `LEAST` * size pixels instead, if the
    image then has at most `MOST_PIXELS` * size * size pixels.
    """
    longer, shorter = max(image.size), min(image.size)
    scale = max(size / longer, LEAST * size / shorter)
    scale = min(scale, (MOST_PIXELS * size * size / (longer * shorter)) ** 0.5)
    if longer <= size or scale >= 1:
        return image
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)


def _is_flat(pixels: Tensor) -> bool:
    """Return True if all pixels have the same value."""
    return bool(pixels.min() == pixels.max())
