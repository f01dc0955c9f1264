# SPDX-License-Identifier: Apache-2.0
"""Batches of labelled images for training and evaluation."""

from typing import Any, Literal

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2.functional import pil_to_tensor

from quadtree_attention.checks import above, at_least, between, one_of
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.classify.augment import DRAWS, BatchAugment, with_safe_posterize
from quadtree_attention.tasks.classify.predictor import MEAN, NORM, STD, Preprocess
from quadtree_attention.tasks.classify.readers import GeneratedSource, Kind, Labelled, open_source
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.training import data
from quadtree_attention.tasks.training.data import Batch, Sample, Split
from quadtree_attention.tasks.training.loader import Draw, ResumableLoader, seed_from

Augment = Literal["timm", "batch", "none"]


class LabelledData(data.TaskData):
    """Labelled images.

    Args:
        image_size: Side of the network's input in pixels.
        batch_size: Batch size per process.
        augment: "timm" (RandAugment, colour jitter, random erasing, in the workers), "batch" (crops
            and flips of whole batches on their device; images are kept in memory) or "none".
        auto_augment: Name of a policy of timm.
        color_jitter: Strength of the colour jitter; timm omits it with some policies.
        random_erasing: Probability of random erasing.
        crop_scale: Minimum area of a training crop, as a share of the image.
        eval_crop: Side of the centre crop in evaluation, as a share of the image's shorter side.
        stored_size: Side in pixels of the images kept in memory with augment="batch".
        **common: Arguments of `TaskData`.
    """

    def __init__(
        self,
        image_size: int = 224,
        batch_size: int = 128,
        augment: Augment = "timm",
        auto_augment: str | None = "rand-m9-mstd0.5-inc1",
        color_jitter: float = 0.4,
        random_erasing: float = 0.25,
        crop_scale: float = 0.08,
        eval_crop: float = 0.875,
        stored_size: int = 64,
        **common: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **common)
        one_of(("timm", "batch", "none"), augment=augment)
        at_least(1, image_size=image_size, stored_size=stored_size)
        above(0, crop_scale=crop_scale, eval_crop=eval_crop)
        between(0, 1, crop_scale=crop_scale, eval_crop=eval_crop)
        self.image_size, self.eval_crop, self.stored_size = image_size, eval_crop, stored_size
        self.augment = augment
        self.batch_augment = BatchAugment(image_size, scale=(crop_scale, 1.0))
        self.transform = self.train_transform = Preprocess(image_size, eval_crop).transform
        if augment == "timm":
            policy: dict[str, Any] = {"auto_augment": auto_augment, "color_jitter": color_jitter}
            policy |= {"re_prob": random_erasing, "scale": (crop_scale, 1.0)}
            fixed: dict[str, Any] = {"is_training": True, "re_mode": "pixel", "hflip": 0.5, **NORM}
            try:
                self.train_transform = with_safe_posterize(
                    create_transform(image_size, **policy, **fixed)
                )
            except Exception as error:  # AssertionError, or any error of timm's parser
                raise OptionError(
                    f"timm cannot augment with {policy}: {error}; see its documentation of "
                    "create_transform"
                ) from error
        self._stored: dict[Split, StoredImages] = {}

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if self.augment == "batch":
            splits: tuple[Split, ...] = ("train", "val") if stage in (None, "fit") else ("val",)
            self._stored |= {s: self._store(s) for s in splits if s not in self._stored}

    def loader(self, split: Split) -> ResumableLoader:
        if self.augment != "batch":
            return super().loader(split)
        options = {"collate_fn": dict, "pin_memory": torch.cuda.is_available()}  # items are batches
        return ResumableLoader(self._stored[split], self.sampler(split), **options)

    def train_sample(self, images: Any, truth: int) -> Sample:
        return {"images": self.train_transform(images[0]), "labels": truth}

    def val_sample(self, images: Any, truth: int) -> Sample:
        return {"images": self.transform(images[0]), "labels": truth}

    def finish(self, batch: Batch, *, training: bool) -> Batch:
        """Crop, flip and normalise batches of bytes on their device."""
        if batch["images"].dtype == torch.uint8:
            images = batch["images"].float() / 255
            images = self.batch_augment.train(training)(images, batch["draws"])
            mean, std = (images.new_tensor(x).view(1, 3, 1, 1) for x in (MEAN, STD))
            batch["images"] = (images - mean) / std
        return batch

    def _store(self, split: Split) -> "StoredImages":
        from tqdm import tqdm

        source, count, side = self.source(split), self.count(split), self.stored_size
        images = torch.empty(count, 3, side, side, dtype=torch.uint8)
        labels, places, skipped = list[int](), list[int](), list[str]()
        for i in tqdm(range(count), desc=f"reading {split}", leave=False, disable=None):
            (image,), label, place, reasons = data.read_or_replace(source, i, strict=self.strict)
            scale = side / min(image.size)
            size = [max(side, round(length * scale)) for length in image.size]
            image = image.resize(size, Image.Resampling.BICUBIC)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            images[i] = pil_to_tensor(image.crop((left, top, left + side, top + side)))
            labels.append(label)
            places.append(place)
            skipped += reasons
        if skipped:
            data.tell(f"{split}: replaced {len(skipped)} unreadable images: {summary(skipped)}")
        return StoredImages(images, torch.tensor(labels), torch.tensor(places), self.seed)


class ClassifyData(LabelledData):
    """Labelled images from folders or npz files.

    Args:
        root: Folder with `train/<class>/` and `val/<class>/`, or with `train.npz` and `val.npz`.
        source: "auto" (by what is in `root`), "folder" or "npz".
        **common: Arguments of `LabelledData`.
    """

    def __init__(self, root: str | None = None, source: Kind = "auto", **common: Any) -> None:
        super().__init__(**common)
        self.root = root
        self.kind: Kind = source

    def open(self, split: Split) -> Labelled:
        source = open_source(self.root, split=split, strict=self.strict, source=self.kind)
        if unlabelled := sum(label < 0 for label in source.labels):
            raise DataError(
                f"{unlabelled} of {len(source)} images of {split} have no label (a negative one); "
                "training needs one for every image"
            )
        return source


class GeneratedClassifyData(LabelledData):
    """Gratings in several directions, which need no files.

    Args:
        source: "generated".
        generated_count: Training images per epoch; validation has a quarter as many.
        generated_classes: Number of directions.
        **common: Arguments of `LabelledData`.
    """

    def __init__(
        self,
        source: Literal["generated"] = "generated",
        generated_count: int = 512,
        generated_classes: int = 4,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        at_least(4, generated_count=generated_count)
        at_least(1, generated_classes=generated_classes)
        self.generated_count, self.generated_classes = generated_count, generated_classes

    def open(self, split: Split) -> Labelled:
        count = self.generated_count if split == "train" else self.generated_count // 4
        classes, size = self.generated_classes, self.stored_size
        return GeneratedSource(split, count=count, classes=classes, size=size)


class StoredImages(Dataset[Batch]):
    """Decoded images in memory, (N, 3, S, S) uint8; an item is a batch.

    A batch contains the random numbers of its augmentation, drawn from the seed and the epoch.
    Numbers drawn on the device would differ in a resumed run.
    """

    def __init__(self, images: Tensor, labels: Tensor, places: Tensor, seed: int = 0) -> None:
        self.images, self.labels, self.places, self.seed = images, labels, places, seed
        self._draws: tuple[int, Tensor] | None = None  # of the latest epoch

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, draws: list[Draw]) -> Batch:
        at, epoch = torch.tensor([draw.sample for draw in draws]), draws[0].epoch
        if self._draws is None or self._draws[0] != epoch:
            rng = torch.Generator().manual_seed(seed_from(self.seed, epoch, 0, len(self)))
            self._draws = epoch, torch.rand(len(self), DRAWS, generator=rng)
        return {
            "images": self.images[at],
            "draws": self._draws[1][at],
            "labels": self.labels[at],
            "indices": self.places[at],
            "skipped": [],
        }
