# SPDX-License-Identifier: Apache-2.0
"""Batches of images with objects, for training and validation of detectors."""

import os
import sys
from functools import partial
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.detect.augment import Augment
from quadtree_attention.tasks.detect.coco import DetectSource, Target, counted, open_split
from quadtree_attention.tasks.detect.shapes import GeneratedShapes
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.training.loader import (
    EpochSampler,
    ResumableLoader,
    loader_of,
    sampler_of,
)

Split = Literal["train", "val"]
Kind = Literal["files", "generated"]
Batch = dict[str, Any]
ATTEMPTS = 50  # unreadable images in a row, after which something else is wrong


class DetectData(pl.LightningDataModule):
    """Images with boxes, and masks where asked for, from files in COCO's format or a generator.

    Batches are lists: `images` (3, H, W), each of its own size, from 0 to 1, and `targets` with
    `boxes`, `labels` and, where asked for, `masks`. Images without objects are kept. Crowds are
    used in validation only, where they excuse detections. In the place of an image that cannot be
    read, training takes the next one; validation, where none may count twice, does without, and a
    batch there may even be empty.

    Args:
        root: Folder with `images/train`, `images/val`, `annotations/instances_train.json` and
            `annotations/instances_val.json`, or with COCO's own names, `train2017` and so on.
        source: "files", or "generated": coloured shapes on noise, which need no files.
        train_images: Folder of the training images, where it has another name.
        train_annotations: JSON file of their objects.
        val_images: Folder of the validation images.
        val_annotations: JSON file of their objects.
        masks: Read masks as well; Mask R-CNN needs them.
        batch_size: Images of a batch on one process.
        flip: Probability of a horizontal flip in training.
        crop: Probability of a random crop in training, as DETR makes them.
        jitter: Strength of random changes of colour in training, 0 to 1.
        workers: Processes that read images; None: one per core, 8 at most; 0 reads in the process.
        strict: Fail at the first thing that cannot be used, instead of counting and leaving it out.
        seed: Decides order and augmentation.
        generated_count: Images of the generated source; a quarter of it for validation.
        generated_size: Pixels of their longer side.
        limit_images: Use the first so many images of either split only.
    """

    def __init__(
        self,
        root: str | None = None,
        source: Kind = "files",
        train_images: str | None = None,
        train_annotations: str | None = None,
        val_images: str | None = None,
        val_annotations: str | None = None,
        masks: bool = False,
        batch_size: int = 16,
        flip: float = 0.5,
        crop: float = 0.0,
        jitter: float = 0.0,
        workers: int | None = None,
        strict: bool = False,
        seed: int = 0,
        generated_count: int = 128,
        generated_size: int = 128,
        limit_images: int | None = None,
    ) -> None:
        super().__init__()
        if source not in ("files", "generated"):
            raise OptionError(f"source must be files or generated, got {source!r}; choose one")
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("workers", workers, 0),
            ("generated_count", generated_count, 4),
            ("generated_size", generated_size, 32),
            ("limit_images", limit_images, 1),
        ):
            if value is not None and value < least:
                raise OptionError(f"{name} must be at least {least}, got {value}; pass more")
        self.root = root
        self.kind = source
        self.paths = {
            "train": {"images": train_images, "annotations": train_annotations},
            "val": {"images": val_images, "annotations": val_annotations},
        }
        self.masks = masks
        self.batch_size = batch_size
        self.augment = Augment(flip=flip, crop=crop, jitter=jitter)
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.strict = strict
        self.seed = seed
        self.generated_count = generated_count
        self.generated_size = generated_size
        self.limit_images = limit_images
        self._sources: dict[str, DetectSource] = {}

    @property
    def classes(self) -> list[str]:
        """Names of the classes; the first has label 1."""
        return self._source("train").classes

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one process."""
        return len(self._sampler("train", shuffle=True)) // self.batch_size

    def setup(self, stage: str | None = None) -> None:
        if stage in (None, "fit"):
            self._source("train")
        val = self._source("val")
        if not any(val.objects(i) for i in range(self._size("val"))):
            raise DataError(
                f"the {self._size('val')} validation images show no object, so nothing can be "
                "measured; pass others, or a larger --data.limit_images"
            )

    def train_dataloader(self) -> ResumableLoader:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> ResumableLoader:
        return self._loader("val", shuffle=False)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Images travel as bytes."""
        return batch | {"images": [image.float() / 255 for image in batch["images"]]}

    def _source(self, split: Split) -> DetectSource:
        if split not in self._sources:
            source = self._open(split)
            if source.problems:
                reasons = [problem.reason for problem in source.problems]
                _tell(
                    f"{split}: {len(reasons)} entries cannot be used as they are "
                    f"({counted(source.problems)}): {summary(reasons)}"
                )
            if (train := self._sources.get("train")) and train.classes != source.classes:
                raise DataError(
                    f"train has the classes {', '.join(train.classes)}, val has "
                    f"{', '.join(source.classes)}; both need the same"
                )
            self._sources[split] = source
        return self._sources[split]

    def _open(self, split: Split) -> DetectSource:
        if self.kind == "generated":
            train = split == "train"
            count = self.generated_count if train else self.generated_count // 4
            return GeneratedShapes(
                count, self.generated_size, seed=0 if train else 1, masks=self.masks
            )
        paths = self.paths[split]
        return open_split(
            self.root,
            split,
            images=paths["images"],
            annotations=paths["annotations"],
            masks=self.masks,
            strict=self.strict,
        )

    def _loader(self, split: Split, *, shuffle: bool) -> ResumableLoader:
        sampler = self._sampler(split, shuffle=shuffle)
        augment = self.augment if shuffle else Augment()
        read = partial(_read, self._source(split), augment, self.strict, shuffle)
        return loader_of(self, sampler, read, collate)

    def _sampler(self, split: Split, *, shuffle: bool) -> EpochSampler:
        return sampler_of(self, self._size(split), self.batch_size, shuffle=shuffle)

    def _size(self, split: Split) -> int:
        size = len(self._source(split))
        return size if self.limit_images is None else min(size, self.limit_images)


def read_or_replace(
    source: DetectSource, index: int, *, strict: bool
) -> tuple[Image.Image, Target, list[str], int]:
    """An image, its objects, why those before it could not be read, and its index.

    The next readable image takes the place of one that is not, so that training batches stay whole.
    """
    reasons: list[str] = []
    for step in range(min(ATTEMPTS, len(source))):
        place = (index + step) % len(source)
        try:
            image, target = source.read(place)
            return image, target, reasons, place
        except DataError as error:
            reasons.append(_reason(error, strict=strict))
    raise DataError(
        f"{len(reasons)} images in a row cannot be read: {summary(reasons)}; check the files"
    )


def collate(samples: list[Batch]) -> Batch:
    """Lists, as images differ in size; what could not be read is skipped."""
    there = [sample for sample in samples if "image" in sample]
    return {
        "images": [sample["image"] for sample in there],
        "targets": [sample["target"] for sample in there],
        "indices": torch.tensor([sample["index"] for sample in there], dtype=torch.int64),
        "skipped": [reason for sample in samples for reason in sample["skipped"]],
    }


def _read(
    source: DetectSource, augment: Augment, strict: bool, training: bool, index: int
) -> Batch:
    if training:
        image, target, skipped, place = read_or_replace(source, index, strict=strict)
        # what is in a crowd is not told apart, so it can be neither right nor wrong
        single = target["iscrowd"] == 0
        target = {name: values[single] for name, values in target.items()}
    else:
        try:
            image, target = source.read(index)
        except DataError as error:
            return {"skipped": [_reason(error, strict=strict)]}
        skipped, place = [], index
    pixels, target = augment(image, target)
    return {"image": pixels, "target": target, "index": place, "skipped": skipped}


def _reason(error: DataError, *, strict: bool) -> str:
    """Why an image is skipped; raises where none may be."""
    if strict:
        raise DataError(f"{error}; mend it, or leave out --data.strict") from error
    return str(error)


def _tell(message: str) -> None:
    print(f"quadtree: {message}", file=sys.stderr)
