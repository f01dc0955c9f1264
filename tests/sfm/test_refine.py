# SPDX-License-Identifier: Apache-2.0
"""Tracks of photographs with known poses, at corners and measured by the pixels."""

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.sfm.refine import Pixels, align, local_maps, refine_tracks
from quadtree_attention.sfm.tracks import PairPoints, assembled, build
from tests.support.scene import ground, pose, write_photographs

FOCAL, SIZE = 260.0, (256, 192)
SHIFTS = np.array([[0.0, 0.0], [5.3, -3.6], [-4.45, 2.2]])


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One texture, seen three times, moved by fractions of a pixel."""
    folder = tmp_path_factory.mktemp("photos")
    write_photographs(folder, 1, size=(384, 320), focal=260.0)
    with Image.open(folder / "00.png") as image:
        paths = [folder / f"{i}.png" for i in range(3)]
        for path, (x, y) in zip(paths, SHIFTS, strict=True):
            entries = (1, 0, 48 - x, 0, 1, 48 - y)
            how = Image.Transform.AFFINE, entries, Image.Resampling.BICUBIC
            image.transform(SIZE, *how).save(path)
    return [str(path) for path in paths]


def cells():
    x, y = np.meshgrid(np.arange(4, 28) * 8.0, np.arange(4, 20) * 8.0)
    return np.stack([x.ravel(), y.ravel()], axis=1)


def pair(i, j, chosen, noise):
    """Matches of cells of image i, half a pixel wrong."""
    points = cells()[chosen] + SHIFTS[i]
    wrong = np.random.default_rng(10 * i + j).normal(scale=noise, size=points.shape)
    there = points - SHIFTS[i] + SHIFTS[j] + wrong
    count = len(points)
    return PairPoints(i, j, points, there, np.ones(count, bool), np.full(count, 0.9))


def apart(tracks):
    """How far points are from where their anchors are in their image."""
    rows = np.repeat(tracks.anchors, np.diff(tracks.starts))
    moved = tracks.points - tracks.points[rows]
    true = SHIFTS[tracks.images] - SHIFTS[tracks.images[rows]]
    error = np.linalg.norm(moved - true, axis=1)
    return error[np.arange(len(error)) != rows]


def test_points_are_measured_to_a_fraction_of_the_error_of_matches(paths):
    pairs = [pair(0, j, np.arange(len(cells())), noise=0.5) for j in (1, 2)]
    before = build(pairs, [6.0] * 3)
    after = refine_tracks(before, pairs, paths, [1.0] * 3)
    assert np.median(apart(before)) > 0.4
    assert np.quantile(apart(after), 0.95) < 0.08
    assert len(after) > 0.7 * len(before)


def test_tracks_reach_photographs_whose_cells_matched_nearby(paths):
    """Every second cell is matched in image 2."""
    everything = np.arange(len(cells()))
    pairs = [pair(0, 1, everything, noise=0.3), pair(0, 2, everything[::2], noise=0.3)]
    before = build(pairs, [6.0] * 3)
    after = refine_tracks(before, pairs, paths, [1.0] * 3)
    assert np.diff(before.starts).mean() == pytest.approx(2.5, abs=0.05)
    assert np.diff(after.starts).mean() > 2.9
    assert np.quantile(apart(after), 0.95) < 0.08


def test_other_texture_and_no_texture_are_left_out(paths, tmp_path):
    random = np.random.default_rng(0)
    for name, values in (
        ("noise", random.integers(0, 256, (48, 64), np.uint8)),
        ("plain", np.full((48, 64), 128, np.uint8)),
    ):
        image = Image.fromarray(values).resize(SIZE, Image.Resampling.BICUBIC)
        image.save(tmp_path / f"{name}.png")
    pairs = [pair(0, j, np.arange(len(cells())), noise=0.3) for j in (1, 2)]
    before = build(pairs, [6.0] * 3)
    other = [*paths[:2], str(tmp_path / "noise.png")]
    after = refine_tracks(before, pairs, other, [1.0] * 3)
    assert (after.images == 2).sum() < 0.02 * len(before) and len(after) > 0.7 * len(before)
    plain = [str(tmp_path / "plain.png"), *paths[1:]]
    assert len(refine_tracks(before, pairs, plain, [1.0] * 3)) == 0


def test_a_turned_and_larger_photograph(tmp_path):
    """Image 1 shows image 0 turned by 30 degrees, 1.7 times as large, darker."""
    write_photographs(tmp_path, 1, size=(320, 256), focal=200.0)
    with Image.open(tmp_path / "00.png") as image:
        grey = image.convert("L")
    angle, zoom = np.radians(30), 1.7
    turn = zoom * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    back = np.linalg.inv(turn)
    middle0, middle1 = np.array([160.0, 128.0]), np.array([240.0, 190.0])
    shift = middle0 - back @ middle1
    entries = (*back[0], shift[0], *back[1], shift[1])
    larger = grey.transform(
        (480, 380), Image.Transform.AFFINE, entries, Image.Resampling.BICUBIC
    ).point(lambda value: value * 0.6 + 20)
    grey.save(tmp_path / "a.png")
    larger.save(tmp_path / "b.png")
    source, target = (Pixels.of(str(tmp_path / name), 1.0) for name in ("a.png", "b.png"))
    random = np.random.default_rng(0)
    points = torch.from_numpy(np.rint(random.uniform(-45, 45, (200, 2))) + middle0)
    corners, texture = source.corners(points)
    corners = corners[texture > 8]
    true = (corners.numpy() + 0.5 - middle0) @ turn.T + middle1 - 0.5
    start = torch.from_numpy(true + random.normal(scale=1.0, size=true.shape))
    bent = torch.from_numpy(turn + random.normal(scale=0.08, size=(len(true), 2, 2)))
    found, correlation = align(source, target, corners, start, bent)
    off = np.linalg.norm(found.numpy() - true, axis=1)
    assert len(true) > 100 and np.median(off) < 0.1 and np.quantile(off, 0.9) < 0.4
    assert correlation.median() > 0.95


def test_local_maps_of_a_hilly_ground_with_outliers():
    """The scene's cameras; every tenth match is wrong."""
    random = np.random.default_rng(0)
    x, y = random.uniform(-1.2, 1.2, (2, 3000))
    world = np.stack([x, y, ground(x, y), np.ones_like(x)])
    seen = [motion @ world for motion in (pose(-0.2), pose(0.2))]
    points = [torch.from_numpy(FOCAL * (p[:2] / p[2]).T + 128) for p in seen]
    wrong = points[1].clone()
    wrong[::10] += 20
    queries = torch.arange(5, 3000, 50)
    kept = torch.ones(3000, dtype=torch.bool)
    kept[queries] = False
    expected, maps, near = local_maps(points[0][queries], points[0][kept], wrong[kept], 24.0)
    off = (expected - points[1][queries]).norm(dim=1)
    assert near.double().mean() > 0.9 and off[near].median() < 0.1
    assert (torch.linalg.det(maps[near]) - 1).abs().median() < 0.3
    far = torch.full((1, 2), 1000.0, dtype=torch.float64)
    assert not local_maps(far, points[0], points[1], 24.0)[2].any()


def test_the_longest_of_the_tracks_at_a_place_is_kept():
    track = np.array([0, 0, 1, 1, 1, 2, 2, 3])
    images = np.array([1, 0, 0, 1, 2, 0, 1, 2])
    points = np.array([[9, 9], [5, 4], [5, 4.5], [9, 9], [7, 7], [50, 50], [60, 60], [1, 1.0]])
    found = assembled(track, images, points, np.ones(8), [2.0] * 3)
    assert found.starts.tolist() == [0, 3, 5] and found.images.tolist() == [0, 1, 2, 0, 1]
    assert found.anchors.tolist() == [0, 3]
    assert found.keypoints(0).tolist() == [[5, 4.5], [50, 50]]
    apart = assembled(track, images, points, np.ones(8), [0.1] * 3)
    assert len(apart) == 3 and apart.anchors.tolist() == [1, 2, 5]
