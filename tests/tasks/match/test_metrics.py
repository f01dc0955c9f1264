# SPDX-License-Identifier: Apache-2.0
"""Errors against numbers worked out by hand, and scores of matches in files."""

import importlib
import json
import math

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks import evaluate
from quadtree_attention.tasks.match.metrics import (
    MatchMetric,
    auc,
    corner_error,
    direction_error,
    epipolar_errors,
    pose_error,
    precision,
    transform,
    unturned,
)
from quadtree_attention.tasks.match.pose import homography, rotation_degrees
from tests.support import raises
from tests.tasks.match.geometry import K0, K1, POSE, points_of_a_scene, rotation

MATRIX = np.array([[0.9, 0.1, 20.0], [-0.05, 1.1, -10.0], [1e-4, -5e-5, 1.0]])
SIZES = {"wall0.png": (500, 400), "wall1.png": (800, 640)}
ESTIMATORS = ("opencv", "poselib")


def words(*matrices):
    return " ".join(repr(float(x)) for matrix in matrices for x in np.ravel(matrix))


def pose_line(name="a"):
    return f"{name}0.png {name}1.png 0 0 {words(K0, K1, POSE)}"


def homography_line():
    return f"wall0.png wall1.png {words(MATRIX)}"


def save(folder, name, points0, points1):
    folder.mkdir(exist_ok=True)
    arrays = {"keypoints0": points0, "keypoints1": points1, "confidence": np.ones(len(points0))}
    np.savez(folder / f"{name}.npz", **arrays)


def save_scene(folder, name="a0__a1", *, noise=0.0, wrong=0.0, count=200):
    """Matches of the scene with `POSE`, some of them wrong."""
    points0, points1 = points_of_a_scene(count)
    rng = np.random.default_rng(3)
    points1 = points1 + rng.normal(0, noise, points1.shape)
    bad = np.arange(count) < wrong * count
    points1[bad] = rng.uniform(0, 480, (bad.sum(), 2))
    save(folder, name, points0, points1)


def wall_points(*, away=(0.0, 0.0), noise=0.0):
    rng = np.random.default_rng(4)
    points0 = rng.uniform([0, 0], [499, 399], (100, 2))
    return points0, transform(points0, MATRIX) + away + rng.normal(0, noise, (100, 2))


def save_wall(folder, **moved):
    """Matches of a plane, all of them the same way from where they belong, or with noise."""
    save(folder, "wall0__wall1", *wall_points(**moved))
    for name, size in SIZES.items():
        Image.new("L", size).save(folder / name)


def scores_of(folder, *lines, **thresholds):
    path = folder / "pairs.txt"
    path.write_text("\n".join(lines) + "\n")
    return evaluate("match", data=path, predictions=folder, thresholds=thresholds)


def errors_of(row):
    return [row[f"error_{name}"] for name in ESTIMATORS]


def test_auc_of_hand_made_errors():
    # recall rises from 0 to 1/2 over [0, 2], to 1 at 4, and stays: 0.5 + 1.5 + 1 of 5
    assert auc([2.0, 4.0], [5.0]) == pytest.approx([60.0])
    assert auc([0.0, np.inf], [10.0]) == pytest.approx([50.0])  # a failure is never recalled
    assert auc([np.inf], [5.0, 20.0]) == [0.0, 0.0]
    assert auc([0.0, 0.0], [5.0, 10.0]) == pytest.approx([100.0, 100.0])
    assert np.isnan(auc([], [5.0])[0])
    errors = [3.0, 0.5, 12.0, 7.0]
    assert auc(errors, [5.0, 10.0]) == auc(errors[::-1], [5.0, 10.0])


@pytest.mark.parametrize("degrees", [0.0, 7.5, 90.0, 180.0])
def test_rotation_error_is_the_angle(degrees):
    base = rotation([1.0, 2.0, -1.0], 33.0)
    turned = base @ rotation([0.0, 1.0, 0.0], degrees)
    assert rotation_degrees(turned.T @ base) == pytest.approx(degrees, abs=1e-5)


def test_errors_of_poses():
    assert direction_error(np.array([0, 0, 2.0]), np.array([0, 0, -1.0])) == 0.0
    angle = direction_error(np.array([1.0, 1.0, 0.0]), np.array([1.0, 0, 0]))
    assert angle == pytest.approx(45.0)
    turned = POSE[:3, :3] @ rotation([0, 0, 1.0], 3.0)
    assert pose_error(turned, POSE[:3, 3], POSE) == pytest.approx(3.0, abs=1e-5)
    away = rotation([0, 1.0, 0], 8.0) @ POSE[:3, 3]
    assert pose_error(turned, away, POSE) == pytest.approx(
        max(3.0, direction_error(away, POSE[:3, 3])), abs=1e-5
    )


def test_epipolar_errors():
    points0, points1 = points_of_a_scene(50)
    errors = epipolar_errors(points0, points1, K0, K1, POSE)
    assert errors.max() < 1e-12
    moved = points1.copy()
    moved[:10] += 25.0
    errors = epipolar_errors(points0, moved, K0, K1, POSE)
    assert precision(errors, 1e-8) == pytest.approx(80.0)
    # Two cameras beside each other, of focal lengths 500 and 250: epipolar lines are rows. Row 50
    # of image 0 is row 25 of image 1. A match in row 35 is 10 / 250 away from its line there, as
    # much in image 0, and both count.
    T = np.eye(4)
    T[:3, 3] = [-2.0, 0, 0]
    cameras = np.diag([500.0, 500, 1]), np.diag([250.0, 250, 1])
    at, off = np.array([[100.0, 50.0]]), np.array([[30.0, 35.0]])
    (error,) = epipolar_errors(at, off, *cameras, T)
    assert error == pytest.approx(2 * 0.04**2)
    # Towards what is seen, lines meet at the epipole, and distances from them differ
    T[:3, 3] = [0, 0, 1.0]
    (error,) = epipolar_errors(np.array([[100.0, 0]]), np.array([[100.0, 25.0]]), *cameras, T)
    # rays (0.2, 0), (0.4, 0.1): 0.1 from the line of the first, 0.2 / sqrt(17) from the other's
    assert error == pytest.approx(0.1**2 + 0.2**2 / 17)
    nothing = np.zeros((0, 2))
    assert np.isnan(precision(epipolar_errors(nothing, nothing, K0, K1, POSE)))


def test_corner_error_and_transform():
    shift, still = np.array([[1, 0, 3.0], [0, 1, 4.0], [0, 0, 1]]), np.eye(3)
    for moved, expected in ((shift, 5), (2 * shift, 5), (None, np.inf), (shift * np.nan, np.inf)):
        assert corner_error(moved, still, 640, 480) == pytest.approx(expected)
    # Twice as wide, three times as high: corners of 9 x 3 pixels move by 0, 8, 4 and both
    stretch = np.diag([2.0, 3.0, 1.0])
    assert corner_error(stretch, still, 9, 3) == pytest.approx((0 + 8 + 4 + 80**0.5) / 4)
    projective = np.array([[2, 0, 1.0], [0, 3, 0], [0.5, 0, 1]])
    assert transform(np.array([[2.0, 4.0]]), projective) == pytest.approx(np.array([[2.5, 6.0]]))


def test_the_estimators_are_two_and_repeat_themselves(tmp_path):
    save_scene(tmp_path, noise=0.5, wrong=0.6)
    first = scores_of(tmp_path, pose_line())
    importlib.import_module("cv2").setRNGSeed(7)
    np.random.seed(7)
    assert scores_of(tmp_path, pose_line()) == first
    assert len(set(errors_of(first.rows[0]))) == 2


def test_settings_of_poses_act(tmp_path):
    save_scene(tmp_path, noise=2.0, wrong=0.5)
    usual = scores_of(tmp_path, pose_line())
    assert 30 < usual.mean["pose_precision"] < 100
    strict = scores_of(tmp_path, pose_line(), epipolar=1e-7)
    assert strict.mean["pose_precision"] < usual.mean["pose_precision"] / 2
    assert errors_of(strict.rows[0]) == errors_of(usual.rows[0])
    loose = scores_of(tmp_path, pose_line(), pose_pixels=10.0)
    for ours, others in zip(errors_of(loose.rows[0]), errors_of(usual.rows[0]), strict=True):
        assert ours != others


def test_poses_are_measured_at_a_size_of_their_own(tmp_path):
    """ScanNet's images of 1296x968, whose published scores are for 640x480."""
    large = np.diag([1296 / 640, 968 / 480, 1.0])  # from pixels of 640x480
    points0, points1 = points_of_a_scene(200)
    points1 = points1 + np.random.default_rng(3).normal(0, 1.0, points1.shape)
    save(tmp_path, "b0__b1", *(points * np.diag(large)[:2] for points in (points0, points1)))
    for name in ("b0.png", "b1.png"):
        Image.new("L", (1296, 968)).save(tmp_path / name)
    line = f"b0.png b1.png 0 0 {words(large @ K0, large @ K1, POSE)}"
    given = scores_of(tmp_path, line)
    scores = scores_of(tmp_path, line, pose_size="640x480")
    # as if the images had that size; in larger pixels fewer matches are within half of one
    save(tmp_path, "a0__a1", points0, points1)
    small = scores_of(tmp_path, pose_line())
    assert errors_of(scores.rows[0]) == pytest.approx(errors_of(small.rows[0]), rel=1e-5)
    assert errors_of(scores.rows[0]) != pytest.approx(errors_of(given.rows[0]), rel=1e-2)
    assert scores.mean["pose_precision"] == pytest.approx(given.mean["pose_precision"])
    assert scores.facts["pose_size"] == [640, 480] and "pose_size" not in given.facts
    for wrong in ("640", "0x480", "640*480"):
        raises(OptionError, "pose_size must be WIDTHxHEIGHT", MatchMetric, pose_size=wrong)


def test_points_of_turned_images(tmp_path):
    """What `np.rot90` does to an image is undone; the camera is that of the image before."""
    image = np.zeros((480, 640), bool)
    image[100, 30] = True
    for turns in range(4):
        y, x = np.argwhere(np.rot90(image, turns))[0]
        assert unturned([[x, y]], turns, (640, 480)).tolist() == [[30, 100]]

    points0, points1 = points_of_a_scene(100)
    turned1 = np.stack([480 - 1 - points1[:, 1], points1[:, 0]], axis=1)  # three quarters
    save(tmp_path, "a0__a1", points0, turned1)
    Image.new("L", (640, 480)).save(tmp_path / "a0.png")
    Image.new("L", (640, 480)).save(tmp_path / "a1.png")
    scores = scores_of(tmp_path, pose_line().replace(" 0 0 ", " 0 3 ", 1))
    assert scores.mean["pose_precision"] == 100 and scores.rows[0]["error_poselib"] < 0.05
    assert scores_of(tmp_path, pose_line()).mean["pose_precision"] < 50


@pytest.mark.parametrize(
    ("side", "error", "correct"), [(480, 3.75, 0), (0, 5, 0), (240, 1.875, 100)]
)
def test_corners_are_measured_in_pixels_of_image_1_at_the_shorter_side(
    tmp_path, side, error, correct
):
    save_wall(tmp_path, away=(3.0, 4.0))
    scores = scores_of(tmp_path, homography_line(), side=side)
    assert "pose_pairs" not in scores.facts and scores.mean["homography_precision"] == correct
    for name in ESTIMATORS:
        median = scores.mean[f"homography_{name}_median"]
        assert median == pytest.approx(error, abs=1e-3)
        areas = [scores.mean[f"homography_{name}_auc{threshold}"] for threshold in (3, 5, 10)]
        assert areas == pytest.approx(auc([median], (3, 5, 10)))


@pytest.mark.parametrize("side", [480, 64])
def test_estimators_of_homographies_take_inliers_at_the_side_that_is_measured(tmp_path, side):
    """3 pixels at a side of 480 are 4 of an image with a shorter side of 640, at 64 they are 30."""
    save_wall(tmp_path, noise=8.0)
    mean = scores_of(tmp_path, homography_line(), side=side).mean
    for name in ESTIMATORS:
        given = homography(*wall_points(noise=8.0), estimator=name, threshold=3 * 640 / side)
        error = corner_error(given.matrix, MATRIX, 500, 400) * side / 640
        assert mean[f"homography_{name}_median"] == pytest.approx(error)


def test_turned_photos_are_measured_upright(tmp_path):
    save_wall(tmp_path, away=(3.0, 4.0))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (640, 1200)).save(tmp_path / "wall1.png", exif=exif)
    Image.new("L", (400, 500)).save(tmp_path / "wall0.png", exif=exif)
    turned = scores_of(tmp_path, homography_line())
    assert turned.mean["homography_opencv_median"] == pytest.approx(3.75, abs=1e-3)


def test_both_kinds_and_failures_in_one_set(tmp_path):
    save_scene(tmp_path)
    save_scene(tmp_path, "few0__few1", count=4)
    save(tmp_path, "empty0__empty1", np.zeros((0, 2)), np.zeros((0, 2)))
    save_wall(tmp_path)
    lines = [homography_line(), "# a remark", *map(pose_line, ("a", "gone", "few", "empty"))]
    scores = scores_of(tmp_path, *lines)
    assert scores.missing == ["gone0__gone1"] and scores.skipped == []
    assert (scores.facts["pose_pairs"], scores.facts["pose_missing"]) == (4, 1)
    assert (scores.mean["pose_matches"], scores.mean["pose_precision"]) == (51, 50)
    for name in ESTIMATORS:
        assert scores.facts[f"pose_{name}_failed"] == 3
        assert math.isinf(scores.mean[f"pose_{name}_median"])
        assert 24.9 < scores.mean[f"pose_{name}_auc20"] <= 25
        assert scores.mean[f"homography_{name}_median"] < 1e-3
    assert [(row["line"], row["missing"], row["matches"]) for row in scores.rows] == [
        (1, False, 100), (3, False, 200), (4, True, 0), (5, False, 4), (6, False, 0),
    ]  # fmt: skip
    found = json.loads(json.dumps(scores.to_dict(), allow_nan=False))
    assert errors_of(found["rows"][2]) == [None, None]
    assert found["mean"]["pose_opencv_median"] is None
    thresholds = {name: found["facts"][name] for name in ("pose_pixels", "epipolar", "side")}
    assert thresholds == {"pose_pixels": 0.5, "epipolar": 5e-4, "side": 480}
    assert "few0__few1" in scores.to_text()


def test_an_unreadable_image_without_predictions_is_a_failed_pair(tmp_path):
    save_scene(tmp_path)
    scores = scores_of(tmp_path, pose_line(), homography_line())
    assert scores.missing == ["wall0__wall1"] and scores.facts["homography_missing"] == 1
    assert [scores.mean[f"homography_opencv_auc{t}"] for t in (3, 5, 10)] == [0, 0, 0]


def test_an_image_whose_size_is_needed(tmp_path):
    save_wall(tmp_path)
    save_scene(tmp_path)
    (tmp_path / "wall1.png").unlink()
    raises(DataError, r"cannot read .*wall1\.png", scores_of, tmp_path, homography_line())
