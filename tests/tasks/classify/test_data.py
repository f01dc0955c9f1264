# SPDX-License-Identifier: Apache-2.0
"""Batches: the same on every path, whole in spite of bad files, the same again after a resume."""

import numpy as np
import pytest
import torch
from torch import nn

pl = pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

from PIL import Image  # noqa: E402

from quadtree_attention.errors import DataError, OptionError  # noqa: E402
from quadtree_attention.tasks.classify.data import MEAN, STD, ClassifyData  # noqa: E402
from tests.tasks.classify.test_readers import (  # noqa: E402
    encoded,
    make_folder,
    make_npz,
    picture,
)


def generated(**options):
    options = {"image_size": 24, "batch_size": 4, "generated_count": 16, "workers": 0} | options
    return ClassifyData(source="generated", stored_size=32, **options)


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
        self.seen["train"].append({k: v.clone() for k, v in batch.items() if torch.is_tensor(v)})
        return self.weight

    def validation_step(self, batch, index):
        self.seen["val"].append({k: v.clone() for k, v in batch.items() if torch.is_tensor(v)})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAtStep(pl.Callback):
    def __init__(self, step, path):
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(folder, data, checkpoint=None, **options):
    """Trains on the CPU; the batches that were seen."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **{"max_epochs": 1} | options,
    )
    module = Recorder()
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
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
def test_training_is_augmented_and_validation_is_not(tmp_path, augment):
    seen = fit(tmp_path, generated(augment=augment), max_epochs=2)
    train = [{int(i): x for b in bs for i, x in zip(b["indices"], b["images"], strict=True)}
             for bs in (seen["train"][:4], seen["train"][4:])]  # fmt: skip
    assert all(not torch.equal(train[0][i], train[1][i]) for i in range(16))
    assert torch.equal(seen["val"][0]["images"], seen["val"][1]["images"])


@pytest.mark.parametrize("augment", ["timm", "batch"])
def test_resumed_run_sees_the_same_images(tmp_path, augment):
    path = tmp_path / "third.ckpt"
    saving = {"max_epochs": 2, "callbacks": [SaveAtStep(3, path)]}
    whole = fit(tmp_path, generated(augment=augment), **saving)["train"]
    torch.manual_seed(123)
    resumed = fit(tmp_path, generated(augment=augment), path, max_epochs=2)["train"]
    assert len(resumed) == 5
    for batch, expected in zip(resumed, whole[3:], strict=True):
        assert torch.equal(batch["indices"], expected["indices"])
        assert torch.equal(batch["images"], expected["images"])


def test_workers_change_nothing():
    def batches(workers):
        loader = generated(augment="timm", workers=workers).train_dataloader()
        return [batch["images"] for batch in loader]

    for alone, shared in zip(batches(0), batches(2), strict=True):
        assert torch.equal(alone, shared)


def test_seed_decides_the_augmentation(tmp_path):
    first, again, other = (
        fit(tmp_path, generated(augment="batch", seed=seed))["train"][0]["images"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


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
def test_bad_file_is_replaced_and_reported(tmp_path, capfd, augment):
    bad = make_folder(tmp_path) / "train" / "dog" / "1.jpg"
    bad.write_bytes(encoded(picture())[:150])
    batches = read_everything(from_folder(tmp_path, augment=augment))
    told = capfd.readouterr().err + "".join(reason for b in batches for reason in b["skipped"])
    assert told.count(f"cannot decode {bad}: ") == 1
    if augment == "batch":
        assert told.startswith("quadtree: train: replaced 1 unreadable images: ")
    indices = torch.cat([batch["indices"] for batch in batches]).tolist()
    assert sorted(indices) == [0, 1, 2, 3, 5, 5]  # the next one in its place
    labels = torch.cat([batch["labels"] for batch in batches])
    assert torch.equal(labels, torch.tensor(indices) // 3)


@pytest.mark.parametrize("augment", ["none", "batch"])
def test_strict_fails_at_a_bad_file_and_names_it(tmp_path, augment):
    bad = make_folder(tmp_path) / "train" / "dog" / "1.jpg"
    bad.write_bytes(b"no image")
    data = from_folder(tmp_path, augment=augment, strict=True)
    with pytest.raises(DataError) as caught:
        read_everything(data)
    assert f"cannot decode {bad}: " in str(caught.value)
    assert str(caught.value).endswith("; mend it, or leave out --data.strict")


def test_files_that_are_no_images_are_reported(tmp_path, capfd):
    (make_folder(tmp_path) / "train" / "cat" / "notes.txt").write_text("hello")
    assert from_folder(tmp_path).classes == ["cat", "dog"]
    told = capfd.readouterr().err
    assert told == (
        f"quadtree: train: skipped 1 files: {tmp_path}/train/cat/notes.txt: not an image by its "
        "name\n"
    )
    with pytest.raises(DataError, match=r"1 files are no images: .*notes.txt.*--data.strict"):
        _ = from_folder(tmp_path, strict=True).classes


def test_no_readable_image_at_all(tmp_path):
    for path in make_folder(tmp_path).rglob("*.jpg"):
        path.write_bytes(b"no image")
    with pytest.raises(
        DataError, match=r"6 images in a row cannot be read: cannot decode .*, and 1 more"
    ):
        from_folder(tmp_path, augment="batch").setup("fit")


def test_classes_of_train_and_val_must_agree(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "wolf")
    with pytest.raises(DataError) as caught:
        from_folder(tmp_path).setup("fit")
    assert str(caught.value) == (
        "train has the classes cat, dog, val has cat, wolf; both need the same"
    )


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


def test_images_without_a_label(tmp_path):
    make_npz(tmp_path, labels=np.array([0, -1, 1, -1, 0]))
    with pytest.raises(DataError, match="2 of 5 images of train have no label"):
        _ = from_folder(tmp_path).classes


def test_evaluation_needs_no_training_images(tmp_path):
    make_npz(tmp_path, "val", 4)
    data = from_folder(tmp_path, source="npz")
    data.setup("validate")
    assert sum(len(batch["labels"]) for batch in data.val_dataloader()) == 4


def test_options_without_effect(tmp_path):
    with pytest.raises(OptionError, match=r"--data\.root has no effect with .*generated"):
        generated(root=str(tmp_path))


def test_limit_images():
    data = generated(limit_images=8, augment="none")
    seen = torch.cat([batch["indices"] for batch in data.train_dataloader()])
    assert sorted(seen.tolist()) == list(range(8))


def test_too_few_images_for_a_batch():
    with pytest.raises(OptionError) as caught:
        generated(batch_size=17, augment="none").train_dataloader()
    assert str(caught.value) == (
        "16 training images do not fill one batch of 17 on 1 processes; pass a smaller "
        "--data.batch_size"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"augment": "all"}, "augment must be one of timm, batch, none, got 'all'"),
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"batch_size": -2}, "batch_size must be at least 1, got -2"),
        ({"workers": -1}, "workers must be at least 0, got -1"),
        ({"limit_images": 0}, "limit_images must be at least 1, got 0"),
        ({"generated_classes": 0}, "generated_classes must be at least 1, got 0"),
        ({"generated_count": 3}, "generated_count must be at least 4, got 3"),
        ({"crop_scale": 0.0}, "crop_scale must be above 0 and at most 1, got 0.0"),
        ({"eval_crop": 1.5}, "eval_crop must be above 0 and at most 1, got 1.5"),
        ({"auto_augment": "rnd-m9"}, "timm cannot augment with {'auto_augment': 'rnd-m9'"),
    ],
)
def test_options_that_are_not_accepted(options, expected):
    with pytest.raises(OptionError) as caught:
        generated(**options)
    assert str(caught.value).startswith(expected)


def test_grey_images_make_whole_batches(tmp_path):
    folder = make_folder(tmp_path) / "train" / "cat"
    Image.new("L", (9, 30), 100).save(folder / "0.jpg")
    data = from_folder(tmp_path)
    assert all(batch["images"].shape == (3, 3, 16, 16) for batch in data.train_dataloader())
