# SPDX-License-Identifier: Apache-2.0
"""Training of a segmenter."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import file_sha256
from quadtree_attention.models.registry import create
from quadtree_attention.models.segmentation import SemanticFPN
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.segment.augment import normalised
from quadtree_attention.tasks.segment.metrics import IGNORE, confusion, scores
from quadtree_attention.tasks.training.loader import seed_from, set_seed
from quadtree_attention.tasks.training.module import TaskModule, check_options

Schedule = Literal["poly", "cosine"]


class SegmentModule(TaskModule):
    """A segmenter, trained by the cross entropy of pixels with AdamW.

    Args:
        model: Name of a segmenter: "semfpn_" and the name of a backbone, "semfpn_quadtree_b_b0".
        options: Keyword arguments of that segmenter and its backbone, other than those below.
        num_classes: Classes; comes from the data.
        backbone_weights: Weights to start the backbone from, of `quadtree train classify`
            (`best.safetensors`) or `quadtree convert`; their classifier is left out.
        lr: Learning rate at a batch of 16 images on all processes together; scaled linearly.
        min_lr: Where the schedule ends, at that batch size too.
        schedule: "poly", or "cosine".
        power: Of the polynomial.
        warmup_epochs: Epochs in which the learning rate rises to `lr`.
        weight_decay: Of AdamW; norms, biases and level weights have none.
        drop_path: Stochastic depth of the last block of the backbone.
        grad_checkpointing: Recompute blocks in backward to save memory.
        compile: Compile the model with `torch.compile`.
        seed: Decides weights and dropout.
    """

    monitor = "val/miou"
    batch_of_lr = 16
    links: ClassVar = {"data.classes": ("model.num_classes", len)}

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
        drop_path: float = 0.1,
        grad_checkpointing: bool = False,
        compile: bool = False,  # noqa: A002 (what users call it)
        seed: int = 0,
    ) -> None:
        super().__init__()
        if schedule not in get_args(Schedule):
            raise OptionError(f"schedule must be poly or cosine, got {schedule!r}; take one")
        check_options(
            options,
            name="--model.model",
            num_classes="the data",
            backbone_weights="--model.backbone_weights",
            weights="--model.backbone_weights",
            drop_path_rate="--model.drop_path",
            grad_checkpointing="--model.grad_checkpointing",
        )
        self.save_hyperparameters()
        set_seed(seed_from(seed))  # the same first weights on every process
        self.kwargs = {"num_classes": num_classes, **(options or {})}
        start = {"backbone_weights": backbone_weights, "drop_path_rate": drop_path}
        self.model = cast(SemanticFPN, create(model, **start, **self.kwargs))
        self.pretrained = _origin(backbone_weights)
        if grad_checkpointing:
            self.model.set_grad_checkpointing(True)
        if compile:
            self.model.compile()  # in place: the names of the weights stay
        self.matrix = torch.zeros(num_classes, num_classes, dtype=torch.long)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), bytes -> (B, num_classes, H, W)"""
        return self.model(normalised(images))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        images, labels = batch["images"], batch["labels"]
        loss = pixel_loss(self(images).float(), labels)
        self.check_loss(loss, batch_idx)
        self.log_mean("train/loss", loss.detach(), len(labels), prog_bar=True)
        self.note_skipped(batch)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.matrix = torch.zeros_like(self.matrix, device=self.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        for images, labels in equal_sizes(batch):
            logits = at_size(self(images).float(), labels)
            self.log_mean("val/loss", pixel_loss(logits, labels), len(labels))
            self.matrix += confusion(logits.argmax(dim=1), labels, len(self.matrix))
        self.note_skipped(batch)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(self.matrix)
        if not self.matrix.any() and not self.trainer.sanity_checking:
            raise DataError(
                f"no pixel of the validation images has a class: {summary(list(self.skipped))}; "
                "check the files"
            )
        found = scores(self.matrix)
        # equal on all processes already
        self.log("val/miou", found.miou, prog_bar=True, sync_dist=False)
        self.log("val/accuracy", found.accuracy, sync_dist=False)

    def card(self) -> dict[str, Any]:
        """What the weights need beside them to be used."""
        data = cast(Any, self.trainer).datamodule
        return {
            "model": self.hparams["model"],
            "kwargs": self.kwargs,
            "task": "segment",
            "classes": data.classes,
            "palette": data.palette,
            "base_size": data.base_size,
            "pretrained": self.pretrained,
        }


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the pixels that have a class; 0 where none has.

    Args:
        logits: (B, classes, H, W).
        labels: (B, H, W).
    """
    total = F.cross_entropy(logits, labels.long(), ignore_index=IGNORE, reduction="sum")
    return total / (labels != IGNORE).sum().clamp(min=1)


def at_size(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits at the size of the labels, where images were scaled and labels were not."""
    if logits.shape[2:] == labels.shape[1:]:
        return logits
    return F.interpolate(logits, labels.shape[1:], mode="bilinear", align_corners=False)


def equal_sizes(batch: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Images (B, 3, H, W) and labels (B, H, W) of a batch, those of one size together."""
    groups: dict[tuple[torch.Size, torch.Size], list[tuple[Tensor, Tensor]]] = {}
    for image, labels in zip(batch["images"], batch["labels"], strict=True):
        groups.setdefault((image.shape, labels.shape), []).append((image, labels))
    for group in groups.values():
        images, label_maps = zip(*group, strict=True)
        yield torch.stack(images), torch.stack(label_maps)


def _origin(weights: str | None) -> dict[str, str] | None:
    """What the backbone started from, for the card."""
    if weights is None:
        return None
    return {"backbone": Path(weights).name, "sha256": file_sha256(weights)}
