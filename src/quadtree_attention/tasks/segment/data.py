# SPDX-License-Identifier: Apache-2.0
"""Batches of images with a class for every pixel, for training and validation."""

import os
import sys
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from PIL import Image
from torchvision.transforms import v2

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.segment.augment import as_tensors, at_base, training_transform
from quadtree_attention.tasks.segment.sources import (
    Array,
    Colour,
    Kind,
    SegmentSource,
    open_source,
)
from quadtree_attention.tasks.training.loader import (
    EpochSampler,
    ResumableLoader,
    loader_of,
    sampler_of,
)

Batch = dict[str, Any]


class SegmentData(pl.LightningDataModule):
    """Images and label maps from folders or a generator: random crops to train, whole to validate.

    Args:
        root: Folder with `images/<split>`, `labels/<split>` and `classes.json`, or ADE20K.
        source: "auto" (by what is in `root`), "folder", "ade20k" or "generated".
        height: Of a training crop, in pixels.
        width: Of a training crop.
        base_size: Shorter side that images are scaled to before the random scale, and in
            validation; None leaves them as large as they are. Scores are at the size of the labels.
        scale_min: Least random scale of a training image.
        scale_max: Greatest random scale.
        flip: Probability of a horizontal flip.
        jitter: Random brightness, contrast, saturation and hue.
        most_of_one_class: Crops with a greater share of one class are drawn again; 1 takes all.
        batch_size: Crops of a batch on one process.
        eval_batch_size: Images of a validation batch; those of one size go through together.
        train_split: Folder of the training images; ADE20K's "training" is meant by "train" too.
        val_split: Folder of the validation images.
        workers: Processes that read images; None: one per core, 8 at most; 0 reads in the process.
        strict: Read every file first, and refuse to start if one is bad, instead of counting and
            replacing bad ones on the way.
        seed: Decides order and augmentation.
        generated_count: Images of the generated source; a quarter of it for validation.
        generated_size: Pixels of their shorter side.
        limit_images: Use the first so many images of either split only.
    """

    def __init__(
        self,
        root: str | None = None,
        source: Kind = "auto",
        height: int = 512,
        width: int = 512,
        base_size: int | None = None,
        scale_min: float = 0.5,
        scale_max: float = 2.0,
        flip: float = 0.5,
        jitter: bool = True,
        most_of_one_class: float = 0.75,
        batch_size: int = 16,
        eval_batch_size: int = 1,
        train_split: str = "train",
        val_split: str = "val",
        workers: int | None = None,
        strict: bool = False,
        seed: int = 0,
        generated_count: int = 64,
        generated_size: int = 64,
        limit_images: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("height", height, 1),
            ("width", width, 1),
            ("base_size", base_size, 1),
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("workers", workers, 0),
            ("generated_count", generated_count, 4),
            ("generated_size", generated_size, 8),
            ("limit_images", limit_images, 1),
        ):
            if value is not None and value < least:
                raise OptionError(f"{name} must be at least {least}, got {value}; pass more")
        if not 0 < scale_min <= scale_max:
            raise OptionError(
                f"scale_min must be above 0 and at most scale_max, got {scale_min} and "
                f"{scale_max}; pass such"
            )
        for name, share in (("flip", flip), ("most_of_one_class", most_of_one_class)):
            if not 0 <= share <= 1:
                raise OptionError(f"{name} must be from 0 to 1, got {share}; pass such")
        self.root = root
        self.kind = source
        self.base_size = base_size
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.splits = {"train": train_split, "val": val_split}
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.strict = strict
        self.seed = seed
        self.generated_count = generated_count
        self.generated_size = generated_size
        self.limit_images = limit_images
        self.transform = training_transform(
            height,
            width,
            scale=(scale_min, scale_max),
            base=base_size,
            flip=flip,
            jitter=jitter,
            most=most_of_one_class,
        )
        self._sources: dict[str, SegmentSource] = {}

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self._source("train").classes

    @property
    def palette(self) -> list[Colour]:
        """Their colours."""
        return self._source("train").palette

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one process."""
        return len(self._sampler("train")) // self.batch_size

    def setup(self, stage: str | None = None) -> None:
        for split in ("train", "val") if stage in (None, "fit") else ("val",):
            self._source(split)

    def train_dataloader(self) -> ResumableLoader:
        read = partial(_read_crop, self._source("train"), self.transform)
        return loader_of(self, self._sampler("train"), read, collate)

    def val_dataloader(self) -> ResumableLoader:
        read = partial(_read_whole, self._source("val"), self.base_size)
        return loader_of(self, self._sampler("val"), read, collate_whole)

    def _sampler(self, split: str) -> EpochSampler:
        size = len(self._source(split))
        count = size if self.limit_images is None else min(size, self.limit_images)
        training = split == "train"
        batch_size = self.batch_size if training else self.eval_batch_size
        return sampler_of(self, count, batch_size, shuffle=training)

    def _source(self, split: str) -> SegmentSource:
        if split not in self._sources:
            training = split == "train"
            source = open_source(
                self.kind,
                self.root,
                self.splits[split],
                generated_count=self.generated_count // (1 if training else 4),
                generated_size=self.generated_size,
            )
            if self.strict:
                check_all(source, self.splits[split])
            elif source.skipped:
                _tell(f"{split}: skipped {len(source.skipped)} files: {summary(source.skipped)}")
            self._sources[split] = source
        return self._sources[split]


def check_all(source: SegmentSource, split: str) -> None:
    """Reads every image and label map; raises `DataError` that counts and names what is bad."""
    from tqdm import tqdm

    bad = list(source.skipped)
    for i in tqdm(range(len(source)), desc=f"checking {split}", leave=False, disable=None):
        try:
            source.read(i)
        except DataError as error:
            bad.append(str(error))
    if bad:
        raise DataError(
            f"{len(bad)} files of {split} cannot be used: {summary(bad)}; correct or remove them, "
            "or leave out strict"
        )


def read_or_replace(source: SegmentSource, index: int) -> tuple[Image.Image, Array, list[str]]:
    """An image with its labels, and why those before it could not be used.

    The next usable image takes the place of one that is not, so that batches stay whole.
    """
    reasons: list[str] = []
    for step in range(len(source)):
        try:
            return *source.read((index + step) % len(source)), reasons
        except DataError as error:
            reasons.append(str(error))
    raise DataError(f"no image can be used: {summary(reasons)}; check the files")


def collate(samples: list[Batch]) -> Batch:
    """Crops, all of one size: images (B, 3, H, W), uint8, and labels (B, H, W), int16."""
    return {
        "images": torch.stack([sample["image"] for sample in samples]),
        "labels": torch.stack([sample["labels"] for sample in samples]),
        "skipped": [reason for sample in samples for reason in sample["skipped"]],
    }


def collate_whole(samples: list[Batch]) -> Batch:
    """Whole images of any sizes: lists of (3, H, W) and (H, W), without those that are bad."""
    usable = [sample for sample in samples if "image" in sample]
    return {
        "images": [sample["image"] for sample in usable],
        "labels": [sample["labels"] for sample in usable],
        "skipped": [reason for sample in samples for reason in sample["skipped"]],
    }


def _read_crop(source: SegmentSource, transform: v2.Transform, index: int) -> Batch:
    image, labels, skipped = read_or_replace(source, index)
    crop, mask = transform(*as_tensors(image, labels))
    # Plain tensors: what a subclass means is of no use in a batch
    pixels, classes = crop.as_subclass(torch.Tensor), mask.as_subclass(torch.Tensor)
    return {"image": pixels, "labels": classes, "skipped": skipped}


def _read_whole(source: SegmentSource, base: int | None, index: int) -> Batch:
    """An image at its base size, and its labels as they are: in validation nothing is replaced."""
    try:
        image, labels = source.read(index)
    except DataError as error:
        return {"skipped": [str(error)]}
    pixels, classes = as_tensors(at_base(image, base), labels)
    return {
        "image": pixels.as_subclass(torch.Tensor),
        "labels": classes.as_subclass(torch.Tensor),
        "skipped": [],
    }


def _tell(message: str) -> None:
    print(f"quadtree: {message}", file=sys.stderr)
