# SPDX-License-Identifier: Apache-2.0
"""`quality sfm` and `speed pairs` on rendered photographs."""

import json

import pytest

from benchmarks.speed.pairs import PARTS
from tests.support.scene import write_photographs

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


def test_times_of_pairs(result, tmp_path):
    write_photographs(tmp_path / "photos", 3, size=(128, 96))
    options = "--photographs 2 --size 128 --threads 1 --seconds-per-row 0.01"
    rows = result(f"speed pairs {options}", "--data", tmp_path / "photos")["rows"]
    assert [row["case"]["part"] for row in rows] == list(PARTS)
    assert {row["case"]["pairs"] for row in rows} == {1}
    assert all(row["values"]["median_ms"] > 0 for row in rows)
