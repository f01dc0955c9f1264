# SPDX-License-Identifier: Apache-2.0
"""Batches: the same on every path, whole in spite of bad files, the same again after a resume."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.classify.data import MEAN, STD, ClassifyData, GeneratedClassifyData
from tests.support import training
from tests.support.commands import refusal
from tests.support.training import SaveAt
from tests.tasks.classify.test_readers import encoded, make_folder, make_npz, picture


def generated(**options):
    options = {"image_size": 24, "batch_size": 4, "generated_count": 16, "workers": 0} | options
    return GeneratedClassifyData(stored_size=32, **options)


def from_folder(root, **options):
    options = {"image_size": 16, "batch_size": 3, "augment": "none", "workers": 0} | options
    return ClassifyData(root=str(root), **options)


class Recorder(pl.LightningModule):
    """Keeps the batches that a trainer hands to it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = {"train": [], "val": []}

    def training_step(self, batch, index):
        self.keep("train", batch)
        return self.weight

    def validation_step(self, batch, index):
        self.keep("val", batch)

    def keep(self, split, batch):
        self.seen[split].append({k: v.clone() for k, v in batch.items() if torch.is_tensor(v)})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, data, *callbacks, **options):
    """The batches that training has seen."""
    module = Recorder()
    training.fit(folder, module, data, *callbacks, **{"max_epochs": 1} | options)
    return module.seen


@pytest.mark.parametrize("augment", ["timm", "batch", "none"])
def test_shapes(tmp_path, augment):
    seen = fit(tmp_path, generated(augment=augment))
    assert [len(batches) for batches in seen.values()] == [4, 1]
    for batch in seen["train"] + seen["val"]:
        assert (batch["images"].shape, batch["images"].dtype) == ((4, 3, 24, 24), torch.float32)
        assert batch["labels"].shape == batch["indices"].shape == (4,)
        assert torch.equal(batch["labels"], batch["indices"] % 4)
    assert sorted(torch.cat([b["indices"] for b in seen["train"]]).tolist()) == list(range(16))
    assert torch.cat([b["indices"] for b in seen["val"]]).tolist() == list(range(4))


@pytest.mark.parametrize("augment", ["timm", "batch"])
def test_training_is_augmented_by_the_seed_and_goes_on_the_same(tmp_path, augment):
    path = tmp_path / "third.ckpt"
    seen = fit(tmp_path, generated(augment=augment), SaveAt(3, path), max_epochs=2)
    train = [{int(i): x for b in bs for i, x in zip(b["indices"], b["images"], strict=True)}
             for bs in (seen["train"][:4], seen["train"][4:])]  # fmt: skip
    assert all(not torch.equal(train[0][i], train[1][i]) for i in range(16))
    assert torch.equal(seen["val"][0]["images"], seen["val"][1]["images"])
    torch.manual_seed(123)
    options = {"checkpoint": path, "max_epochs": 2}
    resumed = fit(tmp_path, generated(augment=augment), **options)["train"]
    assert len(resumed) == 5
    for batch, expected in zip(resumed, seen["train"][3:], strict=True):
        assert torch.equal(batch["indices"], expected["indices"])
        assert torch.equal(batch["images"], expected["images"])
    other = fit(tmp_path, generated(augment=augment, seed=1))["train"]
    assert not torch.equal(other[0]["images"], seen["train"][0]["images"])


def test_images_in_memory_are_normalised_like_those_of_timm(tmp_path):
    """Images that need no resizing: both ways only normalise them."""
    same_size = {"image_size": 32, "eval_crop": 1.0}
    by_timm = fit(tmp_path, generated(augment="none", **same_size))["val"][0]
    in_memory = fit(tmp_path, generated(augment="batch", **same_size))["val"][0]
    torch.testing.assert_close(in_memory["images"], by_timm["images"], rtol=0, atol=1e-5)
    (pixels,) = generated().source("val").images(0)
    expected = (np.asarray(pixels) / 255 - np.array(MEAN)) / np.array(STD)
    got = by_timm["images"][0].permute(1, 2, 0).double()
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=0, atol=1e-5)


def test_images_in_memory_are_the_middle_of_wide_ones(tmp_path):
    data = from_folder(make_folder(tmp_path), augment="batch", stored_size=12)
    data.setup("fit")
    stored = data._stored["train"].images
    assert (stored.shape, stored.dtype) == ((6, 3, 12, 12), torch.uint8)
    middle = np.asarray(data.source("train").images(0)[0])[:, 4:16]  # of 20 x 12
    assert np.array_equal(stored[0].permute(1, 2, 0), middle)


def read_everything(data):
    data.setup("fit")
    return list(data.train_dataloader())


@pytest.mark.parametrize("augment", ["none", "batch"])
def test_bad_file_is_replaced_and_reported_or_refused(tmp_path, capfd, augment):
    bad = make_folder(tmp_path) / "train" / "dog" / "1.jpg"
    bad.write_bytes(encoded(picture())[:150])
    batches = read_everything(from_folder(tmp_path, augment=augment))
    strict = from_folder(tmp_path, augment=augment, strict=True)
    refused = refusal(DataError, read_everything, strict)
    assert refused.startswith(f"cannot decode {bad}: ")
    assert refused.endswith("; mend it, or leave out --data.strict")
    told = capfd.readouterr().err + "".join(reason for b in batches for reason in b["skipped"])
    assert told.count(f"cannot decode {bad}: ") == 1
    if augment == "batch":
        assert told.startswith("quadtree: train: replaced 1 unreadable images: ")
    indices = torch.cat([batch["indices"] for batch in batches]).tolist()
    assert sorted(indices) == [0, 1, 2, 3, 5, 5]  # the next one in its place
    labels = torch.cat([batch["labels"] for batch in batches])
    assert torch.equal(labels, torch.tensor(indices) // 3)


def test_npz(tmp_path):
    for split, count in (("train", 6), ("val", 5)):
        make_npz(tmp_path, split, count)
    data = from_folder(tmp_path, augment="batch", stored_size=12)
    data.setup("fit")
    assert (data.classes, len(data.train_dataloader()), len(data.val_dataloader())) == (
        ["0", "1"], 2, 2,
    )  # fmt: skip
    last = list(data.val_dataloader())[-1]
    assert last["indices"].tolist() == [3, 4]
    make_npz(tmp_path, labels=np.array([0, -1, 1, -1, 0]))
    with pytest.raises(DataError, match="2 of 5 images of train have no label"):
        _ = from_folder(tmp_path).classes
