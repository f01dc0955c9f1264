# SPDX-License-Identifier: Apache-2.0
"""Disparities in files, of this package and of other programs, and their scores."""

import json

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks import Disparity, evaluate
from tests.support import raises

SIZE = (50, 90)  # height, width


def truth():
    """Disparity 8 above, 20 below."""
    values = np.full(SIZE, 8.0, np.float32)
    values[25:] = 20
    return values


def write_pairs(root, names=("a", "b")):
    """Pairs of the layout "folder"; the first rows have no truth, 20 columns are occluded."""
    for folder in ("left", "right", "disparity", "occlusion"):
        (root / folder).mkdir(parents=True)
    known = truth()
    known[:5] = np.nan
    hidden = np.zeros(SIZE, np.uint8)
    hidden[:, :20] = 255
    rng = np.random.default_rng(0)
    for name in names:
        for side in ("left", "right"):
            view = rng.integers(0, 255, (*SIZE, 3), np.uint8)
            Image.fromarray(view).save(root / side / f"{name}.png")
        Disparity(disparity=known).save(root / "disparity" / f"{name}.pfm")
        Image.fromarray(hidden).save(root / "occlusion" / f"{name}.png")
    return root


def test_points_are_those_of_the_pixels(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8))
    occlusion = np.zeros(SIZE, np.float32)
    occlusion[:, :20] = 1
    disparity = truth()
    disparity[3, 40] = -2  # no depth
    found = Disparity(disparity=disparity, occlusion=occlusion, images=(image, image))
    points, colours = found.points(100, 0.5, offset=2, centre=(40, 10))
    assert len(points) == len(colours) == SIZE[0] * (SIZE[1] - 20) - 1
    z = 100 * 0.5 / (8 + 2)
    np.testing.assert_allclose(points[0], [(20 - 40) * z / 100, (0 - 10) * z / 100, z], rtol=1e-6)
    assert colours[0].tolist() == list(image.getpixel((20, 0)))
    assert len(found.points(100, 0.5, occluded=True)[0]) == SIZE[0] * SIZE[1] - 1
    raises(OptionError, "centre must be x and y", found.points, 100, 0.5, centre=3)
    near, _ = found.points(100, 0.5, offset=2, farthest=3)
    assert len(near) == 25 * (SIZE[1] - 20) and near[:, 2].max() < 3
    found.save_points(tmp_path / "p.ply", 100, 0.5, offset=2, centre=(40, 10))
    head, _, body = (tmp_path / "p.ply").read_bytes().partition(b"end_header\n")
    assert f"element vertex {len(points)}\n".encode() in head
    np.testing.assert_array_equal(np.frombuffer(body, "<f4", 3), points[0])
    assert list(body[12:15]) == colours[0].tolist() and len(body) == 15 * len(points)
    raises(OptionError, r"as \.ply, got", found.save_points, tmp_path / "p.obj", 100, 0.5)
    assert set(Disparity(disparity=truth()).points(100, 0.5)[1].ravel()) == {128}


def write_answer(path, values, occlusion=None):
    more = {} if occlusion is None else {"occlusion": occlusion}
    np.savez(path, disparity=values, **more)


def scored(data, predictions):
    return evaluate("stereo", data=data, split="all", predictions=predictions)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"))


def test_a_file_gives_the_same_back(tmp_path):
    occlusion = np.random.default_rng(0).random(SIZE, np.float32)
    found = Disparity(disparity=truth() + occlusion, occlusion=occlusion)
    found.save(tmp_path / "a.npz")
    again = Disparity.load(tmp_path / "a.npz")
    assert np.array_equal(again.disparity, found.disparity)
    assert np.array_equal(again.occlusion, occlusion.astype(np.float16).astype(np.float32))
    found.save(tmp_path / "a.pfm")
    alone = Disparity.load(tmp_path / "a.pfm")
    assert np.array_equal(alone.disparity, found.disparity) and alone.occlusion is None
    assert alone.occluded == 0 and found.occluded == (occlusion > 0.5).mean()


def test_scores(data, tmp_path):
    wrong = truth()
    wrong[:, :20] += 10  # occluded
    wrong[:, 20:40] += 1.5  # 20 of the 70 columns that are not
    half = np.zeros(SIZE, np.float32)
    half[:, :10] = 1
    write_answer(tmp_path / "a.npz", truth(), half)
    write_answer(tmp_path / "b.npz", wrong, half)
    scores = scored(data, tmp_path)
    a, b = scores.rows
    assert (a["name"], b["name"]) == ("a", "b")
    assert a["epe_all"] == 0 and a["d1_all"] == 0 and a["bad1_noc"] == 0
    assert b["epe_noc"] == pytest.approx(1.5 * 20 / 70)
    assert b["epe_all"] == pytest.approx((10 * 20 + 1.5 * 20) / 90)
    assert b["bad1_all"] == pytest.approx(100 * 40 / 90)
    assert b["bad2_noc"] == b["bad3_noc"] == b["d1_noc"] == 0
    assert b["d1_all"] == b["bad3_all"] == pytest.approx(100 * 20 / 90)
    assert a["occlusion_iou"] == pytest.approx(0.5)
    assert scores.mean["epe_all"] == pytest.approx(b["epe_all"] / 2)
    assert not scores.missing and not scores.skipped and scores.settings is None
    assert json.loads(json.dumps(scores.to_dict(), allow_nan=False))["mean"]["epe_all"] > 0
    titles, row, *_, mean = (line.split() for line in scores.to_text().splitlines()[-4:])
    assert titles[:5] == ["pair", "EPE", "noc", "bad-1", "noc"] and mean[0] == "mean"
    assert row[:3] == ["a", "0.00", "0.0"]


def test_answers_of_other_programs(data, tmp_path):
    """Without occlusion; pixels that they leave out count as a disparity of zero."""
    values = truth()
    Disparity(disparity=values).save(tmp_path / "a.png")
    values[25:] = np.nan
    Disparity(disparity=values).save(tmp_path / "b.pfm")
    a, b = scored(data, tmp_path).rows
    assert a["epe_all"] == 0 and "occlusion_iou" not in a
    assert b["epe_noc"] == pytest.approx(20 * 25 / 45)  # of 45 rows that are known


def test_answers_that_are_refused(data, tmp_path):
    write_answer(tmp_path / "a.npz", np.ones((50, 91)))
    with pytest.raises(DataError, match=r"of a must have the size of its pair, 90x50, got 91x50"):
        scored(data, tmp_path)
    write_answer(tmp_path / "a.npz", np.ones(SIZE), np.ones((2, 2)))
    with pytest.raises(DataError, match=r"a.npz must hold an occlusion \(50, 90\).* got \(2, 2\)"):
        scored(data, tmp_path)
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 broken")
    raises(DataError, r"cannot read .*a.npz", scored, data, tmp_path)
