# SPDX-License-Identifier: Apache-2.0
"""What the Lightning modules of all tasks have in common."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import pytorch_lightning as pl
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.training.loader import seed_from, set_seed
from quadtree_attention.tasks.training.steps import run_length

CHECK_EVERY = 20  # batches; looking at the loss makes a GPU wait


def check_options(options: Mapping[str, Any] | None, **instead: str) -> None:
    """Refuses options of a network that something else sets; `instead` says what, by option.

    Raises:
        OptionError: The options name one of them.
    """
    for name in options or {}:
        if name in instead:
            raise OptionError(
                f"options must not name {name}, which is set by {instead[name]}; leave it out of "
                "--model.options"
            )


class FollowsFromStep:
    """A schedule that follows from the step alone, so that a longer run has a longer one."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class CosineSchedule(FollowsFromStep, CosineLRScheduler):
    """Half a cosine from the learning rate to its least."""


class TaskModule(pl.LightningModule):
    """A network in `model`, trained by AdamW with warm-up and, unless said otherwise, cosine decay.

    Subclasses save their arguments as hyperparameters, among them `seed`, `lr`, `min_lr`,
    `warmup_epochs` and `weight_decay`, and define the steps, `monitor`, `batch_of_lr` and `card`.
    """

    monitor: ClassVar[str]  # the metric whose highest value marks the best epoch
    batch_of_lr: ClassVar[int]  # samples of a batch, on all processes, that `lr` is meant for
    # From a property of the data to an argument of the module, and what is made of it on the way
    links: ClassVar[dict[str, tuple[str, Callable[[Any], Any]]]] = {}

    model: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[str, None] = {}  # files that cannot be used, in the order they were met
        self._told = 0

    def card(self) -> dict[str, Any]:
        """What the weights need beside them to be used."""
        raise NotImplementedError

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # All that is drawn in a step depends on the number of its batch alone, so that a run that
        # was stopped goes on as if it had not been.
        numbers = (self.hparams["seed"], self.current_epoch, batch_idx, self.global_rank)
        set_seed(seed_from(*numbers))

    def note_skipped(self, batch: Mapping[str, Any]) -> None:
        """Remembers the files that a batch has to do without, to be told after the epoch."""
        self.skipped |= dict.fromkeys(batch.get("skipped", ()))

    def on_train_epoch_end(self) -> None:
        if new := list(self.skipped)[self._told :]:
            self._told = len(self.skipped)
            print(
                f"quadtree: skipped {self._told} unusable files so far: {summary(new)}",
                file=sys.stderr,
            )

    def configure_optimizers(self) -> Any:
        trainer, h = self.trainer, self.hparams
        data = cast(Any, trainer).datamodule
        samples = data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
        scale = samples / self.batch_of_lr
        optimizer = create_optimizer_v2(
            self.model, opt="adamw", lr=h["lr"] * scale, weight_decay=h["weight_decay"]
        )
        steps, epochs = run_length(trainer, data.batches_per_epoch)
        scheduler = self.schedule(
            optimizer,
            steps,
            steps / epochs,
            min_lr=h["min_lr"] * scale,
            warmup_t=min(steps, round(h["warmup_epochs"] * steps / epochs)),
            warmup_lr_init=1e-6 * scale,
            warmup_prefix=False,
            t_in_epochs=False,
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def schedule(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        steps_per_epoch: float,
        *,
        min_lr: float,
        **warmup: Any,
    ) -> Any:
        """The learning rate over the steps of a run; `warmup` are options of timm's schedulers."""
        return CosineSchedule(optimizer, t_initial=steps, lr_min=min_lr, **warmup)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.global_step)

    def weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The network's own tensors out of the state dict of this module."""
        return {
            name.removeprefix("model."): tensor
            for name, tensor in state.items()
            if name.startswith("model.")
        }

    def check_loss(self, loss: Tensor, batch_idx: int) -> None:
        """Ends a run that cannot come to anything, with advice."""
        if batch_idx % CHECK_EVERY == 0 and not torch.isfinite(loss.detach()):
            raise OptionError(
                f"the loss is {loss.item()} at step {self.global_step}; training cannot go on: "
                "lower --model.lr, clip gradients with --trainer.gradient_clip_val, or use "
                "--trainer.precision bf16-mixed"
            )

    def log_mean(self, name: str, value: Tensor | float, count: int, **options: Any) -> None:
        """Logs the mean over an epoch and all processes."""
        options = {"sync_dist": True, "on_step": False, "on_epoch": True, **options}
        self.log(name, value, batch_size=count, **options)
