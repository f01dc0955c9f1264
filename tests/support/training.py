# SPDX-License-Identifier: Apache-2.0
"""Training runs in tests."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytorch_lightning as pl

from quadtree_attention.tasks.training.run import run_command

QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
}  # fmt: skip


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A trainer on the CPU that shows nothing and stores no checkpoint of its own."""
    return pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **QUIET | options)


def fit(folder: Path, module: Any, data: Any, *callbacks: pl.Callback, **options: Any) -> Any:
    """The trainer after training; `checkpoint` is where it goes on from."""
    checkpoint = options.pop("checkpoint", None)
    run = trainer(folder, *callbacks, **options)
    run.fit(module, datamodule=data, ckpt_path=checkpoint)
    return run


def train(task: str, recipe: Path | str, folder: Path, *options: str) -> list[dict[str, str]]:
    """The history of a run from a recipe, without a progress bar."""
    quiet = "--trainer.enable_progress_bar=false"
    run_command(task, ["--config", str(recipe), "--run_dir", str(folder), quiet, *options])
    return history(folder)


def history(folder: Path) -> list[dict[str, str]]:
    """The rows of `history.csv`."""
    return list(csv.DictReader((folder / "history.csv").open()))


def batches(data: Any, split: str = "train", *, epoch: int = 0, skip: int = 0) -> list[Any]:
    """The batches of an epoch as a network gets them, those after the first `skip`."""
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, training=split == "train")
    loader = data.train_dataloader() if split == "train" else data.val_dataloader()
    loader.load_state_dict({"epoch": epoch, "batches": skip})
    return [data.on_after_batch_transfer(batch, 0) for batch in loader]


class Rates(pl.Callback):
    """The learning rate that every step is made with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


class SaveAt(pl.Callback):
    """Stores the state after a step, as a run that is killed there would have it."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
