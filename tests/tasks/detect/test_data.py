# SPDX-License-Identifier: Apache-2.0
"""Batches: lists of images and objects, whole in spite of bad files, the same after a resume."""

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.detect.data import DetectData, GeneratedDetectData
from quadtree_attention.tasks.detect.generated import CLASSES, GeneratedShapes
from tests.support import raises, training
from tests.tasks.detect.files import entry, with_mask, write_split

SIZES = ((40, 30), (32, 36), (50, 20), (24, 24), (36, 30))
CROWD = {"iscrowd": 1, "segmentation": {"size": [30, 40], "counts": [0, 1200]}}
OBJECTS = [
    with_mask(entry(1, [2, 3, 10, 8], category=7)),
    entry(2, [0, 0, 40, 30], **CROWD),
    with_mask(entry(3, [5, 5, 12, 10], image=2), 36, 32),
    with_mask(entry(4, [5, 5, 12, 10], image=4, category=90), 24, 24),
]


@pytest.fixture
def root(tmp_path):
    for split in ("train", "val"):
        write_split(tmp_path, split, annotations=OBJECTS, sizes=SIZES)
    return tmp_path


def batches(root, split="train", **options):
    options = {"batch_size": 2, "workers": 0, "masks": True} | options
    return training.batches(DetectData(root=str(root), **options), split)


def test_training_batches(root):
    found = batches(root, flip=0.0)
    assert len(found) == 2  # whole ones only
    expected = {0: [2], 1: [1], 2: [], 3: [3], 4: []}
    for batch in found:
        parts = zip(batch["images"], batch["targets"], batch["indices"].tolist(), strict=True)
        for image, target, index in parts:
            width, height = SIZES[index]
            assert image.shape == (3, height, width) and image.dtype == torch.float32
            assert target["masks"].shape == (len(target["labels"]), height, width)
            assert not target["iscrowd"].any()  # crowds are not learnt from
            assert target["labels"].tolist() == expected[index]
    for batch, flipped in zip(found, batches(root, flip=1.0), strict=True):
        for image, other in zip(batch["images"], flipped["images"], strict=True):
            assert torch.equal(image.flip(-1), other)


def test_validation_sees_every_image_once_from_0_to_1(root):
    found = batches(root, "val")
    assert [b["indices"].tolist() for b in found] == [[0, 1], [2, 3], [4]]
    expected = np.array(Image.open(root / "images" / "val" / "1.png")) / 255
    assert np.allclose(found[0]["images"][0].permute(1, 2, 0).numpy(), expected, atol=1e-6)
    data = DetectData(root=str(root), batch_size=2, workers=0)
    assert data.classes == ["square", "disc", "star"] and data.batches_per_epoch == 2


def test_unusable_images_of_validation_are_left_out_and_told(root, capsys):
    """Another one in their place would count twice."""
    (root / "images" / "val" / "2.png").write_bytes(b"\x89PNG, but broken")
    Image.new("RGB", (9, 9)).save(root / "images" / "val" / "3.png")
    (root / "images" / "val" / "5.png").unlink()
    found = batches(root, "val")
    assert "val: 1 entries cannot be used as they are (1 missing image)" in capsys.readouterr().err
    assert [b["indices"].tolist() for b in found] == [[0], [3]]
    assert [len(b["images"]) for b in found] == [1, 1]
    reasons = [reason for b in found for reason in b["skipped"]]
    assert len(reasons) == 2 and "cannot decode" in reasons[0] and "is 9x9" in reasons[1]
    raises(DataError, r"missing|there is no file", batches, root, "val", strict=True)
    write_split(root, "val", annotations=OBJECTS[:1], sizes=SIZES[:1])
    (root / "images" / "val" / "1.png").write_bytes(b"")
    raises(DataError, r"leave out --data\.strict", batches, root, "val", strict=True)
    (empty,) = batches(root, "val")
    write_split(root, "val", annotations=[], sizes=SIZES)
    raises(DataError, "5 validation images show no object", batches, root, "val")
    assert empty["images"] == [] and empty["indices"].shape == (0,) and len(empty["skipped"]) == 1


def test_generated_shapes():
    data = GeneratedDetectData(generated_count=8, masks=True, batch_size=4, workers=0)
    data.setup()
    assert data.classes == CLASSES and data.batches_per_epoch == 2
    assert sum(len(b["images"]) for b in data.val_dataloader()) == 2
    source = GeneratedShapes(40, 96)
    seen = set()
    for i in range(len(source)):
        (image,), target = source.images(i), source.truth(i).target(masks=True)
        assert image == GeneratedShapes(40, 96).images(i)[0] and image.size == (96, 72)
        assert len(target["labels"]) == source.truth(i).objects >= 1
        assert (target["masks"].sum(0) <= 1).all()  # shapes do not overlap
        assert torch.equal(target["masks"].sum((1, 2)).float(), target["area"])
        seen |= set(target["labels"].tolist())
    assert seen == {1, 2, 3}
