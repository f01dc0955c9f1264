# SPDX-License-Identifier: Apache-2.0
"""Photographs in the layout of MegaDepth: rendered, written, read back and trained on."""

import sys

import h5py
import numpy as np
import pytest
import torch

from quadtree_attention.errors import DataError, MissingDependencyError
from quadtree_attention.tasks.match.megadepth import MegaDepthData, fitted
from quadtree_attention.tasks.match.module import MatchModule, images, views
from quadtree_attention.tasks.match.truth import true_matches, view_from_flow
from tests.support import Hostile, raises
from tests.support.commands import refusal
from tests.support.training import batches, train
from tests.tasks.match.posed_files import (
    SMALL,
    megadepth_pairs,
    objects,
    write_megadepth,
    write_recipe,
)


@pytest.fixture(scope="module")
def pairs():
    return megadepth_pairs(2)


@pytest.fixture(scope="module")
def root(pairs, tmp_path_factory):
    root = tmp_path_factory.mktemp("megadepth")
    write_megadepth(root, pairs[:1], [(0.6, 0.2)], h5py)
    write_megadepth(root, pairs[1:], [(0.4, 0.0)], h5py, "scene_info_val_1500")
    return root


@pytest.fixture(scope="module")
def batch(pairs, tmp_path_factory):
    """Both directions of the second scene."""
    root = tmp_path_factory.mktemp("held_out")
    write_megadepth(root, pairs, [(0.6, 0.2), (0.4, 0.4)], h5py)
    data = ready(root, val_scenes=1, batch_size=2)
    (batch,) = batches(data, "val")
    return batch


def ready(root, **options):
    data = MegaDepthData(**{"root": str(root), "size": 128, "workers": 0} | options)
    data.setup("fit")
    return data


def test_landscape_and_portrait_are_padded_to_a_square(batch, pairs):
    assert batch["image0"].shape == batch["image1"].shape == (2, 3, 128, 128)
    assert batch["mask0"][0, :96].all() and not batch["mask0"][0, 96:].any()
    assert batch["mask1"][0, :, :96].all() and not batch["mask1"][0, :, 96:].any()
    assert torch.equal(batch["mask0"], batch["mask1"].flip(0))
    for name in ("image", "depth"):
        for i in range(2):
            values = batch[f"{name}{i}"]
            values = values.amax(dim=1) if name == "image" else values
            assert not values[~batch[f"mask{i}"]].any() and values[batch[f"mask{i}"]].any()
    # every third pixel of the photograph has the centre of one of the small image
    assert torch.equal(batch["depth0"][0, :96], pairs[1].depth0[0, 1::3, 1::3])
    # poses are measured in pixels of the photographs, three of which make one here
    assert batch["pixels0"].tolist() == batch["pixels1"].tolist() == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_supervision_from_depth_agrees_with_the_exact_flow(batch, pairs, precision):
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        found = views(batch)
    pair = pairs[1]
    exact = (
        view_from_flow(pair.flow0to1, pair.visible0),
        view_from_flow(pair.flow1to0, pair.visible1),
    )
    for i, view in enumerate(found):  # of the first sample
        target = (exact[i].target[0, 1::3, 1::3] + 0.5) / 3 - 0.5
        visible = exact[i].seen[0, 1::3, 1::3]
        rows, columns = visible.shape
        away = (view.target[0, :rows, :columns] - target).norm(dim=-1)
        assert away[visible].max() < 0.01
        assert view.seen[0, :rows, :columns][visible].float().mean() > 0.97
        assert not view.seen[0][~batch[f"mask{i}"][0]].any()
    truth, _ = true_matches(*found, 8)
    assert len(truth) > 60


def test_masks_act_in_training(batch):
    """What lies in the padding changes nothing, unless the masks are left out."""
    module = MatchModule(options=SMALL, fine_matches=32)
    module.log = lambda *args, **options: None
    module.eval()  # statistics of batches aside
    noisy = dict(batch)
    for i in range(2):
        noise = torch.rand_like(batch[f"image{i}"])
        noisy[f"image{i}"] = batch[f"image{i}"].where(batch[f"mask{i}"][:, None], noise)

    def loss(of):
        torch.manual_seed(0)
        with torch.no_grad():
            return module.training_step(of, 0)

    def without(of):
        return {name: value for name, value in of.items() if not name.startswith("mask")}

    assert {"mask0", "mask1"} <= set(images(batch))
    torch.testing.assert_close(loss(noisy), loss(batch))
    assert (loss(without(noisy)) - loss(without(batch))).abs() > 1e-3


def test_a_training_run(root, tmp_path):
    recipe = write_recipe(tmp_path, source="megadepth", size=128)
    (row,) = train("match", recipe, tmp_path / "run", f"--data.root={root}")
    assert float(row["train/coarse"]) > 0 and float(row["train/fine"]) > 0
    assert {"val/auc10", "val/matches"} <= set(row)


def test_overlap_decides_what_is_used(root):
    assert len(ready(root).source("train").scenes[0]) == 2
    assert len(ready(root, min_overlap=0.3).source("train").scenes[0]) == 1
    assert len(ready(root, max_overlap=0.3).source("train").scenes[0]) == 1
    assert len(ready(root).source("val").scenes[0]) == 2  # all of the official ones


def test_sizes():
    assert fitted((1600, 1200), 840) == (840, 624)  # 630 is no multiple of 8
    assert fitted((1000, 1601), 840) == (520, 840)
    assert fitted((4000, 10), 840) == (840, 8)


def write_index(root, **arrays):
    folder = root / "index" / "scene_info_0.1_0.7"
    folder.mkdir(parents=True)
    usual = {
        "image_paths": objects(["a.jpg", "b.jpg"]),
        "depth_paths": objects(["a.h5", "b.h5"]),
        "intrinsics": objects([np.eye(3)] * 2),
        "poses": objects([np.eye(4)] * 2),
        "pair_infos": objects([((0, 1), 0.5, None)]),
    }
    np.savez(folder / "0000.npz", **usual | arrays)


def test_code_in_an_index_does_not_run(tmp_path):
    write_index(tmp_path, pair_infos=objects([((0, 1), 0.5, Hostile(tmp_path / "hostile"))]))
    raises(DataError, r"0000\.npz wants to run \w+\.mkdir", ready, tmp_path, val_scenes=0)
    assert not (tmp_path / "hostile").exists()


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"pair_infos": objects([(0, 1, 0.5)])}, "must be"),
        ({"pair_infos": objects([((0, 2), 0.5)])}, "do not fit together"),
        ({"poses": objects([np.eye(4)])}, "do not fit together"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path, arrays, told):
    write_index(tmp_path, **arrays)
    refused = refusal(DataError, ready, tmp_path)
    assert told in refused and "0000.npz" in refused


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({}, r"cannot read .*phoenix/9\.jpg: No such file"),
        ({"image_paths": objects([None, None])}, r"0000\.npz has no path or no 3x3 camera of"),
        ({"intrinsics": objects([None, None])}, r"0000\.npz has no path or no 3x3 camera of"),
        ({"poses": objects([None, np.eye(4)])}, r"poses of \[0 1\] in .*0000\.npz are not finite"),
    ],
)
def test_what_is_missing_of_a_photograph_is_named(root, tmp_path, arrays, told):
    missing = "phoenix/9.jpg" if not arrays else "phoenix/0000/0.jpg"
    paths = {
        "image_paths": objects([missing] * 2),
        "depth_paths": objects(["phoenix/0000/0.h5"] * 2),
    }
    write_index(tmp_path, **paths | arrays)
    (tmp_path / "train").symlink_to(root / "train")
    (scene,) = MegaDepthData(root=str(tmp_path), size=128).training_scenes()
    with pytest.raises(DataError, match=told):
        scene.images(0), scene.truth(0)


def test_depth_that_cannot_be_read_is_named(root, pairs, tmp_path):
    write_megadepth(tmp_path, pairs, [(0.6, 0.6), (0.6, 0.6)], h5py)
    stored = tmp_path / "train" / "phoenix" / "0001" / "0.h5"
    stored.write_bytes(b"not h5")
    data = ready(tmp_path, val_scenes=1, strict=True)
    raises(DataError, r"cannot read .*0001/0\.h5", next, iter(data.val_dataloader()))


def test_what_is_refused_before_any_work(tmp_path):
    write_index(tmp_path)
    raises(DataError, r"no folder .*scene_info_val_1500; .*--data\.val_scenes", ready, tmp_path)


def test_without_h5py_the_extra_that_brings_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)  # as if it were not installed
    write_index(tmp_path)
    needs = r"needs h5py.*quadtree-attention\[train\]"
    raises(MissingDependencyError, needs, ready, tmp_path)
