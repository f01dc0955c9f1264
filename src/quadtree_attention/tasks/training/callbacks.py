# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a run: progress bar, table of epochs, and curves."""

import csv
import io
import time
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, TQDMProgressBar

from quadtree_attention.files import write_whole

Row = dict[str, float]


class Progress(TQDMProgressBar):
    """Progress bar that also shows samples per second and the time left until the last epoch."""

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._began = 0.0
        self._steps = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self._began, self._steps = time.monotonic(), 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._steps += 1
        super().on_train_batch_end(trainer, *args)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if trainer.training and self._steps:
            seconds = (time.monotonic() - self._began) / self._steps
            samples = cast(Any, trainer).datamodule.batch_size * trainer.world_size
            metrics["images/s"] = f"{samples / seconds:.0f}"
            if trainer.max_epochs and trainer.max_epochs > 0:
                done = trainer.current_epoch * trainer.num_training_batches
                done += trainer.fit_loop.batch_idx + 1  # more than steps after a resume
                total = trainer.max_epochs * trainer.num_training_batches
                minutes, left = divmod(int((total - done) * seconds), 60)
                hours, minutes = divmod(minutes, 60)
                metrics["left"] = f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{left:02d}s"
        return metrics


class History(Callback):
    """Writes `history.csv`, one row per epoch, and `curves.png` beside it.

    On a GPU a row also has the peak memory (`peak_mib`). Rows of epochs without validation have no
    validation metrics.

    The rows are part of the checkpoint, so that a resumed run keeps them. Metrics named `train/x`
    and `val/x` share the plot of `x`.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._began = 0.0
        self._validated = False

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = [dict(row) for row in state["rows"]]

    def on_train_epoch_start(self, *_: Any) -> None:
        self._began = time.monotonic()
        self._validated = False

    def on_validation_end(self, *_: Any) -> None:
        self._validated = True

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # the trainer still reports the metrics of the last validation
        told = ("train/", "val/") if self._validated else ("train/",)
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith(told)
        }
        epoch = trainer.current_epoch + 1
        seconds = time.monotonic() - self._began
        self.rows = [row for row in self.rows if row["epoch"] < epoch]
        row = {"epoch": epoch, "seconds": round(seconds, 3)}
        device = trainer.strategy.root_device
        if device.type == "cuda":
            row["peak_mib"] = round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
        self.rows.append(row | metrics)
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_table(self.rows, folder / "history.csv")
            draw_curves(self.rows, folder / "curves.png")


def write_table(rows: list[Row], path: Path) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


def draw_curves(rows: list[Row], path: Path) -> None:
    """Draw one plot per metric over epochs, for training and validation."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:  # training continues without plots
        return

    names = {name for row in rows for name in row if "/" in name}
    metrics = sorted({name.split("/", 1)[1] for name in names} - {"lr"})
    if not metrics:
        return
    figure = Figure(figsize=(4.5 * len(metrics), 3.4), layout="constrained")
    places = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(places, metrics, strict=True):
        for part, colour in (("train", "tab:gray"), ("val", "tab:blue")):
            points = [(r["epoch"], r[f"{part}/{metric}"]) for r in rows if f"{part}/{metric}" in r]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, label=part, marker=".", ms=3)
        axes.set(title=metric, xlabel="epoch")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_whole(path, picture.getvalue())
