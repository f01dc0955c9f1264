# SPDX-License-Identifier: Apache-2.0
"""The classifier in training: its optimizer and schedule, its losses, its weights."""

import math

import pytest
import torch

from quadtree_attention.nn.block import DropPath
from quadtree_attention.tasks.classify.data import GeneratedClassifyData
from quadtree_attention.tasks.classify.module import ClassifyModule
from tests.support import training
from tests.support.training import Rates

EPOCHS, STEPS = 5, 4  # per epoch


def build(**options):
    options = {"num_classes": 4, "mixup": 0.0, "cutmix": 0.0, "seed": 2} | options
    return ClassifyModule("test_quadtree", {"backend": "reference"}, **options)


def fit(folder, module, *callbacks, batch_size=8, **options):
    sizes = {"image_size": 32, "stored_size": 32, "generated_count": batch_size * STEPS}
    data = GeneratedClassifyData(batch_size=batch_size, augment="batch", **sizes)
    return training.fit(folder, module, data, *callbacks, **{"max_epochs": 1} | options)


def test_schedule(tmp_path):
    """Warm-up from nearly nothing, then half a cosine; at 1/128 of the batch of 1024."""
    rates = Rates()
    fit(tmp_path, build(lr=0.128, min_lr=0.0128, warmup_epochs=2), rates, max_epochs=EPOCHS)
    steps, warm = EPOCHS * STEPS, 2 * STEPS
    expected = [1e-6 + (0.128 - 1e-6) * step / warm for step in range(warm)]
    shares = [(1 + math.cos(math.pi * step / steps)) / 2 for step in range(warm, steps)]
    expected += [0.0128 + (0.128 - 0.0128) * share for share in shares]
    assert rates.seen == pytest.approx([rate * 8 / 1024 for rate in expected], rel=1e-6)


def step(module, count, monkeypatch):
    """The loss of a training step on `count` images, without a trainer."""
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    torch.manual_seed(0)
    labels = torch.arange(count) % 4
    batch = {"images": torch.rand(count, 3, 32, 32), "labels": labels, "skipped": []}
    return module.training_step(batch, 1)


@pytest.mark.parametrize(
    "options",
    [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1}, {"label_smoothing": 0.4}],
)
def test_mixing_and_smoothing_change_the_loss(monkeypatch, options):
    for count in (4, 3):
        plain = step(build(drop_path=0.0, label_smoothing=0.0), count, monkeypatch)
        mixed = step(
            build(**{"drop_path": 0.0, "label_smoothing": 0.0} | options), count, monkeypatch
        )
        assert torch.isfinite(mixed)
        assert (plain != mixed) == (count == 4 or "label_smoothing" in options)  # timm mixes pairs


def test_drop_path_reaches_the_blocks():
    for share in (0.4, 0.0):
        modules = build(drop_path=share).modules()
        rates = [module.rate for module in modules if isinstance(module, DropPath)]
        assert max(rates) == pytest.approx(share)
