# SPDX-License-Identifier: Apache-2.0
"""`quality sfm`, `quality poses` and `speed pairs` on rendered photographs."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from benchmarks.quality.poses import pose_errors
from benchmarks.speed.pairs import PARTS
from tests.support.scene import pose, texture, write_photographs

pytest.importorskip("pycolmap", reason="the mapper is that of the extra 'sfm'")


def test_both_methods_on_a_scene_and_a_third_of_it(result, tmp_path):
    scene = tmp_path / "data" / "banana"
    poses = write_photographs(scene / "images", 7, size=(320, 240), focal=325.0)
    cameras = {"images": [{"file": name, "focal_px": 325.0} for name in sorted(poses)]}
    (scene / "cameras.json").write_text(json.dumps(cameras))
    lund = tmp_path / "data" / "lund_street"
    lund.symlink_to(scene)
    options = "--scenes banana,lund_street/3 --size 160 --threads 1"
    made = result(
        f"quality sfm {options}", "--data", tmp_path / "data", "--work", tmp_path / "work"
    )
    rows = made["rows"]
    cases = [(row["case"]["scene"], row["case"]["method"]) for row in rows]
    assert cases == [
        (name, method)
        for name in ("banana", "lund_street/3")
        for method in ("quadtree", "SIFT + COLMAP")
    ]
    assert [row["values"]["photographs"] for row in rows] == [7, 7, 3, 3]
    ours, sift, *_ = (row["values"] for row in rows)
    assert ours["models"] == sift["models"] == [7]
    assert ours["points"] > 100 and ours["track_length"] > 2.5 and 0 < ours["error"] < 1
    assert sift["points"] > 100 and 0 < sift["error"] < 1
    settings = made["runs"][0]["settings"]["methods"]
    assert settings["quadtree"]["longer_side"] == 160 and "SIFT + COLMAP" in settings


def test_poses_of_a_rendered_scene(result, tmp_path):
    """With and without the focal length; the relative poses are almost true."""
    (tmp_path / "data").mkdir()
    for i in range(3):
        Image.fromarray(texture(512, seed=i).astype(np.uint8)).save(tmp_path / "data" / f"{i}.png")
    options = "--scenes orbit --photographs 5 --image 240x320 --size 320 --methods matcher"
    places = "--data", tmp_path / "data", "--work", tmp_path / "work"
    made = result(f"quality poses {options} --threads 1", *places)
    given, unknown = made["rows"]
    assert [row["case"]["focal"] for row in made["rows"]] == ["given", "unknown"]
    for row in (given, unknown):
        assert row["values"]["models"] == [5] and row["values"]["points"] > 100
        assert row["values"]["auc"]["5"] > 90, row["values"]
    assert given["values"]["focal"] == pytest.approx(1, abs=0.02)
    assert unknown["values"]["focal"] == pytest.approx(1, abs=0.05)
    assert len(list((tmp_path / "work" / "photographs" / "orbit-5-320-240").iterdir())) == 5


def test_errors_of_poses():
    true = {f"{i}.jpg": pose(angle) for i, angle in enumerate((0.0, 0.4, 0.9))}
    assert max(pose_errors(true, true)) < 1e-5
    moved = dict(true)  # the whole model is turned and scaled
    turn = pose(0.3)[:, :3]
    for name, old in true.items():
        moved[name] = np.column_stack([old[:, :3] @ turn, 7.0 * old[:, 3]])
    assert max(pose_errors(moved, true)) < 1e-5
    angle = math.radians(3)
    about = np.array([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0],
                      [0, 0, 1]])  # fmt: skip
    wrong = true | {"2.jpg": about @ true["2.jpg"]}  # turned about its axis
    errors = pose_errors(wrong, true)
    assert errors[0] < 1e-5 and errors[1] >= 3 - 1e-6 and errors[2] >= 3 - 1e-6
    back = true | {"2.jpg": true["2.jpg"] * [1, 1, 1, -1]}
    assert max(pose_errors(back, true)) > 90
    del wrong["1.jpg"]
    assert np.isinf(pose_errors(wrong, true)).tolist() == [True, False, True]


def test_times_of_pairs(result, tmp_path):
    write_photographs(tmp_path / "photos", 3, size=(128, 96))
    options = "--photographs 2 --size 128 --threads 1 --seconds-per-row 0.01"
    rows = result(f"speed pairs {options}", "--data", tmp_path / "photos")["rows"]
    assert [row["case"]["part"] for row in rows] == list(PARTS)
    assert {row["case"]["pairs"] for row in rows} == {1}
    assert all(row["values"]["median_ms"] > 0 for row in rows)
