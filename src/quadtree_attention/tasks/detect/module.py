# SPDX-License-Identifier: Apache-2.0
"""Training of a detector."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor

from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.detect import TASK
from quadtree_attention.tasks.detect.metrics import DetectMetric
from quadtree_attention.tasks.detect.predictor import detections
from quadtree_attention.tasks.detect.readers import Truth
from quadtree_attention.tasks.training.data import Batch
from quadtree_attention.tasks.training.module import NoDecay, TaskModule

Schedule = Literal["step", "cosine"]
LOGGED = ("ap", "ap50", "ap75")
# COCO's thresholds in float32, as in all earlier runs: float64 moves some recalls across them
OVERLAPS, RECALLS = (torch.linspace(0.5, 0.95, 10).tolist(), torch.linspace(0, 1, 101).tolist())
NO_OBJECTS = -100.0  # AP without objects; below all other values, so that it is never the best


class DetectModule(TaskModule):
    """A detector, trained by AdamW with warm-up and steps or cosine decay.

    Args:
        model: Name of a detector: `retinanet_` or `mask_rcnn_` and a backbone, such as
            `quadtree_b_b0`.
        options: Keyword arguments of the detector and its backbone, such as `min_size`, a list
            for training at several scales.
        backbone_weights: Initial weights of the backbone: `best.safetensors` of `quadtree train
            classify`, or a file written by `quadtree convert`.
        num_classes: Number of classes; set from the data.
        lr: Learning rate at a batch of 16 images on all processes together; scaled linearly.
        min_lr: Final learning rate of the cosine, at the same batch size.
        warmup_epochs: Epochs in which the learning rate rises to `lr`; 0.07 is 500 steps on COCO.
        warmup_start: Initial rate of warm-up as a share of `lr`; None: an absolute rate of 1e-6.
        weight_decay: Weight decay of AdamW.
        no_decay: Parameters without decay: "vectors" (norms, biases and level weights), "norms", or
            "nothing".
        schedule: "step" (a tenth of the learning rate from each of `decay_epochs` on) or "cosine".
        decay_epochs: Epochs of the steps.
        grad_checkpointing: Recompute blocks of the backbone in backward to save memory.
        seed: Seed of weights, dropout and the sampling of boxes for the loss.
    """

    task = TASK
    monitor = "val/ap"
    batch_of_lr = 16
    schedules = ("step", "cosine")
    bar = ("mask_ap",)
    set_by: ClassVar = {
        "num_classes": "the data",
        "backbone_weights": "--model.backbone_weights",
        "grad_checkpointing": "--model.grad_checkpointing",
    }

    def __init__(
        self,
        model: str = "retinanet_quadtree_b_b0",
        options: dict[str, Any] | None = None,
        backbone_weights: str | None = None,
        num_classes: int = 80,
        lr: float = 1e-4,
        min_lr: float = 1e-6,
        warmup_epochs: float = 0.07,
        warmup_start: float | None = None,
        weight_decay: float = 1e-4,
        no_decay: NoDecay = "vectors",
        schedule: Schedule = "step",
        decay_epochs: Sequence[float] = (8, 11),
        grad_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(model, options, num_classes=num_classes, backbone_weights=backbone_weights)
        self.has_masks = model.startswith("mask_rcnn")

    def setup(self, stage: str) -> None:
        if self.has_masks and not self.data.masks:
            raise OptionError(
                f"{self.hparams['model']} learns masks, the data are read without them; pass "
                "--data.masks true, or train a retinanet"
            )

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        found: dict[str, Tensor] = self.model(batch["images"], batch["targets"])
        loss = torch.stack([part.float() for part in found.values()]).sum()
        return loss, {f"{name.removeprefix('loss_')}_loss": part for name, part in found.items()}

    def new_metric(self) -> DetectMetric:
        return DetectMetric(self.data.source("val"), overlaps=OVERLAPS, recalls=RECALLS)

    def validate(self, batch: Batch) -> None:
        metric = cast(DetectMetric, self.metric)
        answers = self.model(batch["images"])
        for index, answer in zip(batch["indices"].tolist(), answers, strict=True):
            truth = as_trained(metric.source.truth(index))
            metric.update(str(index), truth, detections(answer, metric.names))

    def scores(self, metric: DetectMetric) -> Mapping[str, float]:
        if not metric.rows:
            return {}
        mean = metric.compute().mean
        kinds = ("", "mask_") if self.has_masks else ("",)
        names = [kind + name for kind in kinds for name in LOGGED]
        found = {name: mean.get(name, 0.0) for name in names}  # without masks: no detection
        return {name: NO_OBJECTS if v is None else v for name, v in found.items()}


def as_trained(truth: Truth) -> Truth:
    """Return the objects with the boxes used in training: clipped, in float32."""
    boxes = np.array([a.box for a in truth.annotations], dtype=np.float32).reshape(-1, 4)
    boxes[:, 2:] -= boxes[:, :2]
    pairs: Any = zip(truth.annotations, boxes.tolist(), strict=True)
    return replace(truth, annotations=tuple(replace(a, given=tuple(box)) for a, box in pairs))
