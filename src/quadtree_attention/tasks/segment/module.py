# SPDX-License-Identifier: Apache-2.0
"""Training of a segmenter."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.files import file_sha256
from quadtree_attention.tasks.segment import TASK
from quadtree_attention.tasks.segment.augment import normalised
from quadtree_attention.tasks.segment.metrics import IGNORE, SegmentMetric
from quadtree_attention.tasks.training.data import Batch
from quadtree_attention.tasks.training.module import NoDecay, TaskModule

Schedule = Literal["poly", "cosine"]


class SegmentModule(TaskModule):
    """A segmenter, trained by the cross entropy of pixels with AdamW.

    Args:
        model: Name of a segmenter: "semfpn_" and the name of a backbone, "semfpn_quadtree_b_b0".
        options: Keyword arguments of the segmenter and its backbone, except those below.
        num_classes: Number of classes; set from the data.
        backbone_weights: Initial weights of the backbone: `best.safetensors` of `quadtree train
            classify`, or a file written by `quadtree convert`; their classifier is dropped.
        lr: Learning rate at a batch of 16 images on all processes together; scaled linearly.
        min_lr: Final learning rate, at the same batch size.
        schedule: "poly", or "cosine".
        power: Exponent of "poly".
        warmup_epochs: Epochs in which the learning rate rises to `lr`.
        weight_decay: Weight decay of AdamW.
        no_decay: Parameters without decay: "vectors" (norms, biases and level weights), "norms"
            (except in the head), or "nothing".
        head_lr: Factor of the learning rate of the head, the layers after the feature pyramid.
        drop_path: Stochastic depth of the last block of the backbone.
        grad_checkpointing: Recompute blocks in backward to save memory.
        compile: Compile the model with `torch.compile`.
        seed: Seed of weights and dropout.
    """

    task = TASK
    monitor = "val/miou"
    batch_of_lr = 16
    schedules = ("poly", "cosine")
    heads = ("levels.", "classifier.")
    set_by: ClassVar = {
        "name": "--model.model",
        "num_classes": "the data",
        "backbone_weights": "--model.backbone_weights",
        "weights": "--model.backbone_weights",
        "drop_path_rate": "--model.drop_path",
        "grad_checkpointing": "--model.grad_checkpointing",
    }

    def __init__(
        self,
        model: str = "semfpn_quadtree_b_b0",
        options: dict[str, Any] | None = None,
        num_classes: int = 150,
        backbone_weights: str | None = None,
        lr: float = 1e-4,
        min_lr: float = 0.0,
        schedule: Schedule = "poly",
        power: float = 0.9,
        warmup_epochs: float = 0,
        weight_decay: float = 1e-4,
        no_decay: NoDecay = "vectors",
        head_lr: float = 1.0,
        drop_path: float = 0.1,
        grad_checkpointing: bool = False,
        compile: bool = False,  # noqa: A002 (what users call it)
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        start: dict[str, Any] = {"backbone_weights": backbone_weights, "drop_path_rate": drop_path}
        self.build(model, options, num_classes=num_classes, **start)
        self.pretrained: dict[str, str] | None = None  # origin of the backbone's weights
        if backbone_weights is not None:
            sha256 = file_sha256(backbone_weights)
            self.pretrained = {"backbone": Path(backbone_weights).name, "sha256": sha256}

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), bytes -> (B, num_classes, H, W)"""
        return cast(Tensor, self.model(normalised(images)))

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return pixel_loss(self(batch["images"]).float(), batch["labels"]), {}

    def new_metric(self) -> SegmentMetric:
        return SegmentMetric(self.data.source("val"))

    def validate(self, batch: Batch) -> None:
        for images, labels in equal_sizes(batch):
            logits = at_size(self(images).float(), labels)
            self.log_mean("val/loss", pixel_loss(logits, labels), len(labels))
            cast(SegmentMetric, self.metric).add(logits.argmax(dim=1), labels)

    def scores(self, metric: SegmentMetric) -> Mapping[str, float]:
        if not metric.matrix.any():
            return {}
        mean = metric.compute().mean
        return {name: cast(float, mean[name]) for name in ("miou", "accuracy")}

    def card(self) -> dict[str, Any]:
        own = {"palette": self.data.palette, "base_size": self.data.base_size}
        return super().card() | own | {"pretrained": self.pretrained}


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the pixels with a class; 0 without such pixels.

    Args:
        logits: (B, classes, H, W).
        labels: (B, H, W).
    """
    total = F.cross_entropy(logits, labels.long(), ignore_index=IGNORE, reduction="sum")
    return total / (labels != IGNORE).sum().clamp(min=1)


def at_size(logits: Tensor, labels: Tensor) -> Tensor:
    """Resize logits to the size of the labels."""
    if logits.shape[2:] == labels.shape[1:]:
        return logits
    return F.interpolate(logits, labels.shape[1:], mode="bilinear", align_corners=False)


def equal_sizes(batch: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images (B, 3, H, W) and labels (B, H, W) of a batch, grouped by size."""
    groups: dict[tuple[torch.Size, torch.Size], list[tuple[Tensor, Tensor]]] = {}
    for image, labels in zip(batch["images"], batch["labels"], strict=True):
        groups.setdefault((image.shape, labels.shape), []).append((image, labels))
    for group in groups.values():
        images, label_maps = zip(*group, strict=True)
        yield torch.stack(images), torch.stack(label_maps)
