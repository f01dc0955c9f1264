# SPDX-License-Identifier: Apache-2.0
"""Poses and homographies from matches, some of them wrong."""

import numpy as np
import pytest

from quadtree_attention.errors import OptionError, QuadtreeAttentionError, ShapeError
from quadtree_attention.tasks.match.metrics import corner_error, pose_error, transform
from quadtree_attention.tasks.match.pose import (
    Pose,
    camera_matrix,
    homography,
    read_camera,
    relative_pose,
)
from tests.support import raises
from tests.tasks.match.geometry import K0, K1, POSE, points_of_a_scene

ESTIMATORS = ("poselib", "opencv")
MATRIX = np.array([[0.9, 0.1, 20.0], [-0.05, 1.1, -10.0], [1e-4, -5e-5, 1.0]])


def with_outliers(points1, share=0.3):
    rng = np.random.default_rng(1)
    points1 = points1 + rng.normal(0, 0.1, points1.shape)
    wrong = rng.random(len(points1)) < share
    points1[wrong] = rng.uniform(0, 480, (wrong.sum(), 2))
    return points1, wrong


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_pose_with_outliers(estimator):
    points0, points1 = points_of_a_scene(300)
    points1, wrong = with_outliers(points1)
    pose = relative_pose(points0, points1, K0, K1, estimator=estimator)
    assert pose_error(pose.rotation, pose.translation, POSE) < 0.5
    assert np.linalg.norm(pose.translation) == pytest.approx(1.0)
    assert pose.inliers.shape == (300,) and pose.inliers[~wrong].mean() > 0.9
    assert pose.inliers[wrong].mean() < 0.1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_homography_with_outliers(estimator):
    points0 = np.random.default_rng(2).uniform(0, 480, (200, 2))
    points1, wrong = with_outliers(transform(points0, MATRIX))
    found = homography(points0, points1, estimator=estimator)
    assert corner_error(found.matrix, MATRIX, 640, 480) < 1.0
    assert found.matrix[2, 2] == 1.0
    assert found.inliers[~wrong].all() and found.inliers[wrong].mean() < 0.1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_matches_that_determine_nothing(estimator):
    for count in (0, 3, 4):
        points = np.zeros((count, 2))
        assert relative_pose(points, points, K0, K1, estimator=estimator) is None
    assert homography(np.zeros((3, 2)), np.zeros((3, 2)), estimator=estimator) is None
    same = np.full((40, 2), 7.0)  # does not crash
    relative_pose(same, same, K0, K1, estimator=estimator)
    homography(same, same, estimator=estimator)
    points0, points1 = points_of_a_scene(100)
    points1, _ = with_outliers(points1)
    a, b = (relative_pose(points0, points1, K0, K1, estimator=estimator) for _ in range(2))
    assert np.array_equal(a.rotation, b.rotation)


def test_a_camera_is_a_matrix_or_four_numbers():
    points0, points1 = points_of_a_scene(40)
    expected = relative_pose(points0, points1, K0, K1)
    numbers = (500, 510, 320, 240), [450.0, 450.0, 300.0, 250.0]
    found = relative_pose(points0, points1, *numbers)
    assert np.array_equal(found.rotation, expected.rotation)
    assert np.array_equal(camera_matrix(K1.ravel().tolist()), K1)
    raises(ShapeError, "K1 must be a camera matrix .*, got 'a'", camera_matrix, "a", "K1")
    raises(ShapeError, "K must be a camera matrix", camera_matrix, [[1, 2], [3]])


def test_cameras_as_text(tmp_path):
    path = tmp_path / "camera.txt"
    path.write_text("500 0 320\n0 510 240\n0 0 1\n")
    for given in (
        "500,510,320,240",
        "500 510 320 240",
        "[500, 0, 320; 0 510 240; 0 0 1]",
        str(path),
    ):
        assert read_camera("--K0", given).tolist() == K0.tolist()
    for given, words in (
        ("none.txt", "got 'none.txt', which is neither"),
        ("", "which is neither"),
        ("1,2,3", "got 3 numbers"),
        ("nan,510,320,240", "K0 must be a camera matrix"),
        ("500 0 0 0 510 0 320 240 1", r"--K0 must end in 0, 0, 1, got \[320.0, 240.0, 1.0\]"),
    ):
        raises(QuadtreeAttentionError, words, read_camera, "--K0", given)
    path.write_bytes(b"\xff\xfe\xff")
    raises(OptionError, r"got .*camera.txt', which is neither", read_camera, "--K0", str(path))


@pytest.mark.parametrize(
    ("inliers", "total", "few"),
    [(60, 486, True), (29, 40, True), (30, 40, False), (97, 486, True), (98, 486, False)],
)
def test_a_pose_that_few_matches_agree_with_gets_a_caution(inliers, total, few):
    pose = Pose(np.eye(3), np.array([1.0, 0, 0]), np.arange(total) < inliers)
    told = f"only {inliers} of {total} matches agree with the pose"
    assert (pose.caution is not None) == few == (told in pose.to_text())


def test_angle_of_a_pose():
    cos, sin = np.cos(np.radians(30)), np.sin(np.radians(30))
    rotation = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    assert Pose(rotation, np.array([1.0, 0, 0]), np.ones(5, bool)).degrees == pytest.approx(30)


def test_threshold_of_opencv_is_in_pixels_of_both_cameras(monkeypatch):
    import cv2

    thresholds = []
    find = cv2.findEssentialMat
    monkeypatch.setattr(
        cv2, "findEssentialMat", lambda *a, **k: thresholds.append(k["threshold"]) or find(*a, **k)
    )
    cameras = (400, 420, 240, 200), (560, 620, 230, 210)
    relative_pose(*points_of_a_scene(50), *cameras, estimator="opencv", threshold=2.0)
    assert thresholds == [pytest.approx(2.0 / 500)]


def test_wrong_cameras_points_and_estimators():
    points = np.zeros((10, 2))
    for camera, told in (
        ((0, 400, 240, 200), "must be a camera matrix"),
        ((400, 0, 240, 200), "must be a camera matrix"),
        (np.zeros((3, 3)), "must be a camera matrix"),
        (np.eye(4), r"must be a camera matrix \(3, 3\)"),
        ((1, 2, 3), r".*, or fx, fy, cx, cy, in pixels, got \[1., 2., 3.\]"),
        (2 * K0, r"must end in 0, 0, 1, got \[0.0, 0.0, 2.0\]"),
    ):
        raises(ShapeError, f"K0 {told}", relative_pose, points, points, camera, K1)
        raises(ShapeError, f"K1 {told}", relative_pose, points, points, K0, camera)
    raises(ShapeError, r"got \(10, 2\) and \(4, 2\); row i", homography, points, points[:4])
    told = "estimator must be one of poselib, opencv, got 'magsac'"
    raises(OptionError, told, homography, points, points, estimator="magsac")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_points_that_are_no_numbers_or_far_away(estimator):
    points = np.random.default_rng(0).uniform(0, 480, (20, 2))
    for value in (np.nan, np.inf):
        other = points.copy()
        other[3, 1] = value
        with pytest.raises(OptionError, match="points must be finite"):
            relative_pose(points, other, K0, K1, estimator=estimator)
    other[3, 1] = 1e12
    relative_pose(points, other, K0, K1, estimator=estimator)
