# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written atomically and read without executing code."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import TorchCheckpointIO

from quadtree_attention.errors import CheckpointError, OptionError

LAST = "last.ckpt"
BEST = "best.ckpt"


class SafeCheckpointIO(TorchCheckpointIO):
    """Checkpoint IO that writes atomically, and reads tensors and plain values only."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        target = Path(path)
        # One name for all: the next run overwrites the large file of a killed run
        unfinished = target.with_name(target.name + ".unfinished")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                unfinished.unlink()
            is_there = target.with_name(LAST).exists()
            # On a full disk torch's writer raises a RuntimeError while it handles the OSError
            cause = error.__context__ if isinstance(error, RuntimeError) else error
            reason = getattr(cause, "strerror", None) or str(error).splitlines()[0]
            raise CheckpointError(
                f"cannot save the checkpoint {target}: {reason}; make room "
                f"there and {f'go on from {LAST} with --resume' if is_there else 'start again'}"
            ) from error

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        return read_training_checkpoint(path)


def read_training_checkpoint(path: Any) -> dict[str, Any]:
    """Read a training checkpoint.

    Raises:
        CheckpointError: The file does not exist, is damaged, or would execute code.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no checkpoint {path}; pass one that a run has written, such as its {LAST}"
        ) from None
    except Exception as error:  # damaged files raise many kinds of errors
        reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise CheckpointError(
            f"cannot read the checkpoint {path}{reason}: it is damaged, or no training run wrote "
            f"it; nothing in it was executed; pass one that a run has written, such as its {LAST}"
        ) from error
    if not isinstance(state, dict) or "state_dict" not in state or "loops" not in state:
        raise CheckpointError(
            f"{path} is not the checkpoint of a training run; pass one that a run has written, "
            f"such as its {LAST}"
        )
    return state


class LastCheckpoint(Callback):
    """Callback that writes `last.ckpt` every `every_n_steps` steps and after every epoch.

    A run that ends inside an epoch, by `max_steps` or `max_time`, can be resumed there.

    Args:
        every_n_steps: Optimizer steps between two checkpoints inside an epoch.
    """

    def __init__(self, every_n_steps: int = 500) -> None:
        if every_n_steps < 1:
            raise OptionError(f"--save_every must be at least 1, got {every_n_steps}; pass more")
        self.every_n_steps = every_n_steps
        self.saved_step = -1

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_last_batch:
            return  # the epoch ends, and is validated first
        step = trainer.global_step
        due = step % self.every_n_steps == 0 or step == trainer.max_steps or trainer.should_stop
        if due and step != self.saved_step:
            self.saved_step = step
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_last_batch:  # an interrupted epoch would count as complete
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        assert trainer.default_root_dir is not None
        trainer.save_checkpoint(Path(trainer.default_root_dir) / LAST)
