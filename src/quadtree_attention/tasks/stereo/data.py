# SPDX-License-Identifier: Apache-2.0
"""Batches of rectified pairs with disparity: rendered on the device that trains, or from files."""

import os
import sys
from functools import partial
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from quadtree_attention.checks import at_least
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.synthetic import StereoOptions, Textures, stereo_pairs
from quadtree_attention.tasks.match.posed import collate
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.stereo.sources import (
    Split,
    StereoSample,
    StereoSource,
    open_stereo,
)
from quadtree_attention.tasks.training.data import SyntheticData, options_of
from quadtree_attention.tasks.training.loader import (
    EpochSampler,
    ResumableLoader,
    loader_of,
    sampler_of,
)

Batch = dict[str, Any]
IMAGES = ("image0", "image1")
BETWEEN = 0.3  # share of the colour jitter by which the views of a pair differ
ATTEMPTS = 20  # pairs tried in the place of one that cannot be read


class StereoData(SyntheticData):
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


class FilesStereoData(pl.LightningDataModule):
    """Pairs with disparity from files, cropped for training, whole for validation.

    Args:
        source: "files".
        root: Folder of the pairs.
        layout: Of the folder: auto, folder, scenes, middlebury2014, kitti2015, kitti2012, sceneflow
            or torchvision:NAME (see `open_stereo`).
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
        super().__init__()
        if root is None:
            raise OptionError(
                "pairs from files need a folder that holds them, got none; pass --data.root FOLDER"
            )
        at_least(1, height=height, width=width, batch_size=batch_size, val_pairs=val_pairs)
        if workers is not None and workers < 0:
            raise OptionError(f"workers must be at least 0, got {workers}; pass more")
        for name, value in (("jitter", jitter), ("flip", flip)):
            if not 0 <= value <= 1:
                raise OptionError(f"{name} must be between 0 and 1, got {value}; pass such")
        self.root = root
        self.layout = layout
        self.val_root = val_root
        self.size = (height, width)
        self.batch_size = batch_size
        self.val_pairs = val_pairs
        self.jitter = jitter
        self.flip = flip
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.strict = strict
        self.seed = seed
        self._sources: dict[Split, StereoSource] = {}

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one process."""
        return len(self._train_sampler()) // self.batch_size

    def setup(self, stage: str | None = None) -> None:
        if self._sources:
            return
        train = self._open(self.root, "train")
        if self.val_root is not None:
            val = self._open(self.val_root, None)
        else:
            try:
                val = self._open(self.root, "val")
            except DataError as error:
                raise DataError(
                    f"{error}; pass pairs to validate on with --data.val_root"
                ) from error
        self._sources = {"train": train, "val": val}

    def train_dataloader(self) -> ResumableLoader:
        read = partial(
            _read_crop, self._sources["train"], self.size, self.jitter, self.flip, self.strict
        )
        return loader_of(self, self._train_sampler(), read, collate, what="pairs")

    def val_dataloader(self) -> ResumableLoader:
        source = self._sources["val"]
        count = min(self.val_pairs, len(source))
        sampler = sampler_of(self, count, 1, shuffle=False)
        return loader_of(self, sampler, partial(_read_whole, source, count, self.strict), collate)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Images travel as bytes."""
        return batch | {name: batch[name].float() / 255 for name in IMAGES}

    def _open(self, root: str, split: Split | None) -> StereoSource:
        source = open_stereo(root, self.layout, split=split, strict=self.strict)
        if source.skipped:
            print(
                f"quadtree: {root}: skipped {len(source.skipped)} pairs: {summary(source.skipped)}",
                file=sys.stderr,
            )
        return source

    def _train_sampler(self) -> EpochSampler:
        return sampler_of(self, len(self._sources["train"]), self.batch_size, shuffle=True)


def as_batch(sample: StereoSample) -> Batch:
    """Tensors of one pair, without the axis of a batch; images (3, H, W) in bytes."""
    return {
        "image0": _bytes(sample.left),
        "image1": _bytes(sample.right),
        "disparity0": torch.from_numpy(sample.disparity),
        "known0": torch.from_numpy(sample.known),
        "occluded0": torch.from_numpy(sample.occluded),
        "visible0": torch.from_numpy(sample.visible),
    }


def cropped(batch: Batch, top: int, left: int, size: tuple[int, int]) -> Batch:
    """The same window of both views, continued below and to the right where they end.

    Partners of pixels at the left edge are then outside of the right view.
    """
    rows, columns = torch.arange(top, top + size[0]), torch.arange(left, left + size[1])
    height, width = batch["known0"].shape
    at = rows.clamp(max=height - 1)[:, None], columns.clamp(max=width - 1)
    window = {name: value[..., *at] for name, value in batch.items()}
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


def read_or_replace(source: StereoSource, index: int, *, strict: bool) -> Batch:
    """A pair, and why those before it could not be read (`skipped`).

    The next readable pair takes the place of one that is not, so that batches stay whole.
    """
    reasons: list[str] = []
    for step in range(min(ATTEMPTS, len(source))):
        try:
            return as_batch(source.read((index + step) % len(source))) | {"skipped": reasons}
        except DataError as error:
            if strict:
                raise DataError(f"{error}; mend it, or leave out --data.strict") from error
            reasons.append(str(error))
    raise DataError(
        f"{len(reasons)} pairs in a row cannot be read: {summary(reasons)}; check the files"
    )


def _read_crop(
    source: StereoSource,
    size: tuple[int, int],
    jitter: float,
    flip: float,
    strict: bool,
    index: int,
) -> Batch:
    """A window of a pair, its colours changed; generators are seeded for the draw."""
    batch = read_or_replace(source, index, strict=strict)
    skipped = batch.pop("skipped")
    room = (max(0, have - want) for have, want in zip(batch["known0"].shape, size, strict=True))
    top, left = (int(torch.randint(spare + 1, ())) for spare in room)
    batch = cropped(batch, top, left, size)
    if torch.rand(()) < flip:
        batch = {name: value.flip(-2) for name, value in batch.items()}
    if jitter > 0:
        batch |= _recoloured(batch["image0"], batch["image1"], jitter)
    return batch | {"skipped": skipped}


def _read_whole(source: StereoSource, count: int, strict: bool, index: int) -> Batch:
    """One of `count` pairs that are evenly spread over all."""
    return read_or_replace(source, index * len(source) // count, strict=strict)


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
