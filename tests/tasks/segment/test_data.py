# SPDX-License-Identifier: Apache-2.0
"""Batches: crops and whole images, the same after a stop, bad files counted and replaced."""

import pytest
import torch
from PIL import Image

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.segment.data import GeneratedSegmentData, SegmentData
from quadtree_attention.tasks.segment.metrics import IGNORE
from tests.support.commands import refusal
from tests.tasks.segment.files import CLASSES, label_map, write_set


@pytest.fixture
def root(tmp_path):
    return write_set(tmp_path / "data", count=6)


def data(root, **options):
    usual = {"height": 24, "width": 32, "batch_size": 2, "workers": 0, "seed": 5}
    return SegmentData(str(root), **{**usual, **options})


def test_batches(root):
    found = data(root)
    found.setup("fit")
    assert (found.classes, len(found.palette), found.batches_per_epoch) == (CLASSES, 3, 3)
    batches = list(found.train_dataloader())
    assert len(batches) == 3
    for batch in batches:
        assert batch["images"].shape == (2, 3, 24, 32) and batch["images"].dtype == torch.uint8
        assert batch["labels"].shape == (2, 24, 32) and batch["skipped"] == []
        assert set(batch["labels"].unique().tolist()) <= {IGNORE, 0, 1, 2}


def test_validation_sees_whole_images(root):
    Image.new("RGB", (30, 44)).save(root / "images/val/0.png")
    Image.fromarray(label_map(44, 30)).save(root / "labels/val/0.png")
    (batch, *_) = data(root, eval_batch_size=4, base_size=20).val_dataloader()
    assert [tuple(image.shape) for image in batch["images"]] == [(3, 29, 20), *[(3, 20, 28)] * 3]
    assert [tuple(labels.shape) for labels in batch["labels"]] == [(44, 30), *[(40, 56)] * 3]
    found = GeneratedSegmentData(height=32, width=32, generated_count=8, workers=0)
    assert len(found.classes) == 4 and len(list(found.val_dataloader())) == 2


def test_strict_looks_at_all_files_first(root):
    (root / "images/train/1.png").write_bytes(b"hello")
    Image.fromarray(label_map(9, 9)).save(root / "labels/train/2.png")
    (root / "labels/train/5.png").unlink()
    told = refusal(DataError, data(root, strict=True).setup, "fit")
    assert told.startswith("3 files of train cannot be used: ")
    assert all(reason in told for reason in ("has no label map", "cannot decode", "9x9 pixels"))
