# SPDX-License-Identifier: Apache-2.0
"""Observations that are found with the cameras of a model."""

import numpy as np
import pytest

from quadtree_attention.sfm import extend
from quadtree_attention.sfm.database import LEAST_MATCHES
from quadtree_attention.sfm.extend import CLOSE, extend_tracks
from quadtree_attention.sfm.tracks import Tracks, assembled
from tests.support.scene import ground, write_photographs

pycolmap = pytest.importorskip("pycolmap", reason="the mapper is that of the extra 'sfm'")

FOCAL, SIZE = 260.0, (256, 192)
SIDE, SOME = 17, 40  # of a grid of points, and points that three photographs show


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Files of four photographs, and the points of a hilly ground as they show them."""
    folder = tmp_path_factory.mktemp("photos")
    poses = list(write_photographs(folder, 4, size=SIZE, focal=FOCAL).values())
    ticks = np.linspace(-0.9, 0.9, SIDE)  # at least 5 pixels apart
    x, y = np.stack(np.meshgrid(ticks, ticks)).reshape(2, -1)
    world = np.stack([x, y, ground(x, y)], axis=1)
    middle = (np.array(SIZE) - 1) / 2
    local = [world @ pose[:, :3].T + pose[:, 3] for pose in poses]
    pixels = np.stack([p[:, :2] / p[:, 2:] * FOCAL + middle for p in local])
    inside = ((pixels > 12) & (pixels < np.array(SIZE) - 13)).all(axis=(0, 2))
    assert inside.sum() > 100
    return [str(path) for path in sorted(folder.iterdir())], poses, world[inside], pixels[:, inside]


def tracks_of(pixels, counts):
    """Tracks of the first points in some images, with anchors in the first one."""
    track = np.concatenate([np.arange(count) for count in counts.values()])
    of = np.repeat(list(counts), list(counts.values()))
    points = np.concatenate([pixels[i][:count] for i, count in counts.items()])
    return assembled(track, of, points, np.ones(len(track)), [0.01] * 4)


def model_of(poses, world, tracks, registered, wrong=()):
    """A model of true poses and points, without the observations in the rows `wrong`."""
    model = pycolmap.Reconstruction()
    camera = pycolmap.Camera.create_from_model_id(
        1, pycolmap.CameraModelId.SIMPLE_RADIAL, FOCAL, *SIZE
    )
    model.add_camera_with_trivial_rig(camera)
    for i in registered:
        image = pycolmap.Image(name=f"{i}", camera_id=1, image_id=i + 1)
        image.points2D = [pycolmap.Point2D(p + 0.5) for p in tracks.keypoints(i)]
        model.add_image_with_trivial_frame(image, pycolmap.Rigid3d(poses[i]))
    for begin, end, place in zip(tracks.starts[:-1], tracks.starts[1:], world, strict=True):
        elements = [
            pycolmap.TrackElement(int(tracks.images[row]) + 1, int(tracks.indices[row]))
            for row in range(begin, end)
            if row not in wrong and tracks.images[row] in registered
        ]
        model.add_point3D(place, pycolmap.Track(elements), np.zeros(3, np.uint8))
    return model


def found(tracks: Tracks, image):
    """Points of an image, by the point of image 0 in the same track."""
    track = np.repeat(np.arange(len(tracks)), np.diff(tracks.starts))
    of = {i: dict(zip(track[tracks.images == i], tracks.points[tracks.images == i], strict=True))
          for i in (0, image)}  # fmt: skip
    return {tuple(of[0][t]): p for t, p in of[image].items() if t in of[0]}


def test_observations_are_found_where_they_are(scene):
    paths, poses, world, pixels = scene
    count = len(world)
    tracks = tracks_of(pixels, {0: count, 1: count, 2: SOME})
    model = model_of(poses, world, tracks, range(3))
    after = extend_tracks([model], tracks, paths, [1.0] * 4)
    true = dict(zip(map(tuple, pixels[0]), pixels[2], strict=True))
    there = found(after, 2)
    apart = [np.linalg.norm(point - true[anchor]) for anchor, point in there.items()]
    assert len(apart) > 0.8 * count
    assert np.median(apart) < 0.1 and np.max(apart) <= CLOSE


def test_photographs_with_few_common_points_are_not_tried(scene):
    paths, poses, world, pixels = scene
    tracks = tracks_of(pixels, {0: len(world), 1: len(world), 2: LEAST_MATCHES - 1})
    model = model_of(poses, world, tracks, range(3))
    after = extend_tracks([model], tracks, paths, [1.0] * 4)
    np.testing.assert_array_equal(after.points, tracks.points)


@pytest.mark.parametrize(("most", "same"), [(1, True), (2, False)])
def test_the_photographs_with_most_common_points_are_tried(scene, monkeypatch, most, same):
    monkeypatch.setattr(extend, "MOST_TARGETS", most)
    paths, poses, world, pixels = scene
    tracks = tracks_of(pixels, {0: len(world), 1: len(world), 2: SOME})
    model = model_of(poses, world, tracks, range(3))
    after = extend_tracks([model], tracks, paths, [1.0] * 4)
    assert np.array_equal(after.points, tracks.points) == same


def test_a_rejected_observation_is_found_again_and_other_tracks_are_kept(scene):
    paths, poses, world, pixels = scene
    count = len(world)
    seen = pixels.copy()
    seen[2, SOME:] += 9.0
    tracks = tracks_of(seen, dict.fromkeys(range(3), count))
    wrong = np.flatnonzero(tracks.images == 2)[SOME:]
    model = model_of(poses, world, tracks, range(3), set(wrong.tolist()))
    model.delete_point3D(max(model.points3D))
    after = extend_tracks([model], tracks, paths, [1.0] * 4)
    there = found(after, 2)
    track = np.repeat(np.arange(len(after)), np.diff(after.starts))
    assert len(set(zip(track, after.images, strict=True))) == len(track)  # one in a photograph
    true = {tuple(a): p for a, p in zip(pixels[0], pixels[2], strict=True)}
    apart = np.array([np.linalg.norm(point - true[anchor]) for anchor, point in there.items()])
    assert (apart < CLOSE).sum() > 0.8 * count
    assert (apart > 9).sum() == 1  # of the track without a point


def test_observations_in_photographs_outside_the_model_are_kept(scene):
    paths, poses, world, pixels = scene
    tracks = tracks_of(pixels, dict.fromkeys((0, 1, 3), len(world)))
    model = model_of(poses, world, tracks, range(3))
    after = extend_tracks([model], tracks, paths, [1.0] * 4)
    there = found(after, 3)
    true = dict(zip(map(tuple, pixels[0]), pixels[3], strict=True))
    assert len(there) == len(world)
    assert all((there[anchor] == true[anchor]).all() for anchor in there)


def test_an_observation_in_two_models_is_used_once(scene):
    paths, poses, world, pixels = scene
    tracks = tracks_of(pixels, {0: len(world), 1: len(world), 2: SOME})
    model = model_of(poses, world, tracks, range(3))
    once, twice = (extend_tracks([model] * n, tracks, paths, [1.0] * 4) for n in (1, 2))
    for name in ("starts", "images", "points"):
        np.testing.assert_array_equal(getattr(once, name), getattr(twice, name))


def test_a_model_without_points_changes_nothing(scene):
    paths, poses, world, pixels = scene
    tracks = tracks_of(pixels, {0: len(world), 1: len(world)})
    model = model_of(poses, world, tracks, range(2))
    for number in list(model.points3D):
        model.delete_point3D(number)
    after = extend_tracks([model], tracks, paths, [1.0] * 4)
    np.testing.assert_array_equal(after.points, tracks.points)
