# SPDX-License-Identifier: Apache-2.0
"""Batches of rectified pairs with disparity: rendered on the training device, or from files."""

from typing import Any, Literal

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from quadtree_attention.checks import at_least, between
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.synthetic import StereoOptions, Textures, stereo_pairs
from quadtree_attention.tasks.contract import Source
from quadtree_attention.tasks.stereo.readers import StereoTruth, open_source
from quadtree_attention.tasks.training import data
from quadtree_attention.tasks.training.data import Batch, Sample, Split

IMAGES = ("image0", "image1")
BETWEEN = 0.3  # share of the colour jitter that differs between the views of a pair


class SyntheticStereoData(data.SyntheticData):
    """Rectified pairs of synthetic scenes; only textures are read from files.

    Args:
        source: "synthetic".
        height: Height of the images in pixels.
        width: Width of the images in pixels.
        scene: Options of the scenes (`StereoOptions`).
        **common: Arguments of `SyntheticData`.
    """

    def __init__(
        self,
        source: Literal["synthetic"] = "synthetic",
        height: int = 384,
        width: int = 640,
        scene: dict[str, Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(size=(height, width), **common)
        self.scene: StereoOptions = data.options_of(StereoOptions, "scene", scene)

    def render(self, textures: Textures, indices: list[int], *, training: bool) -> Batch:
        """Render rectified pairs; the disparity of every pixel is known."""
        pair = stereo_pairs(textures, indices, options=self.scene, **self.seeded(training=training))
        names = (*IMAGES, "disparity0", "occluded0")
        known = {"known0": torch.ones_like(pair.occluded0), "visible0": ~pair.occluded0}
        return {name: getattr(pair, name) for name in names} | known


class StereoData(data.TaskData):
    """Pairs with disparity from files, cropped for training, whole for validation.

    Args:
        source: "files".
        root: Folder of the pairs.
        layout: Of the folder: auto, folder, scenes, middlebury2014, kitti2015, kitti2012, sceneflow
            or torchvision:NAME (see `open_source`).
        val_root: Folder of the validation pairs; None: pairs below folders val, validation, test
            or testing of the root, which training does not use.
        height: Height of training crops; smaller images are padded at the bottom.
        width: Width of training crops; smaller images are padded on the right.
        batch_size: Training batch size per process; validation has batch size 1.
        val_pairs: Maximum number of validation pairs, evenly spread over all pairs.
        jitter: Strength of changes of brightness, contrast, colours and gamma in training, slightly
            different for the two views; 0: none.
        flip: Share of training pairs flipped vertically.
        **common: Arguments of `TaskData`.
    """

    item = "pair"
    floats = IMAGES

    def __init__(
        self,
        source: Literal["files"] = "files",
        root: str | None = None,
        layout: str = "auto",
        val_root: str | None = None,
        height: int = 360,
        width: int = 640,
        batch_size: int = 4,
        val_pairs: int = 200,
        jitter: float = 0.4,
        flip: float = 0.3,
        **common: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **common)
        if root is None:
            raise OptionError(
                "pairs from files need a folder that holds them, got none; pass --data.root FOLDER"
            )
        at_least(1, height=height, width=width, val_pairs=val_pairs)
        between(0, 1, jitter=jitter, flip=flip)
        self.root, self.val_root, self.layout = root, val_root, layout
        self.size, self.val_pairs, self.eval_batch_size = (height, width), val_pairs, 1
        self.jitter, self.flip = jitter, flip

    def open(self, split: Split) -> Source[StereoTruth]:
        options: dict[str, Any] = {"layout": self.layout, "strict": self.strict}
        if split == "val" and self.val_root is not None:
            return open_source(self.val_root, **options)
        try:
            return open_source(self.root, split=split, **options)
        except DataError as error:
            if split == "train":
                raise
            raise DataError(f"{error}; pass pairs to validate on with --data.val_root") from error

    def train_sample(self, images: Any, truth: StereoTruth) -> Sample:
        """Return a crop of a pair with colour jitter."""
        sample = self.val_sample(images, truth)
        known = sample["known0"].shape
        room = (max(0, have - want) for have, want in zip(known, self.size, strict=True))
        top, left = (int(torch.randint(spare + 1, ())) for spare in room)
        sample = cropped(sample, top, left, self.size)
        if torch.rand(()) < self.flip:
            sample = {name: value.flip(-2) for name, value in sample.items()}
        if self.jitter > 0:
            sample |= _recoloured(sample["image0"], sample["image1"], self.jitter)
        return sample

    def val_sample(self, images: Any, truth: StereoTruth) -> Sample:
        """Return the tensors of one pair; images (3, H, W) uint8."""
        sample = dict(zip(IMAGES, map(TF.pil_to_tensor, images), strict=True))
        return sample | {f"{k}0": torch.from_numpy(array) for k, array in vars(truth).items()}


def cropped(sample: Sample, top: int, left: int, size: tuple[int, int]) -> Sample:
    """Crop both views to the same window, padded at the bottom and right.

    Corresponding points of pixels at the left edge are then outside of the right view.
    """
    rows, columns = torch.arange(top, top + size[0]), torch.arange(left, left + size[1])
    height, width = sample["known0"].shape
    at = rows.clamp(max=height - 1)[:, None], columns.clamp(max=width - 1)
    window = {name: value[..., *at] for name, value in sample.items()}
    there = (rows < height)[:, None] & (columns < width)
    known = window["known0"] & there
    disparity = window["disparity0"] * known
    outside = known & (columns - left < disparity)
    return window | {
        "disparity0": disparity,
        "known0": known,
        "occluded0": window["occluded0"] & there | outside,
        "visible0": window["visible0"] & there & ~outside,
    }


def _recoloured(image0: Tensor, image1: Tensor, strength: float) -> Batch:
    """Apply colour jitter to both views, with a small difference, as between cameras of a rig."""
    shared = torch.rand(4) * 2 - 1
    changed = []
    for image in (image0, image1):
        change = shared + (torch.rand(4) * 2 - 1) * BETWEEN
        light, contrast, colour, gamma = torch.exp2(change * strength).tolist()
        image = TF.adjust_brightness(image, light)
        image = TF.adjust_contrast(image, contrast)
        image = TF.adjust_saturation(image, colour)
        changed.append(TF.adjust_gamma(image, gamma))
    return dict(zip(IMAGES, changed, strict=True))
