# SPDX-License-Identifier: Apache-2.0
"""Batches of images with objects, for training and validation of detectors."""

from typing import Any, Literal

from torchvision.transforms.v2.functional import pil_to_tensor

from quadtree_attention.checks import at_least
from quadtree_attention.errors import DataError
from quadtree_attention.tasks.contract import Source
from quadtree_attention.tasks.detect.augment import Augment
from quadtree_attention.tasks.detect.generated import GeneratedShapes
from quadtree_attention.tasks.detect.readers import Truth, counted, open_source
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.training.data import Batch, Sample, Split, TaskData, listed


class ObjectsData(TaskData):
    """Images with boxes, and optionally masks.

    Batches are lists: `images` (3, H, W) in [0, 1] of any sizes, and in training `targets` with
    `boxes`, `labels` and, if requested, `masks`. Images without objects are kept. Crowds are used
    in validation only, where detections inside them are ignored. In training, the next image
    replaces an unreadable one; in validation, where no image may count twice, it is left out.

    Args:
        masks: Read masks as well; Mask R-CNN needs them.
        batch_size: Batch size per process.
        flip: Probability of a horizontal flip in training.
        crop: Probability of a random crop in training, as in DETR.
        jitter: Strength of random changes of colour in training, 0 to 1.
        **common: Arguments of `TaskData`.
    """

    replaces = False

    def __init__(
        self,
        masks: bool = False,
        batch_size: int = 16,
        flip: float = 0.5,
        crop: float = 0.0,
        jitter: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **common)
        self.masks = masks
        self.augment = Augment(flip=flip, crop=crop, jitter=jitter)

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        val, count = self.source("val"), self.count("val")
        if not any(val.truth(i).objects for i in range(count)):
            raise DataError(
                f"the {count} validation images show no object, so nothing can be measured; pass "
                "others, or a larger --data.limit_images"
            )

    def report(self, source: Any) -> str:
        kinds, reasons = counted(source.problems), source.skipped
        return f"{len(reasons)} entries cannot be used as they are ({kinds}): {summary(reasons)}"

    def train_sample(self, images: Any, truth: Truth) -> Sample:
        target = truth.target(masks=self.masks)
        # Objects of a crowd are not annotated one by one: detections in it are ignored
        single = target["iscrowd"] == 0
        target = {name: values[single] for name, values in target.items()}
        pixels, target = self.augment(images[0], target)
        return {"images": pixels, "targets": target}

    def val_sample(self, images: Any, truth: Truth) -> Sample:
        return {"images": pil_to_tensor(images[0])}

    def collate(self, samples: list[Sample], *, training: bool) -> Batch:
        return listed(samples, "images", *(["targets"] if training else []))

    def finish(self, batch: Batch, *, training: bool) -> Batch:
        """Convert images of bytes to floats in [0, 1]."""
        return batch | {"images": [image.float() / 255 for image in batch["images"]]}


class DetectData(ObjectsData):
    """Images with objects from files in COCO's format.

    Args:
        root: Folder with `images/train`, `images/val`, `annotations/instances_train.json` and
            `annotations/instances_val.json`, or with COCO's own names, `train2017` and so on.
        source: "files".
        train_images: Folder of the training images, if not at its default path.
        train_annotations: JSON file of the objects in training images.
        val_images: Folder of the validation images.
        val_annotations: JSON file of the objects in validation images.
        **common: Arguments of `ObjectsData`.
    """

    def __init__(
        self,
        root: str | None = None,
        source: Literal["files"] = "files",
        train_images: str | None = None,
        train_annotations: str | None = None,
        val_images: str | None = None,
        val_annotations: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.root = root
        self.paths: dict[Split, dict[str, str | None]] = {
            "train": {"images": train_images, "annotations": train_annotations},
            "val": {"images": val_images, "annotations": val_annotations},
        }

    def open(self, split: Split) -> Source[Truth]:
        options: dict[str, Any] = {"strict": self.strict, "masks": self.masks}
        options |= {"check_images": True, **self.paths[split]}
        return open_source(self.root, split=split, **options)


class GeneratedDetectData(ObjectsData):
    """Coloured shapes on noise, which need no files.

    Args:
        source: "generated".
        generated_count: Training images per epoch; validation has a quarter as many.
        generated_size: Longer side of the images in pixels.
        **common: Arguments of `ObjectsData`.
    """

    def __init__(
        self,
        source: Literal["generated"] = "generated",
        generated_count: int = 128,
        generated_size: int = 128,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        at_least(4, generated_count=generated_count)
        at_least(32, generated_size=generated_size)
        self.generated_count, self.generated_size = generated_count, generated_size

    def open(self, split: Split) -> Source[Truth]:
        train = split == "train"
        count = self.generated_count if train else self.generated_count // 4
        return GeneratedShapes(count, self.generated_size, seed=0 if train else 1)
