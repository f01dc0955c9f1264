# SPDX-License-Identifier: Apache-2.0
"""Batches of labelled images for training and evaluation."""

import os
import sys
from functools import partial
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import Dataset

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.classify.augment import DRAWS, BatchAugment
from quadtree_attention.tasks.classify.sources import ImageSource, Kind, Split, open_source
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.training.loader import (
    Draw,
    EpochSampler,
    ResumableLoader,
    loader_of,
    sampler_of,
    seed_from,
)

Augment = Literal["timm", "batch", "none"]
Batch = dict[str, Any]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ClassifyData(pl.LightningDataModule):
    """Labelled images from folders, npz files or a generator.

    Args:
        root: Folder with `train/<class>/` and `val/<class>/`, or with `train.npz` and `val.npz`.
        source: "auto" (by what is in `root`), "folder", "npz" or "generated".
        image_size: Pixels of a side of what the model sees.
        batch_size: Images of a batch on one process.
        augment: "timm" (RandAugment, colour jitter, random erasing, in the workers), "batch" (crops
            and flips of whole batches on their device; images are kept in memory) or "none".
        auto_augment: timm's name of a policy.
        color_jitter: Strength of the colour jitter, where the policy leaves room for it.
        random_erasing: Probability of random erasing.
        crop_scale: Least share of an image that a training crop covers.
        eval_crop: Share of an image's side that evaluation looks at.
        stored_size: Pixels of a side of the images kept in memory with augment="batch".
        workers: Processes that read images; None: one per core, 8 at most; 0 reads in the process.
        strict: Fail at the first unreadable file instead of counting and replacing it.
        seed: Decides order and augmentation.
        generated_count: Images of the generated source; a quarter of it for validation.
        generated_classes: Classes of the generated source.
        limit_images: Use the first so many images of either split only.
    """

    def __init__(
        self,
        root: str | None = None,
        source: Kind = "auto",
        image_size: int = 224,
        batch_size: int = 128,
        augment: Augment = "timm",
        auto_augment: str | None = "rand-m9-mstd0.5-inc1",
        color_jitter: float = 0.4,
        random_erasing: float = 0.25,
        crop_scale: float = 0.08,
        eval_crop: float = 0.875,
        stored_size: int = 64,
        workers: int | None = None,
        strict: bool = False,
        seed: int = 0,
        generated_count: int = 512,
        generated_classes: int = 4,
        limit_images: int | None = None,
    ) -> None:
        super().__init__()
        if augment not in ("timm", "batch", "none"):
            raise OptionError(f"augment must be timm, batch or none, got {augment!r}; choose one")
        for name, value, least in (
            ("image_size", image_size, 1),
            ("batch_size", batch_size, 1),
            ("stored_size", stored_size, 1),
            ("workers", workers, 0),
            ("generated_count", generated_count, 4),
            ("generated_classes", generated_classes, 1),
            ("limit_images", limit_images, 1),
        ):
            if value is not None and value < least:
                raise OptionError(f"{name} must be at least {least}, got {value}; pass more")
        for name, share in (("crop_scale", crop_scale), ("eval_crop", eval_crop)):
            if not 0 < share <= 1:
                raise OptionError(f"{name} must be above 0 and at most 1, got {share}; pass such")
        self.root = root
        self.kind = source
        self.image_size = image_size
        self.batch_size = batch_size
        self.augment = augment
        self.policy = {
            "auto_augment": auto_augment,
            "color_jitter": color_jitter,
            "re_prob": random_erasing,
            "scale": (crop_scale, 1.0),
        }
        self.eval_crop = eval_crop
        self.stored_size = stored_size
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.strict = strict
        self.seed = seed
        self.generated_count = generated_count
        self.generated_classes = generated_classes
        self.limit_images = limit_images
        self.batch_augment = BatchAugment(image_size, scale=(crop_scale, 1.0))
        if augment == "timm":
            self._check_policy()
        self._sources: dict[str, ImageSource] = {}
        self._stored: dict[str, StoredImages] = {}

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self._source("train").classes

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one process."""
        return len(self._sampler("train", shuffle=True)) // self.batch_size

    def setup(self, stage: str | None = None) -> None:
        splits: tuple[Split, ...] = ("train", "val") if stage in (None, "fit") else ("val",)
        for split in splits:
            source = self._source(split)
            if self.augment == "batch" and split not in self._stored:
                self._stored[split] = self._store(source, split)

    def train_dataloader(self) -> ResumableLoader:
        loader = self._loader("train", shuffle=True)
        if len(loader) == 0:
            raise OptionError(
                f"{loader.sampler.size} training images do not fill one batch of "
                f"{self.batch_size} on {loader.sampler.world_size} processes; "
                "pass a smaller --data.batch_size"
            )
        return loader

    def val_dataloader(self) -> ResumableLoader:
        return self._loader("val", shuffle=False)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Crops, flips and normalises batches that were left for their device."""
        if batch["images"].dtype == torch.uint8:
            trainer = self.trainer
            training = trainer is not None and trainer.training
            images = batch["images"].float() / 255
            images = self.batch_augment.train(training)(images, batch["draws"])
            mean, std = (images.new_tensor(x).view(1, 3, 1, 1) for x in (MEAN, STD))
            batch["images"] = (images - mean) / std
        return batch

    def _source(self, split: Split) -> ImageSource:
        if split not in self._sources:
            count = self.generated_count if split == "train" else self.generated_count // 4
            source = open_source(
                self.kind,
                self.root,
                split,
                generated_count=count,
                generated_classes=self.generated_classes,
                generated_size=self.stored_size,
            )
            if source.skipped and self.strict:
                raise DataError(
                    f"{len(source.skipped)} files are no images: {summary(source.skipped)}; "
                    "remove them, or leave out --data.strict"
                )
            if source.skipped:
                _tell(f"{split}: skipped {len(source.skipped)} files: {summary(source.skipped)}")
            if (train := self._sources.get("train")) and train.classes != source.classes:
                raise DataError(
                    f"train has the classes {', '.join(train.classes)}, val has "
                    f"{', '.join(source.classes)}; both need the same"
                )
            if unlabelled := sum(source.label(i) < 0 for i in range(len(source))):
                raise DataError(
                    f"{unlabelled} of {len(source)} images of {split} have no label (a negative "
                    "one); training needs one for every image"
                )
            self._sources[split] = source
        return self._sources[split]

    def _loader(self, split: Split, *, shuffle: bool) -> ResumableLoader:
        source, sampler = self._source(split), self._sampler(split, shuffle=shuffle)
        if self.augment == "batch":
            pinned = torch.cuda.is_available()
            stored = self._stored[split]
            return ResumableLoader(stored, sampler, collate_fn=_as_it_is, pin_memory=pinned)
        read = partial(_read, source, self._transform(training=shuffle), self.strict)
        return loader_of(self, sampler, read, collate)

    def _sampler(self, split: Split, *, shuffle: bool) -> EpochSampler:
        return sampler_of(self, self._size(split), self.batch_size, shuffle=shuffle)

    def _size(self, split: Split) -> int:
        size = len(self._source(split))
        return size if self.limit_images is None else min(size, self.limit_images)

    def _transform(self, *, training: bool) -> Any:
        common: dict[str, Any] = {"mean": MEAN, "std": STD, "interpolation": "bicubic"}
        if training and self.augment == "timm":
            policy: dict[str, Any] = {**self.policy, "re_mode": "pixel", "hflip": 0.5}
            return create_transform(self.image_size, is_training=True, **policy, **common)
        return create_transform(self.image_size, crop_pct=self.eval_crop, **common)

    def _check_policy(self) -> None:
        try:
            self._transform(training=True)
        except Exception as error:  # timm asserts, and parses the name of a policy in passing
            raise OptionError(
                f"timm cannot augment with {self.policy}: {error}; see its documentation of "
                "create_transform"
            ) from error

    def _store(self, source: ImageSource, split: Split) -> "StoredImages":
        from tqdm import tqdm

        size, side = self._size(split), self.stored_size
        images = torch.empty(size, 3, side, side, dtype=torch.uint8)
        places: list[int] = []
        skipped: list[str] = []
        for i in tqdm(range(size), desc=f"reading {split}", leave=False, disable=None):
            image, place, reasons = read_or_replace(source, i, strict=self.strict)
            images[i] = torch.from_numpy(_square(image, side)).permute(2, 0, 1)
            places.append(place)
            skipped += reasons
        if skipped:
            _tell(f"{split}: replaced {len(skipped)} unreadable images: {summary(skipped)}")
        labels = torch.tensor([source.label(place) for place in places])
        return StoredImages(images, labels, torch.tensor(places), self.seed)


class StoredImages(Dataset[Batch]):
    """Decoded images in memory, given out a batch at a time; (N, 3, S, S) uint8.

    With them go the random numbers of their augmentation, drawn from the seed and the epoch:
    those at hand when a batch reaches its device would differ in a run that goes on.
    """

    def __init__(self, images: Tensor, labels: Tensor, places: Tensor, seed: int = 0) -> None:
        self.images = images
        self.labels = labels
        self.places = places
        self.seed = seed
        self._draws: tuple[int, Tensor] | None = None  # of the latest epoch

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, draws: list[Draw]) -> Batch:
        at = torch.tensor([draw.sample for draw in draws])
        return {
            "images": self.images[at],
            "draws": self._draws_of(draws[0].epoch)[at],
            "labels": self.labels[at],
            "indices": self.places[at],
            "skipped": [],
        }

    def _draws_of(self, epoch: int) -> Tensor:
        if self._draws is None or self._draws[0] != epoch:
            rng = torch.Generator().manual_seed(seed_from(self.seed, epoch, 0, len(self)))
            self._draws = epoch, torch.rand(len(self), DRAWS, generator=rng)
        return self._draws[1]


def read_or_replace(
    source: ImageSource, index: int, *, strict: bool
) -> tuple[Image.Image, int, list[str]]:
    """An image, the index it really has, and why those before it could not be read.

    The next readable image takes the place of one that is not, so that batches stay whole.
    """
    reasons: list[str] = []
    for step in range(len(source)):
        place = (index + step) % len(source)
        try:
            return source.read(place), place, reasons
        except DataError as error:
            if strict:
                raise DataError(f"{error}; remove it, or leave out --data.strict") from error
            reasons.append(str(error))
    raise DataError(f"no image can be read: {summary(reasons)}; check the files")


def collate(samples: list[Batch]) -> Batch:
    return {
        "images": torch.stack([sample["image"] for sample in samples]),
        "labels": torch.tensor([sample["label"] for sample in samples]),
        "indices": torch.tensor([sample["index"] for sample in samples]),
        "skipped": [reason for sample in samples for reason in sample["skipped"]],
    }


def _read(source: ImageSource, transform: Any, strict: bool, index: int) -> Batch:
    image, place, skipped = read_or_replace(source, index, strict=strict)
    label = source.label(place)
    return {"image": transform(image), "label": label, "index": place, "skipped": skipped}


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _square(image: Image.Image, side: int) -> np.ndarray[Any, Any]:
    """The middle of the image, `side` pixels square."""
    scale = side / min(image.size)
    if scale != 1:
        width, height = (max(side, round(length * scale)) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return np.array(image.crop((left, top, left + side, top + side)))


def _tell(message: str) -> None:
    print(f"quadtree: {message}", file=sys.stderr)
