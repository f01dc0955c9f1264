# SPDX-License-Identifier: Apache-2.0
"""How long a run is."""

import math

import pytorch_lightning as pl

from quadtree_attention.errors import OptionError


def run_length(trainer: pl.Trainer, batches_per_epoch: int) -> tuple[int, float]:
    """Optimizer steps and epochs of a whole run, be it ended by `max_epochs` or by `max_steps`.

    Unlike `Trainer.estimated_stepping_batches` this makes no loader: made before the checkpoint is
    read, a loader would not start where the checkpoint says.

    Raises:
        OptionError: Nothing ends the run.
    """
    limit = trainer.limit_train_batches
    batches = int(batches_per_epoch * limit) if isinstance(limit, float) else limit
    batches = min(batches_per_epoch, batches)
    per_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    epochs = trainer.max_epochs or 1
    if epochs > 0:
        steps = per_epoch * epochs
        steps = min(steps, trainer.max_steps) if trainer.max_steps > 0 else steps
        return steps, steps / per_epoch
    if trainer.max_steps < 1:
        raise OptionError(
            "the schedule needs an end, got a run without one; pass --trainer.max_epochs or "
            "--trainer.max_steps"
        )
    return trainer.max_steps, trainer.max_steps / per_epoch
