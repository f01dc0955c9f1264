# SPDX-License-Identifier: Apache-2.0
"""Batches of rectified pairs, rendered or from files, and that runs can go on with them."""

import pytest
import torch

from quadtree_attention.errors import DataError
from quadtree_attention.synthetic import ProceduralTextures, StereoOptions, stereo_pairs, warp
from quadtree_attention.tasks.stereo.data import StereoData, SyntheticStereoData, cropped
from quadtree_attention.tasks.training.loader import Draw
from tests.support import raises
from tests.tasks.stereo.test_readers import make_folder, save

SIZE = (48, 96)
CLEAN = {"objects": [2, 4], "samples": 4, "photometric": 0.0, "disparity": [0.2, 0.2]}


@pytest.fixture(scope="module")
def synthetic():
    made = SyntheticStereoData(
        procedural=8, texture_size=64, height=48, width=96, pairs=8, val_pairs=2, batch_size=4,
        scene=CLEAN,
    )  # fmt: skip
    made.setup()
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Six pairs for training and two for validation, with masks of what is hidden."""
    folder = tmp_path_factory.mktemp("pairs")
    options = StereoOptions(objects=(2, 4), samples=4, photometric=0, disparity=(0.2, 0.2))
    pair = stereo_pairs(ProceduralTextures(8, size=64), range(8), size=SIZE, options=options)
    made = {name: value.numpy() for name, value in vars(pair).items()}
    for split, chosen in (("train", slice(0, 6)), ("val", slice(6, 8))):
        part = {name: value[chosen] for name, value in made.items()}
        names = [f"{i}" for i in range(len(part["image0"]))]
        make_folder(folder / split, part, names=names)
        for i, name in enumerate(names):
            mask = part["occluded0"][i].astype(float)
            save(folder / split / "occlusion" / f"{name}.png", mask)
    return folder


def files(root, **options):
    given = {"height": 32, "width": 64, "batch_size": 2, "workers": 0, "jitter": 0.0}
    data = StereoData(root=str(root), strict=True, **given | options)
    data.setup()
    return data


def batch_of(data, loader, draws):
    dataset = loader.dataset
    if hasattr(dataset, "__getitems__"):
        batch = dataset.__getitems__(draws)
    else:
        batch = loader.collate_fn([dataset[draw] for draw in draws])
    return data.on_after_batch_transfer(batch, 0)


def check(batch, count, size):
    """What the network and its losses rely on."""
    for name in ("image0", "image1"):
        assert batch[name].shape == (count, 3, *size) and batch[name].dtype == torch.float32
        assert batch[name].min() >= 0 and batch[name].max() <= 1 and batch[name].std() > 0.02
    for name, dtype in (("disparity0", torch.float32), ("known0", torch.bool),
                        ("occluded0", torch.bool), ("visible0", torch.bool)):  # fmt: skip
        assert batch[name].shape == (count, *size) and batch[name].dtype == dtype
    disparity, known = batch["disparity0"], batch["known0"]
    assert (disparity[known] > 0).all() and (disparity[~known] == 0).all()
    assert not (batch["visible0"] & batch["occluded0"]).any()
    assert (batch["visible0"] <= known).all()
    assert batch["visible0"].any() and batch["occluded0"].any()
    outside = torch.arange(size[1]) < disparity
    assert batch["occluded0"][outside & known].all()


def errors(batch):
    """Difference of the left image from the right one moved by the disparity."""
    shift = torch.stack([-batch["disparity0"], torch.zeros_like(batch["disparity0"])], dim=-1)
    return (warp(batch["image1"], shift) - batch["image0"]).abs().mean(dim=1)


def check_warped(batch):
    error = errors(batch)
    assert error[batch["visible0"]].mean() < 0.025
    assert error[batch["occluded0"]].mean() > 2 * error[batch["visible0"]].mean()


def test_synthetic_pairs_follow_from_epoch_and_sample(synthetic):
    batch = batch_of(synthetic, synthetic.train_dataloader(), [Draw(0, i) for i in range(4)])
    check(batch, 4, SIZE)
    check_warped(batch)
    assert batch["known0"].all()
    loader = synthetic.train_dataloader()
    whole = batch_of(synthetic, loader, [Draw(1, 3), Draw(1, 5)])
    alone = batch_of(synthetic, loader, [Draw(1, 5)])
    assert torch.equal(whole["disparity0"][1], alone["disparity0"][0])
    later = batch_of(synthetic, loader, [Draw(2, 5)])
    assert not torch.equal(later["disparity0"], alone["disparity0"])
    val = synthetic.val_dataloader()
    first = batch_of(synthetic, val, [Draw(0, 1)])
    assert torch.equal(first["image0"], batch_of(synthetic, val, [Draw(7, 1)])["image0"])
    training = batch_of(synthetic, loader, [Draw(0, 1)])
    assert not torch.equal(first["disparity0"], training["disparity0"])
    assert synthetic.batches_per_epoch == 2


def test_training_on_files_sees_crops(root):
    data = files(root, flip=0.5)
    loader = data.train_dataloader()
    batch = batch_of(data, loader, [Draw(epoch, i) for epoch in range(2) for i in range(6)])
    check(batch, 12, (32, 64))
    check_warped(batch)
    assert batch["skipped"] == []
    # which window, and which way up, is drawn anew in every epoch
    whole = files(root, height=48, width=96, flip=0.0)
    full = batch_of(whole, whole.train_dataloader(), [Draw(0, 0)])["disparity0"][0]
    wide = full.unfold(0, 32, 1).unfold(1, 64, 1)  # all windows of the first image
    places = []
    for window in (batch["disparity0"][0], batch["disparity0"][6]):
        for flipped in (False, True):
            same = (wide == (window.flip(0) if flipped else window)).all(dim=-1).all(dim=-1)
            places += [(flipped, *place) for place in same.nonzero().tolist()]
    assert len(places) == 2 and len(set(places)) == 2


def test_a_window_hides_what_its_left_edge_cuts_off():
    ramp = torch.arange(10.0).expand(3, 6, 10)
    batch = {
        "image0": ramp, "image1": ramp, "disparity0": torch.full((6, 10), 2.0),
        "known0": torch.ones(6, 10, dtype=torch.bool),
        "occluded0": torch.arange(10).expand(6, 10) < 2,
        "visible0": torch.arange(10).expand(6, 10) >= 2,
    }  # fmt: skip
    window = cropped(batch, 1, 4, (4, 5))
    assert window["image0"][0, 0].tolist() == [4, 5, 6, 7, 8]
    assert window["occluded0"].tolist() == [[True, True, False, False, False]] * 4
    assert torch.equal(window["visible0"], ~window["occluded0"])
    beyond = cropped(batch, 0, 0, (8, 12))
    assert beyond["image1"][0, 7].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]
    for name in ("disparity0", "known0", "occluded0", "visible0"):
        assert torch.equal(beyond[name][:6, :10], batch[name])
        assert not beyond[name][6:].any() and not beyond[name][:, 10:].any()


def test_colours_change_a_little_differently_in_either_view(root):
    plain = files(root, height=48, width=96, flip=0.0)
    changed = files(root, height=48, width=96, flip=0.0, jitter=0.5)
    draws = [Draw(0, i) for i in range(6)]
    before, after = (batch_of(data, data.train_dataloader(), draws) for data in (plain, changed))
    assert torch.equal(before["disparity0"], after["disparity0"])
    shift = [(after[f"image{v}"] - before[f"image{v}"]).flatten(1).mean(dim=1) for v in (0, 1)]
    assert shift[0].abs().max() > 0.05
    between = (shift[0] - shift[1]).abs()
    assert 0.002 < between.mean() < shift[0].abs().mean()


def test_validation_sees_whole_images_one_at_a_time(root):
    data = files(root)
    batches = [data.on_after_batch_transfer(batch, 0) for batch in data.val_dataloader()]
    assert len(batches) == 2
    for batch in batches:
        check(batch, 1, SIZE)
        check_warped(batch)
    one = files(root, val_pairs=1)
    assert len(one.val_dataloader()) == 1
    other = files(root / "train", val_root=str(root / "val"))
    assert len(other.val_dataloader()) == 2 and other.batches_per_epoch == 3


def test_what_is_missing_is_named(root):
    raises(DataError, r"of the split 'val' .*--data.val_root", files, root / "train")
