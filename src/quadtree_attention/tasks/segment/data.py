# SPDX-License-Identifier: Apache-2.0
"""Batches of images with a class for every pixel, for training and validation."""

from typing import Any, Literal

import torch
from PIL import Image
from tqdm import tqdm

from quadtree_attention.checks import above, at_least, between
from quadtree_attention.errors import DataError
from quadtree_attention.images import Array
from quadtree_attention.tasks.segment import readers
from quadtree_attention.tasks.segment.augment import as_tensors, at_base, training_transform
from quadtree_attention.tasks.training import data
from quadtree_attention.tasks.training.data import Batch, Sample, Split
from quadtree_attention.viz.palette import Colour


class LabelMapData(data.TaskData):
    """Images and label maps: random crops for training, whole images for validation.

    Args:
        height: Height of a training crop in pixels.
        width: Width of a training crop in pixels.
        base_size: Shorter side of images before the random scale, and in validation; None:
            original size. Scores are computed at the size of the labels.
        scale_min: Minimum random scale of a training image.
        scale_max: Maximum random scale.
        flip: Probability of a horizontal flip.
        jitter: Random brightness, contrast, saturation and hue.
        most_of_one_class: Crops with a larger share of one class are drawn again; 1 accepts all.
        batch_size: Batch size per process.
        eval_batch_size: Validation batch size; images of equal size share a forward pass.
        **common: Arguments of `TaskData`.
    """

    replaces = False

    def __init__(
        self,
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
        **common: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **common)
        at_least(1, height=height, width=width, base_size=base_size)
        at_least(1, eval_batch_size=eval_batch_size)
        above(0, scale_min=scale_min)
        at_least(scale_min, scale_max=scale_max)
        between(0, 1, flip=flip, most_of_one_class=most_of_one_class)
        self.base_size, self.eval_batch_size = base_size, eval_batch_size
        sizes: dict[str, Any] = {"scale": (scale_min, scale_max), "base": base_size}
        self.transform = training_transform(
            height, width, flip=flip, jitter=jitter, most=most_of_one_class, **sizes
        )

    @property
    def palette(self) -> list[Colour]:
        """Colours of the classes."""
        return list(self.source("train").palette)

    def train_sample(self, images: tuple[Image.Image], truth: Array) -> Sample:
        return _plain(*self.transform(*as_tensors(images[0], truth)))

    def val_sample(self, images: tuple[Image.Image], truth: Array) -> Sample:
        """Return an image at its base size, and its labels at their original size."""
        return _plain(*as_tensors(at_base(images[0], self.base_size), truth))

    def collate(self, samples: list[Sample], *, training: bool) -> Batch:
        """Stack crops to (B, 3, H, W) and labels (B, H, W); list whole images of any sizes."""
        return data.stacked(samples) if training else data.listed(samples, "images", "labels")


class SegmentData(LabelMapData):
    """Images and label maps from folders.

    Args:
        root: Folder with `images/<split>`, `labels/<split>` and `classes.json`, or ADE20K.
        source: "auto" (by what is in `root`), "folder" or "ade20k".
        train_split: Folder of the training images; "train" also selects ADE20K's "training".
        val_split: Folder of the validation images.
        strict: Read all files first, and raise an error if one is invalid, instead of counting and
            replacing invalid ones during training.
        **common: Arguments of `LabelMapData`.
    """

    def __init__(
        self,
        root: str | None = None,
        source: readers.Kind = "auto",
        train_split: str = "train",
        val_split: str = "val",
        strict: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(strict=strict, **common)
        self.root = root
        self.kind: readers.Kind = source
        self.splits = {"train": train_split, "val": val_split}

    def open(self, split: Split) -> readers.FolderSource:
        name = self.splits[split]
        source = readers.open_source(self.root, split=name, layout=self.kind)
        if self.strict:
            bad = list(source.skipped)
            for i in tqdm(range(len(source)), desc=f"checking {name}", leave=False, disable=None):
                try:
                    source.images(i), source.truth(i)
                except DataError as error:
                    bad.append(str(error))
            readers.refuse(bad, name)
        return source


class GeneratedSegmentData(LabelMapData):
    """Coloured shapes on noise, which need no files.

    Args:
        source: "generated".
        generated_count: Training images per epoch; validation has a quarter as many.
        generated_size: Shorter side of the images in pixels.
        **common: Arguments of `LabelMapData`.
    """

    def __init__(
        self,
        source: Literal["generated"] = "generated",
        generated_count: int = 64,
        generated_size: int = 64,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        at_least(4, generated_count=generated_count)
        at_least(8, generated_size=generated_size)
        self.generated_count, self.generated_size = generated_count, generated_size

    def open(self, split: Split) -> readers.GeneratedSource:
        count = self.generated_count if split == "train" else self.generated_count // 4
        return readers.GeneratedSource(split, count=count, size=self.generated_size)


def _plain(*pair: torch.Tensor) -> Sample:
    """Convert image and labels from torchvision's subclasses to plain tensors."""
    plain = (tensor.as_subclass(torch.Tensor) for tensor in pair)
    return dict(zip(("images", "labels"), plain, strict=True))
