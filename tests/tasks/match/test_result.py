# SPDX-License-Identifier: Apache-2.0
"""Matches: what follows from them, what is printed of them, and their files."""

import json

import numpy as np

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.match.metrics import transform
from quadtree_attention.tasks.match.result import Matches
from tests.support import raises
from tests.tasks.match.geometry import K0, K1, points_of_a_scene


def test_best_and_save(tmp_path):
    points = np.arange(8.0).reshape(4, 2)
    matches = Matches(points, points + 1, np.array([0.3, 0.9, 0.3, 0.5]))
    assert matches.best(3).confidence.tolist() == [0.9, 0.5, 0.3]
    assert matches.best(3).keypoints0[2].tolist() == [0.0, 1.0]  # of equal ones the first
    matches.save(tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as stored:
        assert sorted(stored) == ["confidence", "keypoints0", "keypoints1"]
        assert np.array_equal(stored["keypoints1"], points + 1)
    assert [p.name for p in tmp_path.iterdir()] == ["m.npz"]
    again = Matches.load(tmp_path / "m.npz")
    assert np.array_equal(again.keypoints0, points) and again.images == ()
    assert again.confidence.tolist() == [0.3, 0.9, 0.3, 0.5]


def test_files_that_hold_no_matches(tmp_path):
    path, points = tmp_path / "m.npz", np.zeros((3, 2))
    arrays = {"keypoints0": points, "keypoints1": points, "confidence": np.zeros(3)}
    shapes = r"\(3, 2\), \(2, 2\), \(3,\) of float64, float64, float64"
    for change, words in (
        ({"confidence": None}, "must hold the arrays keypoints0, keypoints1, confidence, got no c"),
        ({"keypoints1": points[:2]}, f"must hold .* got {shapes}"),
        ({"keypoints1": np.full((3, 2), np.inf)}, "must hold finite points"),
        ({"confidence": np.array([{}] * 3)}, "cannot read .*, or holds Python objects"),
    ):
        np.savez(path, **{k: v for k, v in (arrays | change).items() if v is not None})
        raises(DataError, words, Matches.load, path)


def test_homography_of_matches():
    matrix = np.array([[1.0, 0.05, 3], [-0.02, 1, 5], [0, 0, 1]])
    points = np.random.default_rng(0).uniform(0, 100, (40, 2))
    matches = Matches(points, transform(points, matrix), np.ones(40))
    assert np.allclose(matches.homography().matrix, matrix, atol=1e-3)
    assert Matches(points[:2], points[:2], np.ones(2)).homography() is None


def test_poses_are_told_with_a_caution_where_inliers_are_few():
    points0, points1 = points_of_a_scene(200)
    plain = Matches(points0, points1, np.full(200, 0.5))
    assert "poses" not in plain.to_dict() and plain.to_dict()["warnings"] == []
    sure = plain.with_poses(K0, (450, 450, 300, 250))
    assert sure.warnings == () and list(sure.poses) == ["poselib", "opencv"]
    assert "200 of 200 inliers" in sure.to_text() and "caution" not in sure.to_text()
    points1 = np.random.default_rng(7).uniform(0, 480, (200, 2))
    points1[:25] = plain.keypoints1[:25]
    unsure = Matches(points0, points1, np.full(200, 0.5)).with_poses(K0, K1)
    for name, pose in unsure.poses.items():
        told = f"only {pose.inliers.sum()} of 200 matches agree with the pose"
        assert sum(told in warning and name in warning for warning in unsure.warnings) == 1
        (row,) = (line for line in unsure.to_text().splitlines() if line.startswith(f"by {name}"))
        assert f"{pose.inliers.sum()} of 200 inliers; caution: {told}" in row
    found = json.loads(json.dumps(unsure.to_dict()))
    assert found["poses"]["opencv"]["inliers"] == unsure.poses["opencv"].inliers.sum()
    assert found["warnings"] == list(unsure.warnings) and unsure.best(3).poses == {}
    none = plain.best(3).with_poses(K0, K1)
    assert none.to_dict()["poses"] == {"poselib": None, "opencv": None}
    assert none.to_text().count("no pose: the matches do not determine one") == 2
