# SPDX-License-Identifier: Apache-2.0
"""Batches: the same on every path, whole in spite of bad files, the same again after a resume."""

import numpy as np
import pytest
import torch

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.classify.data import MEAN, STD, ClassifyData, GeneratedClassifyData
from tests.support.commands import refusal
from tests.support.training import batches
from tests.tasks.classify.test_readers import encoded, make_folder, make_npz, picture


def generated(**options):
    options = {"image_size": 24, "batch_size": 4, "generated_count": 16, "workers": 0} | options
    return GeneratedClassifyData(stored_size=32, **options)


def from_folder(root, **options):
    options = {"image_size": 16, "batch_size": 3, "augment": "none", "workers": 0} | options
    return ClassifyData(root=str(root), **options)


@pytest.mark.parametrize("augment", ["timm", "batch", "none"])
def test_shapes(augment):
    train, val = (batches(generated(augment=augment), split) for split in ("train", "val"))
    assert (len(train), len(val)) == (4, 1)
    for batch in train + val:
        assert (batch["images"].shape, batch["images"].dtype) == ((4, 3, 24, 24), torch.float32)
        assert batch["labels"].shape == batch["indices"].shape == (4,)
        assert torch.equal(batch["labels"], batch["indices"] % 4)
    assert sorted(torch.cat([b["indices"] for b in train]).tolist()) == list(range(16))
    assert torch.cat([b["indices"] for b in val]).tolist() == list(range(4))


@pytest.mark.parametrize("augment", ["timm", "batch"])
def test_training_is_augmented_by_the_seed_and_goes_on_the_same(augment):
    data = generated(augment=augment)
    epochs = [batches(data, epoch=epoch) for epoch in (0, 1)]
    first, second = (
        {
            int(i): x
            for batch in epoch
            for i, x in zip(batch["indices"], batch["images"], strict=True)
        }
        for epoch in epochs
    )
    assert all(not torch.equal(first[i], second[i]) for i in range(16))
    seen = [batches(data, "val", epoch=epoch)[0]["images"] for epoch in (0, 1)]
    assert torch.equal(*seen)
    torch.manual_seed(123)
    (resumed,) = batches(generated(augment=augment), skip=3)
    for name in ("indices", "images"):
        assert torch.equal(resumed[name], epochs[0][3][name])
    other = batches(generated(augment=augment, seed=1))
    assert not torch.equal(other[0]["images"], epochs[0][0]["images"])


def test_images_in_memory_are_normalised_like_those_of_timm():
    """Images that need no resizing: both ways only normalise them."""
    same_size = {"image_size": 32, "eval_crop": 1.0}
    by_timm, in_memory = (
        batches(generated(augment=augment, **same_size), "val")[0]["images"]
        for augment in ("none", "batch")
    )
    torch.testing.assert_close(in_memory, by_timm, rtol=0, atol=1e-5)
    (pixels,) = generated().source("val").images(0)
    expected = (np.asarray(pixels) / 255 - np.array(MEAN)) / np.array(STD)
    got = by_timm[0].permute(1, 2, 0).double()
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=0, atol=1e-5)


def test_images_in_memory_are_the_middle_of_wide_ones(tmp_path):
    data = from_folder(make_folder(tmp_path), augment="batch", stored_size=12)
    data.setup("fit")
    stored = data._stored["train"].images
    assert (stored.shape, stored.dtype) == ((6, 3, 12, 12), torch.uint8)
    middle = np.asarray(data.source("train").images(0)[0])[:, 4:16]  # of 20 x 12
    assert np.array_equal(stored[0].permute(1, 2, 0), middle)


def test_bad_file_in_memory_is_replaced_and_reported_or_refused(tmp_path, capfd):
    bad = make_folder(tmp_path) / "train" / "dog" / "1.jpg"
    bad.write_bytes(encoded(picture())[:150])
    found = batches(from_folder(tmp_path, augment="batch"))
    told = capfd.readouterr().err
    assert told.startswith(f"quadtree: train: replaced 1 unreadable images: cannot decode {bad}: ")
    assert told.count("cannot decode") == 1
    refused = refusal(DataError, batches, from_folder(tmp_path, augment="batch", strict=True))
    assert refused.startswith(f"cannot decode {bad}: ")
    assert refused.endswith("; fix it, or leave out --data.strict")
    indices = torch.cat([batch["indices"] for batch in found]).tolist()
    assert sorted(indices) == [0, 1, 2, 3, 5, 5]  # the next one in its place
    labels = torch.cat([batch["labels"] for batch in found])
    assert torch.equal(labels, torch.tensor(indices) // 3)


def test_npz(tmp_path):
    for split, count in (("train", 6), ("val", 5)):
        make_npz(tmp_path, split, count)
    data = from_folder(tmp_path, augment="batch", stored_size=12)
    assert (data.classes, len(batches(data))) == (["0", "1"], 2)
    assert [b["indices"].tolist() for b in batches(data, "val")] == [[0, 1, 2], [3, 4]]
    make_npz(tmp_path, labels=np.array([0, -1, 1, -1, 0]))
    with pytest.raises(DataError, match="2 of 5 images of train have no label"):
        _ = from_folder(tmp_path).classes
