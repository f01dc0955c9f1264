# SPDX-License-Identifier: Apache-2.0
"""Training of a detector."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, distributed, nn
from torchmetrics.detection import MeanAveragePrecision

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.models.registry import create
from quadtree_attention.tasks.detect.coco import Target
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.training.loader import seed_from, set_seed
from quadtree_attention.tasks.training.module import TaskModule, check_options

Schedule = Literal["step", "cosine"]
MASK_THRESHOLD = 0.5  # of what belongs to an object
LOGGED = {"map": "ap", "map_50": "ap50", "map_75": "ap75"}


class DetectModule(TaskModule):
    """A detector and how it is trained: AdamW, warm-up, steps or cosine decay.

    Args:
        model: Name of a detector: `retinanet_` or `mask_rcnn_` and a backbone, such as
            `quadtree_b_b0`.
        options: Keyword arguments of that detector and its backbone, such as `min_size`, several
            for training at several scales.
        backbone_weights: Weights that the backbone starts with: `best.safetensors` of `quadtree
            train classify`, or what `quadtree convert` writes.
        num_classes: Classes; comes from the data.
        lr: Learning rate at a batch of 16 images on all processes together; scaled linearly.
        min_lr: Where the cosine ends, at that batch size too.
        warmup_epochs: Epochs in which the learning rate rises to `lr`; 0.07 is 500 steps on COCO.
        weight_decay: Of AdamW; norms, biases and level weights have none.
        schedule: "step" (a tenth of the learning rate from each of `decay_epochs` on) or "cosine".
        decay_epochs: Where the steps are.
        grad_checkpointing: Recompute blocks of the backbone in backward to save memory.
        seed: Decides weights, dropout and which boxes are drawn for the loss.
    """

    monitor = "val/ap"
    batch_of_lr = 16
    links: ClassVar = {"data.classes": ("model.num_classes", len)}

    def __init__(
        self,
        model: str = "retinanet_quadtree_b_b0",
        options: dict[str, Any] | None = None,
        backbone_weights: str | None = None,
        num_classes: int = 80,
        lr: float = 1e-4,
        min_lr: float = 1e-6,
        warmup_epochs: float = 0.07,
        weight_decay: float = 1e-4,
        schedule: Schedule = "step",
        decay_epochs: Sequence[float] = (8, 11),
        grad_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if schedule not in ("step", "cosine"):
            raise OptionError(f"schedule must be step or cosine, got {schedule!r}; choose one")
        if list(decay_epochs) != sorted(decay_epochs) or any(epoch <= 0 for epoch in decay_epochs):
            raise OptionError(
                f"decay_epochs must be above 0 and rise, got {list(decay_epochs)}; pass such"
            )
        check_options(
            options,
            num_classes="the data",
            backbone_weights="--model.backbone_weights",
            grad_checkpointing="--model.grad_checkpointing",
        )
        self.save_hyperparameters()
        set_seed(seed_from(seed))  # the same first weights on every process
        self.kwargs = {"num_classes": num_classes, **(options or {})}
        self.model: nn.Module = create(model, backbone_weights=backbone_weights, **self.kwargs)
        cast(Any, self.model).set_grad_checkpointing(grad_checkpointing)
        self.has_masks = model.startswith("mask_rcnn")
        self.ap = _metric(masks=self.has_masks)

    def setup(self, stage: str) -> None:
        data = cast(Any, self.trainer).datamodule
        if self.has_masks and not data.masks:
            raise OptionError(
                f"{self.hparams['model']} learns masks, the data are read without them; pass "
                "--data.masks true, or train a retinanet"
            )

    def forward(self, images: list[Tensor]) -> list[Target]:
        """Images (3, H, W) from 0 to 1 -> boxes, labels, scores and masks of each."""
        return self.model(images)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        losses: dict[str, Tensor] = self.model(batch["images"], batch["targets"])
        loss = torch.stack([part.float() for part in losses.values()]).sum()
        self.check_loss(loss, batch_idx)
        count = len(batch["images"])
        self.log_mean("train/loss", loss.detach(), count, prog_bar=True)
        for name, part in losses.items():
            self.log_mean(f"train/{name.removeprefix('loss_')}_loss", part.detach(), count)
        self.note_skipped(batch)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.note_skipped(batch)
        if not batch["images"]:  # none could be read
            return
        found = [self._on_cpu(answer) for answer in self(batch["images"])]
        self.ap.update(found, [self._on_cpu(target) for target in batch["targets"]])

    def on_validation_epoch_end(self) -> None:
        gather_states(self.ap)
        if not self.ap.groundtruth_labels:  # the few images of a first check may all be unreadable
            if self.trainer.sanity_checking:
                return
            raise DataError(
                f"none of the validation images can be read: {summary(list(self.skipped))}; check "
                "the files"
            )
        scores = self.ap.compute()
        self.ap.reset()
        kinds = {"bbox_": "", "segm_": "mask_"} if self.has_masks else {"": ""}
        for theirs, ours in kinds.items():
            for key, name in LOGGED.items():
                value = scores[theirs + key].float().to(self.device) * 100
                self.log(f"val/{ours}{name}", value, prog_bar=key == "map", sync_dist=True)

    def card(self) -> dict[str, Any]:
        """What the weights need beside them to be used."""
        return {
            "model": self.hparams["model"],
            "kwargs": self.kwargs,
            "task": "detect",
            "classes": cast(Any, self.trainer).datamodule.classes,
        }

    def _on_cpu(self, found: Target) -> Target:
        """What the metric compares, in the form it wants."""
        names = ("boxes", "labels", "scores", "iscrowd", "area")
        kept = {name: found[name].cpu() for name in names if name in found}
        kept |= {name: v.float() for name, v in kept.items() if v.is_floating_point()}
        if self.has_masks:
            masks = found["masks"].cpu()
            if masks.ndim == 4:  # (N, 1, H, W) of probabilities
                masks = masks[:, 0] > MASK_THRESHOLD
            kept["masks"] = masks.bool()
        return kept


def _metric(*, masks: bool) -> MeanAveragePrecision:
    metric = MeanAveragePrecision(
        iou_type=("bbox", "segm") if masks else "bbox",
        backend="faster_coco_eval",
        sync_on_compute=False,  # `gather_states` does it
    )
    metric.warn_on_many_detections = False  # COCO counts the 100 surest, as detectors know
    return metric


def gather_states(metric: MeanAveragePrecision) -> None:
    """Gives the metric of every process what those of all have seen.

    The metric's own way needs tensors on the device of the backend, and as many images on every
    process; this one takes lists of any length, on the CPU.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if (processes := distributed.get_world_size()) == 1:
        return
    mine = {name: getattr(metric, name) for name in metric.metric_state}
    everyone: list[Any] = [None] * processes
    distributed.all_gather_object(everyone, mine)
    for name in mine:
        setattr(metric, name, [entry for states in everyone for entry in states[name]])
