# SPDX-License-Identifier: Apache-2.0
"""Frames in the layout of ScanNet: rendered, written, read back and trained on."""

import shutil

import numpy as np
import pytest
import torch

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.match.metrics import MatchMetric
from quadtree_attention.tasks.match.module import add_poses, views
from quadtree_attention.tasks.match.scannet import ScanNetData
from quadtree_attention.tasks.match.truth import true_matches, view_from_flow
from tests.support import raises
from tests.support.commands import refusal
from tests.support.training import batches, train
from tests.tasks.match.posed_files import scannet_pairs, write_recipe, write_scannet

SIZE = {"height": 96, "width": 128}


@pytest.fixture(scope="module")
def pairs():
    return scannet_pairs(3)


@pytest.fixture(scope="module")
def stored(pairs, tmp_path_factory):
    root = tmp_path_factory.mktemp("scannet")
    write_scannet(root, pairs, scores=[(0.9, 0.6), (0.5, 0.3), (0.7, 0.8)])
    return root


@pytest.fixture(scope="module")
def batch(stored):
    """Both directions of the last scene."""
    (batch,) = batches(ready(stored, batch_size=2), "val")
    return batch


@pytest.fixture
def root(stored, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(stored, tmp_path / "scannet")


def ready(root, **options):
    data = ScanNetData(**{"root": str(root), "val_scenes": 1, "workers": 0} | SIZE | options)
    data.setup("fit")
    return data


def test_files_come_back_as_they_were_rendered(batch, pairs):
    """Through JPEG, PNG and text."""
    assert batch["skipped"] == []
    pair = pairs[2]
    for i, j in ((0, 1), (1, 0)):  # the second sample has the views swapped
        assert (batch["image0"][i] - getattr(pair, f"image{i}")[0]).abs().mean() < 0.02
        torch.testing.assert_close(
            batch["depth1"][i], getattr(pair, f"depth{j}")[0], atol=6e-4, rtol=0
        )
        torch.testing.assert_close(batch["K0"][i], pair.K0[0])
    torch.testing.assert_close(batch["T_0to1"][0], pair.T_0to1[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(batch["T_0to1"][1] @ pair.T_0to1[0], torch.eye(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch["T_1to0"][1], pair.T_0to1[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_supervision_from_depth_agrees_with_the_exact_flow(batch, pairs, precision):
    """Also inside of the mixed precision that a training step runs in."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        found = views(batch)
    exact0 = view_from_flow(pairs[2].flow0to1, pairs[2].visible0)
    exact1 = view_from_flow(pairs[2].flow1to0, pairs[2].visible1)
    for view, exacts in zip(found, ((exact0, exact1), (exact1, exact0)), strict=True):
        for i, exact in enumerate(exacts):
            away = (view.target[i] - exact.target[0]).norm(dim=-1)
            assert away[exact.seen[0]].max() < 0.05
            assert view.seen[i][exact.seen[0]].float().mean() > 0.98
            assert view.seen[i].any() and not view.seen[i].all()
    truth, expected = (true_matches(*both, 8)[0] for both in (found, (exact0, exact1)))
    mine, exact = (
        set(zip(m.cells0.tolist(), m.cells1.tolist(), strict=True))
        for m in (truth[truth.batch_indexes == 0], expected)
    )
    # Next to an edge the pixel nearest to a point may show what is behind it
    assert len(exact) > 60 and len(exact - mine) <= 0.02 * len(exact)


def drawn(data, epoch):
    """Which pair each sample of an epoch is, by the place of its second camera."""
    found = batches(data, epoch=epoch)
    return [tuple(T[:3, 3].tolist()) for batch in found for T in batch["T_0to1"]]


def test_epochs_draw_as_many_pairs_from_each_scene(stored):
    data = ready(stored, pairs_per_scene=5)
    assert data.batches_per_epoch == 10
    first = drawn(data, 0)
    # scene 0 has two pairs above the least overlap of 0.4, scene 1 one
    counts = sorted(first.count(place) for place in set(first))
    assert len(counts) == 3 and counts[2] == 5 and counts[0] + counts[1] == 5
    assert drawn(ready(stored, pairs_per_scene=5), 0) == first
    assert drawn(data, 1) != first
    assert drawn(ready(stored, pairs_per_scene=5, workers=2), 0) == first
    assert drawn(ready(stored, pairs_per_scene=5, seed=1), 0) != first


def test_overlap_and_lists_decide_what_is_used(stored, root):
    """Of the overlaps 0.9, 0.6, 0.5, 0.3, 0.7 and 0.8, those above 0.4 and up to 0.8."""
    data = ready(stored, min_overlap=0.4, max_overlap=0.8)
    kept = [len(scene) for split in ("train", "val") for scene in data.source(split).scenes]
    assert kept == [1, 1, 2]
    found = ready(root, min_overlap=0.55).source("train").scenes  # the second has none left
    assert len(found) == 1
    folder = root / "scannet_indices" / "scene_data" / "train_list"
    folder.mkdir()
    (folder / "scannet_all.txt").write_text("scene0002_02.npz\nscene0000_02.npz\n")
    train, val = (ready(root).source(split).scenes for split in ("train", "val"))
    assert train[0].pairs[0, 0] == 2 and val[0].pairs[0, 0] == 0
    with pytest.raises(DataError, match=r"0 training scenes of .* an overlap above 0\.95"):
        ready(root, min_overlap=0.95)


def test_validation_pairs_are_spread_over_those_held_out(stored):
    data = ready(stored, val_scenes=2, min_overlap=0.0, val_pairs=2)
    assert [data.place("val", i) for i in range(data.available("val"))] == [0, 2]  # of 4


@pytest.mark.parametrize(("count", "used"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 2])])
def test_some_of_the_scenes(root, count, used):
    """Evenly spread; the pairs to validate on stay."""
    write_official(root)
    scenes = ready(root, val_scenes=0, scenes=count).source("train").scenes
    assert [scene.pairs[0, 0] for scene in scenes] == used


def write_official(root):
    """A list of two pairs, as that of the 1,500."""
    index = root / "scannet_test_1500"
    index.mkdir()
    shutil.copy(root / "scannet_indices" / "intrinsics.npz", index)
    np.savez(index / "test.npz", name=np.array([[1, 2, 0, 7], [2, 2, 7, 0]]))
    for name in ("scene0001_02", "scene0002_02"):
        shutil.copytree(root / "train" / name, root / "test" / name)


def test_official_pairs_are_validated_on_in_their_order(root, pairs):
    with pytest.raises(DataError, match=r"no folder .*scannet_test_1500; .* --data\.val_scenes"):
        ready(root, val_scenes=0)
    write_official(root)
    data = ready(root, val_scenes=0, batch_size=2)
    assert data.available("val") == 2
    (batch,) = batches(data, "val")
    expected = torch.cat([pairs[1].T_0to1, torch.linalg.inv(pairs[2].T_0to1)])
    torch.testing.assert_close(batch["T_0to1"], expected, atol=1e-5, rtol=0)


def test_poses_are_measured_in_pixels_of_640x480(batch, monkeypatch):
    """What the model sees has a fifth of them: 128x96."""
    assert batch["pixels0"].tolist() == batch["pixels1"].tolist() == [[5.0, 5.0]] * 2
    calls = []

    def spy(points0, points1, K0, K1, **options):
        calls.append((points0, points1, K0, K1, options["estimator"], options["threshold"]))

    monkeypatch.setattr("quadtree_attention.tasks.match.pose.relative_pose", spy)
    points = torch.tensor([[10.0, 20.0]])
    found = {"keypoints0": points, "keypoints1": points + 1, "confidence": torch.ones(1)}
    add_poses(MatchMetric(), found | {"batch_indexes": torch.ones(1).long()}, batch)
    assert [call[4:] for call in calls] == [("opencv", 0.5), ("poselib", 0.5)]
    for points0, points1, K0, K1, *_ in calls:
        assert points0.tolist() == [[50.0, 100.0]] and points1.tolist() == [[55.0, 105.0]]
        for K, seen in ((K0, batch["K0"][1]), (K1, batch["K1"][1])):
            expected = seen.double().numpy() * [[5.0], [5.0], [1.0]]
            assert np.array_equal(K, expected)


def test_a_training_run(root, tmp_path, capsys):
    """As `quadtree train match` does it; broken files are replaced, counted and named."""
    (root / "train" / "scene0001_02" / "depth" / "0.png").unlink()
    recipe = write_recipe(tmp_path, source="scannet", val_scenes=1, **SIZE)
    options = [tmp_path / "run", f"--data.root={root}"]
    (row,) = train("match", recipe, *options)
    assert float(row["train/coarse"]) > 0 and float(row["train/fine"]) > 0
    assert {"val/auc10", "val/opencv_auc10", "val/matches"} <= set(row)
    assert (tmp_path / "run" / "best.safetensors").exists()
    told = capsys.readouterr().err
    assert "quadtree: skipped 1 unusable files so far: there is no file" in told
    assert "scene0001_02/depth/0.png" in told and "get the depth again" in told
    # The recipe as it was run knows its source, and goes on
    again = ["--resume", "--trainer.max_epochs=2"]
    rows = train("match", tmp_path / "run" / "config.yaml", *options, *again)
    assert rows[0] == row and len(rows) == 2


def broken(root, kind):
    folder = root / "train" / "scene0002_02"
    if kind == "colour":
        (folder / "color" / "0.jpg").write_bytes((folder / "color" / "0.jpg").read_bytes()[:300])
        return "color/0.jpg"
    if kind == "depth":
        shutil.copy(folder / "color" / "0.jpg", folder / "depth" / "7.png")
        return "depth/7.png must be grey with 16 bits, got the mode RGB"
    if kind == "lost pose":
        np.savetxt(folder / "pose" / "7.txt", np.full((4, 4), -np.inf))
        return "pose/7.txt must be 4x4 finite numbers"
    (folder / "pose" / "7.txt").write_text("1 2\n3 oops\n")
    return "pose/7.txt: could not convert"


@pytest.mark.parametrize("kind", ["colour", "depth", "lost pose", "pose"])
def test_broken_files(root, kind):
    told = broken(root, kind)
    data = ready(root, strict=True)
    refused = refusal(DataError, next, iter(data.val_dataloader()))
    assert told in refused and "leave out --data.strict" in refused
    lenient = ready(root).val_dataloader()  # both directions have the broken file
    raises(DataError, "50 pairs in a row cannot be read", next, iter(lenient))
