# SPDX-License-Identifier: Apache-2.0
"""Two cameras and what they see."""

import numpy as np

K0 = np.array([[500.0, 0, 320], [0, 510, 240], [0, 0, 1]])
K1 = np.array([[450.0, 0, 300], [0, 450, 250], [0, 0, 1]])


def rotation(axis, degrees):
    """Around an axis, by Rodrigues' formula."""
    x, y, z = np.asarray(axis, float) / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    angle = np.radians(degrees)
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


POSE = np.eye(4)
POSE[:3, :3] = rotation([0.2, 1.0, 0.1], 12.0)
POSE[:3, 3] = [-0.8, 0.1, 0.2]


def points_of_a_scene(count, seed=0):
    """Where both cameras see random points, (N, 2) each."""
    rng = np.random.default_rng(seed)
    pixels = rng.uniform([20, 20], [620, 460], (count, 2))
    rays = np.concatenate([pixels, np.ones((count, 1))], axis=1) @ np.linalg.inv(K0).T
    points = rays * rng.uniform(2, 8, (count, 1))
    moved = points @ POSE[:3, :3].T + POSE[:3, 3]
    seen = moved @ K1.T
    return pixels, seen[:, :2] / seen[:, 2:]
