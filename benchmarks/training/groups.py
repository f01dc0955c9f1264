# SPDX-License-Identifier: Apache-2.0
"""Scores of a trained network by groups of images, for differences that are paired by image.

After its last epoch a run is validated once more, image by image. Validation images are drawn into
groups at random, the same in all runs; stored are the scores of all images and those without each
group, for a jackknife. Scores that are no means over images, such as AP and mIoU, are computed anew
without the group.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from quadtree_attention.files import write_whole
from quadtree_attention.tasks.training.module import TaskModule

GROUPS = 50
FILE = "groups.json"

Sample = tuple[list[tuple[str, float, int]], Any]  # name, mean and count; state of the metric


class GroupScores(Callback):
    """Writes `groups.json` to the folder of the run when training ends."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TaskModule)
        modes = {module: module.training for module in pl_module.modules()}
        trainer.validating = True  # images are prepared as in validation
        pl_module.eval()
        try:
            with torch.no_grad(), trainer.precision_plugin.val_step_context():
                samples = [_sample(pl_module, one) for one in _images(trainer, pl_module)]
        finally:
            trainer.training = True
            for module, mode in modes.items():
                module.training = mode
        scores = group_scores(pl_module, samples)
        write_whole(Path(trainer.default_root_dir) / FILE, json.dumps(scores).encode())


def _images(trainer: Any, module: TaskModule) -> Iterator[dict[str, Any]]:
    """Batches of one validation image or pair each, on the device."""
    data = trainer.datamodule
    data.eval_batch_size = 1
    for batch in data.val_dataloader():
        batch = data.transfer_batch_to_device(batch, module.device, 0)
        yield data.on_after_batch_transfer(batch, 0)


def _sample(module: TaskModule, batch: dict[str, Any]) -> Sample:
    logged: list[tuple[str, float, int]] = []

    def log_mean(name: str, value: Tensor | float, count: int, **_: Any) -> None:
        logged.append((name.removeprefix("val/"), float(value), count))

    module.metric = module.new_metric()
    module.log_mean = log_mean  # type: ignore[method-assign]
    try:
        module.validate(batch)
    finally:
        del module.log_mean
    return logged, None if module.metric is None else module.metric.state()


def group_scores(module: TaskModule, samples: Sequence[Sample]) -> dict[str, Any]:
    """`samples`, `whole` (scores of all), and `left_out` (of all but each group), by name."""
    count = min(GROUPS, len(samples))
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    group = {sample: place % count for place, sample in enumerate(order)}
    whole = _scores(module, samples)
    parts = [
        _scores(module, [s for i, s in enumerate(samples) if group[i] != g])
        for g in range(count if count > 1 else 0)
    ]
    left_out = {name: [part.get(name, math.nan) for part in parts] for name in whole}
    return {"samples": len(samples), "whole": whole, "left_out": left_out}


def _scores(module: TaskModule, samples: Sequence[Sample]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for name, value, count in (entry for logged, _ in samples for entry in logged):
        total = sums.setdefault(name, [0.0, 0.0])
        total[0] += value * count
        total[1] += count
    found = {name: round(total / count, 6) for name, (total, count) in sums.items() if count}
    metric = module.new_metric()
    if metric is None or not samples:
        return found
    metric.merge([state for _, state in samples])
    return found | {name: round(value, 6) for name, value in module.scores(metric).items()}
