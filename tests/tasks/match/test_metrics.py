# SPDX-License-Identifier: Apache-2.0
"""Errors of poses, homographies and points, against numbers worked out by hand."""

import numpy as np
import pytest

from quadtree_attention.tasks.match.metrics import (
    auc,
    corner_error,
    direction_error,
    epipolar_errors,
    pose_error,
    precision,
    rotation_error,
    transform,
)
from tests.tasks.match.geometry import K0, K1, POSE, points_of_a_scene, rotation


def test_auc_of_hand_made_errors():
    # recall rises from 0 to 1/2 over [0, 2], to 1 at 4, and stays: 0.5 + 1.5 + 1 of 5
    assert auc([2.0, 4.0], [5.0]) == pytest.approx([60.0])


def test_auc_counts_failures_as_never_recalled():
    assert auc([0.0, np.inf], [10.0]) == pytest.approx([50.0])
    assert auc([np.inf], [5.0, 20.0]) == [0.0, 0.0]


def test_auc_of_perfect_and_of_no_pairs():
    assert auc([0.0, 0.0], [5.0, 10.0]) == pytest.approx([100.0, 100.0])
    assert np.isnan(auc([], [5.0])[0])


def test_auc_does_not_depend_on_order():
    errors = [3.0, 0.5, 12.0, 7.0]
    assert auc(errors, [5.0, 10.0]) == auc(errors[::-1], [5.0, 10.0])


@pytest.mark.parametrize("degrees", [0.0, 7.5, 90.0, 180.0])
def test_rotation_error_is_the_angle(degrees):
    base = rotation([1.0, 2.0, -1.0], 33.0)
    turned = base @ rotation([0.0, 1.0, 0.0], degrees)
    assert rotation_error(turned, base) == pytest.approx(degrees, abs=1e-5)


def test_direction_error_takes_opposites_for_the_same():
    assert direction_error(np.array([0, 0, 2.0]), np.array([0, 0, -1.0])) == 0.0
    angle = direction_error(np.array([1.0, 1.0, 0.0]), np.array([1.0, 0, 0]))
    assert angle == pytest.approx(45.0)


def test_pose_error_is_the_larger_one():
    turned = POSE[:3, :3] @ rotation([0, 0, 1.0], 3.0)
    assert pose_error(turned, POSE[:3, 3], POSE) == pytest.approx(3.0, abs=1e-5)
    away = rotation([0, 1.0, 0], 8.0) @ POSE[:3, 3]
    assert pose_error(turned, away, POSE) == pytest.approx(
        max(3.0, direction_error(away, POSE[:3, 3])), abs=1e-5
    )


def test_epipolar_errors_of_true_and_moved_points():
    points0, points1 = points_of_a_scene(50)
    errors = epipolar_errors(points0, points1, K0, K1, POSE)
    assert errors.max() < 1e-12
    moved = points1.copy()
    moved[:10] += 25.0
    errors = epipolar_errors(points0, moved, K0, K1, POSE)
    assert precision(errors, 1e-8) == pytest.approx(80.0)


def test_precision_without_matches():
    nothing = np.zeros((0, 2))
    assert np.isnan(precision(epipolar_errors(nothing, nothing, K0, K1, POSE)))


def test_corner_error_of_a_shift():
    shift = np.array([[1, 0, 3.0], [0, 1, 4.0], [0, 0, 1]])
    assert corner_error(shift, np.eye(3), 640, 480) == pytest.approx(5.0)
    assert corner_error(2 * shift, np.eye(3), 640, 480) == pytest.approx(5.0)
    assert corner_error(None, np.eye(3), 640, 480) == np.inf
    assert corner_error(np.full((3, 3), np.nan), np.eye(3), 640, 480) == np.inf


def test_transform_is_projective():
    homography = np.array([[2, 0, 1.0], [0, 3, 0], [0.5, 0, 1]])
    assert transform(np.array([[2.0, 4.0]]), homography) == pytest.approx(np.array([[2.5, 6.0]]))
