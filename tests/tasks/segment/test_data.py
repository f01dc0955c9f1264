# SPDX-License-Identifier: Apache-2.0
"""Batches: crops and whole images, the same after a stop, bad files counted and replaced."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.segment.data import GeneratedSegmentData, SegmentData
from quadtree_attention.tasks.segment.metrics import IGNORE
from tests.tasks.segment.files import CLASSES, label_map, write_set


@pytest.fixture
def root(tmp_path):
    return write_set(tmp_path / "data", count=6)


def data(root, **options):
    usual = {"height": 24, "width": 32, "batch_size": 2, "workers": 0, "seed": 5}
    return SegmentData(str(root), **{**usual, **options})


def assert_same(batch, other):
    assert torch.equal(batch["images"], other["images"])
    assert torch.equal(batch["labels"], other["labels"])


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


def test_the_same_batches_from_workers_and_after_a_stop(root):
    expected = list(data(root).train_dataloader())
    for batch, other in zip(data(root, workers=2).train_dataloader(), expected, strict=True):
        assert_same(batch, other)
    stopped = data(root).train_dataloader()
    next(iter(stopped))
    resumed = data(root).train_dataloader()
    resumed.load_state_dict(stopped.state_dict())
    rest = list(resumed)
    assert len(rest) == 2
    for batch, other in zip(rest, expected[1:], strict=True):
        assert_same(batch, other)
    other_seed = list(data(root, seed=6).train_dataloader())
    assert not torch.equal(other_seed[0]["images"], expected[0]["images"])


def test_validation_sees_whole_images(root):
    Image.new("RGB", (30, 44)).save(root / "images/val/0.png")
    Image.fromarray(label_map(44, 30)).save(root / "labels/val/0.png")
    (batch, *_) = data(root, eval_batch_size=4, base_size=20).val_dataloader()
    assert [tuple(image.shape) for image in batch["images"]] == [(3, 29, 20), *[(3, 20, 28)] * 3]
    assert [tuple(labels.shape) for labels in batch["labels"]] == [(44, 30), *[(40, 56)] * 3]


def test_bad_files_are_replaced_and_named(root, capsys):
    (root / "images/train/1.png").write_bytes(b"hello")
    Image.fromarray(np.full((40, 56), 77, np.uint8)).save(root / "labels/train/2.png")
    (root / "images/train/5.png").unlink()
    found = data(root, batch_size=5)
    found.setup("fit")
    assert "train: skipped 1 files: " in capsys.readouterr().err
    (batch,) = found.train_dataloader()
    assert len(batch["images"]) == 5
    told = "\n".join(sorted(set(batch["skipped"])))
    assert "cannot decode" in told and "unknown classes 77" in told
    whole = {"height": 40, "width": 56, "scale_min": 1, "scale_max": 1, "flip": 0, "jitter": False}
    sample = data(root, **whole).read("train", 1)
    expected = np.asarray(Image.open(root / "images/train/3.png"))
    assert np.array_equal(sample["images"].permute(1, 2, 0), expected)
    assert (sample["indices"], len(sample["skipped"])) == (3, 2)


def test_bad_files_are_left_out_of_validation(root):
    (root / "labels/val/1.png").write_bytes(b"")
    batches = list(data(root, eval_batch_size=4).val_dataloader())
    assert [len(batch["images"]) for batch in batches] == [3, 2]
    assert ["empty" in reason for batch in batches for reason in batch["skipped"]] == [True]


def test_strict_looks_at_all_files_first(root):
    (root / "images/train/1.png").write_bytes(b"hello")
    Image.fromarray(label_map(9, 9)).save(root / "labels/train/2.png")
    (root / "labels/train/5.png").unlink()
    with pytest.raises(DataError) as caught:
        data(root, strict=True).setup("fit")
    told = str(caught.value)
    assert told.startswith("3 files of train cannot be used: ")
    assert all(reason in told for reason in ("has no label map", "cannot decode", "9x9 pixels"))


def test_nothing_can_be_read(root):
    for path in (root / "images/train").iterdir():
        path.write_bytes(b"hello")
    with pytest.raises(DataError, match="6 images in a row cannot be read: cannot decode"):
        next(iter(data(root).train_dataloader()))


def test_generated_and_limits():
    found = GeneratedSegmentData(height=32, width=32, generated_count=8, workers=0)
    assert len(found.classes) == 4
    with pytest.raises(OptionError, match="8 training images do not fill one batch of 16"):
        found.train_dataloader()
    assert len(list(found.val_dataloader())) == 2
    few = GeneratedSegmentData(limit_images=3, batch_size=1, workers=0)
    assert len(list(itertools.islice(few.train_dataloader(), 9))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 0}, "height must be at least 1, got 0"),
        ({"scale_min": 2.0, "scale_max": 1.0}, "scale_max must be at least 2, got 1"),
        ({"flip": 1.5}, r"flip must be in \[0, 1\], got 1.5"),
        ({"workers": -1}, "workers must be at least 0"),
    ],
)
def test_options_that_do_not_do(root, options, message):
    with pytest.raises(OptionError, match=message):
        data(root, **options)
