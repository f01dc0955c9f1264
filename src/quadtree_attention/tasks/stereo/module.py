# SPDX-License-Identifier: Apache-2.0
"""Training of a stereo network."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from quadtree_attention.models.stereo import STTR
from quadtree_attention.tasks.stereo import TASK
from quadtree_attention.tasks.stereo.losses import stereo_losses
from quadtree_attention.tasks.stereo.metrics import scores
from quadtree_attention.tasks.training.data import Batch
from quadtree_attention.tasks.training.module import NoDecay, TaskModule

Schedule = Literal["cosine", "onecycle", "step"]
LOGGED = ("epe_all", "epe_noc", "bad3_all", "d1_all", "occlusion_iou", "occlusion_iou_both")
TRUTH = ("disparity0", "known0", "occluded0", "visible0")


class StereoModule(TaskModule):
    """A stereo network, trained on rectified pairs with known disparity.

    The best epoch is the one with most pixels within 3 pixels of the truth (`val/good3`).

    Args:
        model: Name of a network: sttr, sttr_quadtree or sttr_quadtree_small.
        options: Keyword arguments of `STTR` that override the options of the name.
        weights: Initial weights of the same network: a file, or "default" for the packaged weights.
        lr: Learning rate at a batch of 8 pairs on all processes together; scaled linearly.
        min_lr: Final learning rate of cosine and onecycle, at the same batch size.
        warmup_epochs: Epochs in which the learning rate rises to `lr`.
        warmup_start: Initial rate of warm-up as a share of `lr`; None: an absolute rate of 1e-6.
        schedule: "cosine", "onecycle" (PyTorch's OneCycleLR), or "step" (the learning rate times
            `decay` from each of `decay_epochs` on).
        decay_epochs: Epochs of the steps.
        decay: Factor of the learning rate at a step.
        weight_decay: Weight decay of AdamW.
        no_decay: Parameters without decay: "vectors" (norms, biases and level weights), "norms", or
            "nothing".
        head_lr: Factor of the learning rate of assignment and refinement.
        grad_checkpointing: Recompute layers in backward to save memory.
        compile: Compile the convolutional parts with `torch.compile`.
        seed: Seed of weights.
    """

    task = TASK
    monitor = "val/good3"
    batch_of_lr = 8
    schedules = get_args(Schedule)
    heads = ("assignment.", "refinement.")
    model: STTR

    def __init__(
        self,
        model: str = "sttr_quadtree_small",
        options: dict[str, Any] | None = None,
        weights: str | None = None,
        lr: float = 6e-4,
        min_lr: float = 1e-6,
        warmup_epochs: float = 1,
        warmup_start: float | None = None,
        schedule: Schedule = "cosine",
        decay_epochs: Sequence[float] = (),
        decay: float = 0.1,
        weight_decay: float = 1e-4,
        no_decay: NoDecay = "vectors",
        head_lr: float = 1.0,
        grad_checkpointing: bool = False,
        compile: bool = False,  # noqa: A002 (what users call it)
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(model, options, weights=weights)

    def compile_model(self) -> None:
        self.model.features.compile(dynamic=False)
        self.model.refinement.compile(dynamic=False)

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        output = self.model(batch, true_disparity=batch["disparity0"])
        parts = stereo_losses(output, batch, self.model.at_cells, self.model.max_disparity)
        return sum(parts.values(), start=output.disparity.new_zeros(())), parts

    def validate(self, batch: Batch) -> None:
        output = self.model(batch)
        for i in range(len(batch["image0"])):
            disparity, known, occluded, visible = (batch[name][i] for name in TRUTH)
            predicted = output.disparity[i], disparity, known, occluded, output.occlusion[i]
            found = scores(*predicted, visible=visible)
            logged = {name: found[name] for name in LOGGED} | {"good3": 100 - found["bad3_all"]}
            for name, value in logged.items():
                if value == value:  # NaN: no such pixel
                    on_bar = name in ("epe_all", "good3")
                    self.log_mean(f"val/{name}", value, 1, prog_bar=on_bar)
