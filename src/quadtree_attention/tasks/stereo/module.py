# SPDX-License-Identifier: Apache-2.0
"""Training of a stereo network."""

from typing import Any, cast

from torch import Tensor

from quadtree_attention.files import file_sha256
from quadtree_attention.models.registry import create, weights_path
from quadtree_attention.models.stereo import STTR
from quadtree_attention.models.weights import fill
from quadtree_attention.tasks.stereo.losses import stereo_losses
from quadtree_attention.tasks.stereo.metrics import scores
from quadtree_attention.tasks.training.loader import seed_from, set_seed
from quadtree_attention.tasks.training.module import TaskModule

LOGGED = ("epe_all", "epe_noc", "bad3_all", "d1_all", "occlusion_iou", "occlusion_iou_both")


class StereoModule(TaskModule):
    """A stereo network, trained on rectified pairs with known disparity.

    The best epoch is the one with most pixels within 3 pixels of the truth (`val/good3`).

    Args:
        model: Name of a network: sttr, sttr_quadtree or sttr_quadtree_small.
        options: Keyword arguments of `STTR` that replace those of the name.
        weights: Weights to start from, of such a network: a file, or "default" for those of the
            package.
        lr: Learning rate at a batch of 8 pairs on all processes together; scaled linearly.
        min_lr: Where the cosine ends, at that batch size too.
        warmup_epochs: Epochs in which the learning rate rises to `lr`.
        weight_decay: Of AdamW.
        grad_checkpointing: Take less memory and more time.
        compile: Compile the convolutional parts with `torch.compile`.
        seed: Decides weights.
    """

    monitor = "val/good3"
    batch_of_lr = 8

    def __init__(
        self,
        model: str = "sttr_quadtree_small",
        options: dict[str, Any] | None = None,
        weights: str | None = None,
        lr: float = 6e-4,
        min_lr: float = 1e-6,
        warmup_epochs: float = 1,
        weight_decay: float = 1e-4,
        grad_checkpointing: bool = False,
        compile: bool = False,  # noqa: A002 (what users call it)
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        set_seed(seed_from(seed))  # the same first weights on every process
        self.kwargs = options or {}
        self.model: STTR = cast(STTR, create(model, **self.kwargs))
        self.start = None
        if weights is not None:
            path = weights_path(weights, "stereo")
            fill(self.model, path)
            self.start = file_sha256(path)
        self.model.set_grad_checkpointing(grad_checkpointing)
        if compile:  # in place: the names of the weights stay
            self.model.features.compile(dynamic=False)
            self.model.refinement.compile(dynamic=False)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        output = self.model(batch, true_disparity=batch["disparity0"])
        losses = stereo_losses(output, batch, self.model.at_cells, self.model.max_disparity)
        loss = sum(losses.values(), start=output.disparity.new_zeros(()))
        self.check_loss(loss, batch_idx)
        count = len(batch["image0"])
        self.log_mean("train/loss", loss.detach(), count, prog_bar=True)
        for name, part in losses.items():
            self.log_mean(f"train/{name}", part.detach(), count)
        self.note_skipped(batch)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.note_skipped(batch)
        output = self.model(batch)
        truth = ("disparity0", "known0", "occluded0", "visible0")
        for i in range(len(batch["image0"])):
            disparity, known, occluded, visible = (batch[name][i] for name in truth)
            found = scores(
                output.disparity[i], disparity, known, occluded, output.occlusion[i],
                visible=visible,
            )  # fmt: skip
            for name in LOGGED:
                if found[name] == found[name]:  # else there was no such pixel
                    self.log_mean(f"val/{name}", found[name], 1, prog_bar=name == "epe_all")
            if found["bad3_all"] == found["bad3_all"]:
                self.log_mean("val/good3", 100 - found["bad3_all"], 1, prog_bar=True)

    def card(self) -> dict[str, Any]:
        card = {"model": self.hparams["model"], "kwargs": self.kwargs, "task": "stereo"}
        return card if self.start is None else card | {"started_from": {"sha256": self.start}}
