# SPDX-License-Identifier: Apache-2.0
"""Batches of rectified pairs with disparity: rendered on the device that trains, or from files."""

from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from quadtree_attention.checks import at_least, between
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.synthetic import StereoOptions, Textures, stereo_pairs
from quadtree_attention.tasks.contract import Source
from quadtree_attention.tasks.stereo.readers import StereoTruth, open_source
from quadtree_attention.tasks.training.data import (
    Batch,
    Sample,
    Split,
    SyntheticData,
    TaskData,
    options_of,
)

IMAGES = ("image0", "image1")
BETWEEN = 0.3  # share of the colour jitter by which the views of a pair differ


class SyntheticStereoData(SyntheticData):
    """Synthetic scenes seen by two cameras side by side; nothing is read but textures.

    Args:
        source: "synthetic".
        textures: Folder of photographs to cover surfaces with; None: procedural textures only.
        procedural: Procedural textures; 96 by default, but no more than photographs if those are
            there.
        height: Of the images.
        width: Of the images.
        pairs: Pairs of an epoch.
        val_pairs: Pairs to validate on, always the same.
        batch_size: Pairs of a batch on one process.
        scene: Options of the scenes (`StereoOptions`).
        texture_size: Pixels on a side of a texture.
        seed: Decides scenes and order.
    """

    def __init__(
        self,
        source: Literal["synthetic"] = "synthetic",
        textures: str | None = None,
        procedural: int | None = None,
        height: int = 384,
        width: int = 640,
        pairs: int = 4000,
        val_pairs: int = 200,
        batch_size: int = 4,
        scene: dict[str, Any] | None = None,
        texture_size: int = 320,
        seed: int = 0,
    ) -> None:
        super().__init__(
            textures=textures,
            procedural=procedural,
            texture_size=texture_size,
            size=(height, width),
            pairs=pairs,
            val_pairs=val_pairs,
            batch_size=batch_size,
            seed=seed,
        )
        self.scene: StereoOptions = options_of(StereoOptions, "scene", scene)

    def render(self, textures: Textures, indices: list[int], *, training: bool) -> Batch:
        """Rectified scenes, all of whose pixels are known."""
        made = self.seeded(training=training)
        pair = stereo_pairs(textures, indices, **made, options=self.scene)
        return {
            "image0": pair.image0,
            "image1": pair.image1,
            "disparity0": pair.disparity0,
            "known0": torch.ones_like(pair.occluded0),
            "occluded0": pair.occluded0,
            "visible0": ~pair.occluded0,
        }


class StereoData(TaskData):
    """Pairs with disparity from files, cropped for training, whole for validation.

    Args:
        source: "files".
        root: Folder of the pairs.
        layout: Of the folder: auto, folder, scenes, middlebury2014, kitti2015, kitti2012, sceneflow
            or torchvision:NAME (see `open_source`).
        val_root: Folder of the pairs to validate on; None: those below folders val, validation,
            test or testing of the root, which training does not see.
        height: Of training crops; smaller images are continued below.
        width: Of training crops; smaller images are continued to the right.
        batch_size: Training pairs of a batch on one process; validation takes one at a time.
        val_pairs: Most pairs to validate on, evenly spread over those there are.
        jitter: Strength of changes of brightness, contrast, colours and gamma in training, which
            differ a little between the views; 0 turns them off.
        flip: Share of training pairs turned upside down.
        workers: Processes that read files; None: one per core, 8 at most; 0: no other process.
        strict: Fail at the first unreadable file instead of counting and replacing its pair.
        seed: Decides order, crops and colours.
    """

    item = "pair"

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
        workers: int | None = None,
        strict: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, workers=workers, strict=strict, seed=seed)
        if root is None:
            raise OptionError(
                "pairs from files need a folder that holds them, got none; pass --data.root FOLDER"
            )
        at_least(1, height=height, width=width, val_pairs=val_pairs)
        between(0, 1, jitter=jitter, flip=flip)
        self.root = root
        self.layout = layout
        self.val_root = val_root
        self.size = (height, width)
        self.val_pairs = val_pairs
        self.jitter = jitter
        self.flip = flip
        self.eval_batch_size = 1

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

    def count(self, split: Split) -> int:
        there = len(self.source(split))
        return there if split == "train" else min(self.val_pairs, there)

    def place(self, split: Split, index: int) -> int:
        return index if split == "train" else index * len(self.source(split)) // self.count(split)

    def train_sample(self, images: Any, truth: StereoTruth) -> Sample:
        """A window of a pair, its colours changed."""
        sample = as_sample(images, truth)
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
        return as_sample(images, truth)

    def finish(self, batch: Batch, *, training: bool) -> Batch:
        """Images travel as bytes."""
        return batch | {name: batch[name].float() / 255 for name in IMAGES}


def as_sample(images: tuple[Image.Image, Image.Image], truth: StereoTruth) -> Sample:
    """Tensors of one pair, without the axis of a batch; images (3, H, W) in bytes."""
    return {
        "image0": _bytes(images[0]),
        "image1": _bytes(images[1]),
        "disparity0": torch.from_numpy(truth.disparity),
        "known0": torch.from_numpy(truth.known),
        "occluded0": torch.from_numpy(truth.occluded),
        "visible0": torch.from_numpy(truth.visible),
    }


def cropped(sample: Sample, top: int, left: int, size: tuple[int, int]) -> Sample:
    """The same window of both views, continued below and to the right where they end.

    Partners of pixels at the left edge are then outside of the right view.
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
    """Both views in other colours, mostly alike: the cameras of a rig differ a little."""
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


def _bytes(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
