# SPDX-License-Identifier: Apache-2.0
"""Rectified pairs from folders of every layout, what is hidden, and what is said of bad files."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.synthetic import ProceduralTextures, StereoOptions, stereo_pairs
from quadtree_attention.tasks import Disparity
from quadtree_attention.tasks.stereo.readers import StereoFiles, open_source
from tests.conftest import ROOT
from tests.support.commands import refusal as refused

SHARED = ROOT.parent / "shared" / "data" / "stereo"
SIZE = (24, 45)
OPTIONS = StereoOptions(objects=(2, 4), photometric=0, samples=1, disparity=(0.4, 0.4))


@pytest.fixture(scope="module")
def made():
    """Two pairs of real images with exact disparity of both views, and much that is hidden."""
    pair = stereo_pairs(ProceduralTextures(4, size=32), (10, 11), size=SIZE, options=OPTIONS)
    return {name: value.numpy() for name, value in vars(pair).items()}


def save(path, image, **options):
    """A (3, H, W) image in [0, 1], or a mask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = image.transpose(1, 2, 0) if image.ndim == 3 else image
    Image.fromarray((array * 255).astype(np.uint8)).save(path, **options)


def write(path, values, known=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = values if known is None else np.where(known, values, np.nan)
    Disparity(disparity=shown).save(path)


def make_folder(root, made, suffix=".pfm", names=("a", "b")):
    for i, name in enumerate(names):
        save(root / "left" / f"{name}.png", made["image0"][i])
        save(root / "right" / f"{name}.png", made["image1"][i])
        write(root / "disparity" / f"{name}{suffix}", made["disparity0"][i])
    return root


def read(source, index):
    """A pair with its truth."""
    left, right = source.images(index)
    truth = vars(source.truth(index))
    return SimpleNamespace(name=source.name(index), left=left, right=right, **truth)


def read_all(source):
    return (read(source, index) for index in range(len(source)))


def outside(disparity):
    return np.arange(disparity.shape[1]) < disparity


def nearly(sample, occluded):
    """Whether most of what is hidden was found; outlines differ by a pixel of the other view."""
    hidden = occluded & ~outside(sample.disparity)
    return (sample.occluded != occluded).sum() < 0.5 * hidden.sum()


@pytest.mark.parametrize("suffix", [".pfm", ".npy", ".png"])
def test_folder(tmp_path, made, suffix):
    source = open_source(make_folder(tmp_path, made, suffix), layout="folder")
    assert [source.name(i) for i in range(len(source))] == ["a", "b"]
    sample = read(source, 1)
    assert sample.name == "b" and sample.left.mode == sample.right.mode == "RGB"
    stored = (made["image0"][1] * 255).astype(np.uint8).transpose(1, 2, 0)
    assert np.array_equal(sample.left, stored)
    assert np.allclose(sample.disparity, made["disparity0"][1], atol=1 / 512, rtol=1e-6)
    assert sample.disparity.dtype == np.float32 and sample.known.all()
    assert np.array_equal(sample.occluded, outside(sample.disparity)) and sample.occluded.any()
    assert np.array_equal(sample.visible, ~sample.occluded)


def test_occlusion(tmp_path, made):
    make_folder(tmp_path, made)
    for i, name in enumerate("ab"):
        save(tmp_path / "occlusion" / f"{name}.png", made["occluded0"][i].astype(float))
    for i, sample in enumerate(read_all(open_source(tmp_path))):
        assert np.array_equal(sample.occluded, made["occluded0"][i])
        assert (sample.occluded & ~outside(sample.disparity)).any()
    root = make_folder(tmp_path / "both", made)
    for i, name in enumerate("ab"):
        write(root / "disparity_right" / f"{name}.pfm", made["disparity1"][i])
    source = open_source(root)
    for i, sample in enumerate(read_all(source)):
        assert nearly(sample, made["occluded0"][i])
    known = np.ones(SIZE, bool)
    known[:, 10:20] = False
    write(root / "disparity_right" / "a.pfm", made["disparity1"][0], known)
    sample = read(source, 0)
    unsure = sample.known & ~sample.occluded & ~sample.visible
    target = np.arange(SIZE[1]) - sample.disparity
    assert unsure.any() and ((target > 9) & (target < 20))[unsure].all()


def test_scenes_with_a_scale(tmp_path, made):
    folder = tmp_path / "group" / "aloe"
    for view in (0, 1):
        save(folder / f"im{view}.png", made[f"image{view}"][0])
        stored = (made[f"disparity{view}"][0] * 8).round().astype(np.uint8)
        stored[3, 4] = 0
        Image.fromarray(stored).save(folder / f"disp{view}.png")
    (folder / "meta.json").write_text(json.dumps({"disparity_scale": 8}))
    source = open_source(tmp_path, layout="scenes")
    sample = read(source, 0)
    assert sample.name == "group/aloe"
    assert not sample.known[3, 4] and sample.known.sum() == 24 * 45 - 1
    error = np.abs(sample.disparity - made["disparity0"][0])[sample.known]
    assert error.max() <= 1 / 16 + 1e-6
    assert nearly(sample, made["occluded0"][0])
    assert open_source(folder).name(0) == "aloe"
    (folder / "meta.json").write_text('{"disparity_scale": 0}')
    assert "meta.json: disparity_scale is 0" in refused(DataError, open_source, tmp_path)
    (folder / "meta.json").unlink()
    assert "PNG of 8 bits" in refused(DataError, read, open_source(tmp_path), 0)


@pytest.mark.parametrize("beside", ["", "_gt"])  # as in Middlebury, and as in ETH3D
def test_middlebury(tmp_path, made, beside):
    for view in (0, 1):
        save(tmp_path / "training" / "Motorcycle" / f"im{view}.png", made[f"image{view}"][0])
    folder = tmp_path / f"training{beside}" / "Motorcycle"
    known = np.ones(SIZE, bool)
    known[5] = False
    write(folder / "disp0GT.pfm", made["disparity0"][0], known)
    mask = np.where(made["occluded0"][0], 128, 255).astype(np.uint8)
    mask[5] = 0
    Image.fromarray(mask).save(folder / "mask0nocc.png")
    source = open_source(tmp_path, layout="middlebury2014")
    sample = read(source, 0)
    assert len(source) == 1 and sample.name == "training/Motorcycle"
    assert np.array_equal(sample.known, known)
    assert np.array_equal(sample.occluded, made["occluded0"][0] & known)
    assert np.array_equal(sample.visible, ~made["occluded0"][0] & known)


@pytest.mark.parametrize(
    ("layout", "images", "disparities"),
    [
        ("kitti2015", ("image_2", "image_3"), ("disp_occ_0", "disp_noc_0")),
        ("kitti2012", ("colored_0", "colored_1"), ("disp_occ", "disp_noc")),
    ],
)
def test_kitti(tmp_path, made, layout, images, disparities):
    for split in ("training", "testing"):
        for frame in ("000000_10", "000000_11"):
            for view, folder in enumerate(images):
                save(tmp_path / split / folder / f"{frame}.png", made[f"image{view}"][0])
    hidden = made["occluded0"][0]
    for folder, known in zip(disparities, (None, ~hidden), strict=True):
        write(tmp_path / "training" / folder / "000000_10.png", made["disparity0"][0], known)
    source = open_source(tmp_path, layout=layout)
    assert [source.name(i) for i in range(len(source))] == ["training/000000_10"]
    sample = read(source, 0)
    assert sample.known.all() and np.array_equal(sample.occluded, hidden)
    assert len(open_source(tmp_path, layout=layout, split="train")) == 1
    assert "of the split 'val'" in refused(DataError, open_source, tmp_path, split="val")
    (tmp_path / "training" / images[1] / "000000_10.png").unlink()
    assert images[1] in refused(DataError, open_source, tmp_path)


def make_flying_things(root, made):
    for i, place in enumerate(("TRAIN/A/0000", "TEST/B/0001")):
        for view, side in enumerate(("left", "right")):
            save(root / "frames_cleanpass" / place / side / "0006.png", made[f"image{view}"][i])
            stored = -made[f"disparity{view}"][i] if view == 0 else made[f"disparity{view}"][i]
            write(root / "disparity" / place / side / "0006.pfm", stored)
    return root


def test_scene_flow(tmp_path, made):
    root = make_flying_things(tmp_path / "FlyingThings3D", made)
    source = open_source(tmp_path, layout="sceneflow")
    names = ["FlyingThings3D/TEST/B/0001/0006", "FlyingThings3D/TRAIN/A/0000/0006"]
    assert [source.name(i) for i in range(2)] == names
    for sample, i in zip(read_all(source), (1, 0), strict=True):
        assert np.array_equal(sample.disparity, made["disparity0"][i])
        assert nearly(sample, made["occluded0"][i])
    for split, name in (("val", names[0]), ("train", names[1])):
        chosen = open_source(root.parent, split=split)
        assert [chosen.name(i) for i in range(len(chosen))] == [name]
    (root / "disparity" / "TRAIN" / "A" / "0000" / "left" / "0006.pfm").unlink()
    assert "has no partner" in refused(DataError, open_source, root)
    assert len(open_source(root, strict=False)) == 1


def test_torchvision_reads_its_data_sets(tmp_path, made):
    make_flying_things(tmp_path / "SceneFlow" / "FlyingThings3D", made)
    source = open_source(tmp_path, layout="torchvision:SceneFlowStereo")
    sample = read(source, 1)
    assert source.name(1) == sample.name
    assert sample.name == "SceneFlow/FlyingThings3D/frames_cleanpass/TRAIN/A/0000/left/0006"
    assert np.array_equal(sample.disparity, made["disparity0"][0])
    assert np.array_equal(sample.occluded, outside(sample.disparity))

    def told(kind, error=DataError, **options):
        return refused(error, open_source, tmp_path, layout=f"torchvision:{kind}", **options)

    assert told("Kitti2015Stereo").startswith("torchvision's Kitti2015Stereo finds no data in")
    assert "has no pairs of the split 'val'" in told("SceneFlowStereo", split="val")
    for view, side in enumerate((2, 3)):
        image = tmp_path / "Kitti2015" / "testing" / f"image_{side}" / "0_10.png"
        save(image, made[f"image{view}"][0])
    assert "has no disparity of the split 'val'" in told("Kitti2015Stereo", split="val")
    assert "takes what is hidden in the other view for" in told("ETH3DStereo", OptionError)
    said = told("CIFAR10", OptionError)
    assert "ETH3DStereo" in said and "got 'CIFAR10'" in said
    (tmp_path / "SceneFlow/FlyingThings3D/disparity/TRAIN/A/0000/left/0006.pfm").write_bytes(b"Pf")
    assert "0000/left/0006" in refused(DataError, read, source, 1)


def test_pairs_that_are_not_whole(tmp_path, made):
    make_folder(tmp_path, made)
    (tmp_path / "right" / "a.png").unlink()
    told = refused(DataError, open_source, tmp_path)
    missing = tmp_path / "left" / "a.png"
    assert told.startswith(f"1 pairs in {tmp_path} are not whole: {missing} has")
    source = open_source(tmp_path, strict=False)
    assert len(source) == 1 and source.name(0) == "b" and len(source.skipped) == 1
    (tmp_path / "disparity" / "b.pfm").unlink()
    told = refused(DataError, open_source, tmp_path, strict=False)
    assert "there are no pairs with disparity" in told and "has no partner" in told


def test_bad_files_are_named(tmp_path, made):
    make_folder(tmp_path, made)
    source = open_source(tmp_path)
    save(tmp_path / "right" / "a.png", made["image1"][0][:, :20])
    told = refused(DataError, read, source, 0)
    assert told.startswith(f"{tmp_path / 'right' / 'a.png'} has 45x20 pixels") and "45x24" in told
    save(tmp_path / "right" / "a.png", made["image1"][0])
    write(tmp_path / "disparity" / "a.pfm", made["disparity0"][0][:, :30])
    assert "a.pfm has 30x24 pixels" in refused(DataError, read, source, 0)
    write(tmp_path / "disparity" / "a.pfm", np.full(SIZE, np.nan))
    assert "a.pfm has no known disparity" in refused(DataError, read, source, 0)
    write(tmp_path / "disparity" / "a.pfm", made["disparity0"][0])
    read(source, 0)
    whole = (tmp_path / "left" / "a.png").read_bytes()
    (tmp_path / "left" / "a.png").write_bytes(whole[: len(whole) // 2])
    assert "left/a.png" in refused(DataError, read, source, 0)


def test_wrong_options_and_empty_folders(tmp_path):
    told = refused(OptionError, open_source, tmp_path, layout="middlebury")
    assert "layout must be one of auto, folder" in told and "got 'middlebury'" in told
    told = refused(OptionError, open_source, tmp_path, split="test")
    assert "split must be one of all, train, val" in told
    assert "there is no folder" in refused(DataError, open_source, tmp_path / "nowhere")
    assert "there are no pairs" in refused(DataError, open_source, tmp_path)
    (tmp_path / "circle").symlink_to(tmp_path)
    assert "there are no pairs" in refused(DataError, open_source, tmp_path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no stereo pairs at ../shared/data/stereo")
def test_all_real_pairs():
    """The right view, moved by the true disparity, is the left one where nothing hides it."""
    source = open_source(SHARED)
    assert len(source) == 16 and not source.skipped
    assert all(isinstance(files, StereoFiles) for files in source.files)
    for sample in read_all(source):
        left, right = (torch.from_numpy(np.array(v)).float() for v in (sample.left, sample.right))
        columns = torch.arange(left.shape[1]) - torch.from_numpy(sample.disparity)
        at = columns.round().long().clamp(0, left.shape[1] - 1)
        moved = right.gather(1, at[..., None].expand_as(right))
        error = (moved - left).abs().mean(dim=2)
        visible, known = torch.from_numpy(sample.visible), torch.from_numpy(sample.known)
        swapped = (right - left).abs().mean(dim=2)
        assert visible.sum() > 0.1 * visible.numel()
        assert error[visible].mean() < 0.6 * swapped[visible].mean(), sample.name
        hidden = torch.from_numpy(sample.occluded) & known & (columns >= 0)
        if hidden.sum() > 1000:
            assert error[hidden].mean() > 1.5 * error[visible].mean(), sample.name
