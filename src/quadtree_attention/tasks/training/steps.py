# SPDX-License-Identifier: Apache-2.0
"""How long a run is."""

import math

import pytorch_lightning as pl


def total_steps(trainer: pl.Trainer, batches_per_epoch: int) -> int:
    """Optimizer steps of a whole run.

    Unlike `Trainer.estimated_stepping_batches` this makes no loader: made before the checkpoint is
    read, a loader would not start where the checkpoint says.
    """
    limit = trainer.limit_train_batches
    batches = int(batches_per_epoch * limit) if isinstance(limit, float) else limit
    batches = min(batches_per_epoch, batches)
    steps = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    total = steps * (trainer.max_epochs or 1)
    return min(total, trainer.max_steps) if trainer.max_steps > 0 else total
