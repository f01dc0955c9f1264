# SPDX-License-Identifier: Apache-2.0
"""Databases of COLMAP and the h5 files of hloc.

In COLMAP (0, 0) is the corner of the first pixel, here and in hloc it is the centre.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quadtree_attention import checks
from quadtree_attention.errors import DataError
from quadtree_attention.files import StrPath, replacing
from quadtree_attention.images import Array
from quadtree_attention.sfm.photos import Photo, View
from quadtree_attention.sfm.tracks import Tracks

CORNER = 0.5  # offset of COLMAP's coordinates
LEAST_MATCHES = 15  # minimum matches of a pair, as in COLMAP
COLMAP_ERROR = 4.0  # maximum distance of an inlier from its epipolar line in pixels, as in COLMAP


def colmap() -> Any:
    """Import pycolmap, with a log level of errors only.

    Raises:
        MissingDependencyError: pycolmap is not installed.
    """
    with checks.needs("sfm", "a reconstruction"):
        import pycolmap
    pycolmap.logging.minloglevel = 2
    return pycolmap


def camera_of(view: View, number: int) -> Any:
    """Create a COLMAP camera: a pinhole if calibrated, else with one term of radial distortion."""
    pycolmap = colmap()
    models = pycolmap.CameraModelId
    model = models.SIMPLE_RADIAL if view.matrix is None else models.PINHOLE
    camera = pycolmap.Camera.create_from_model_id(number, model, view.focal, *view.size)
    camera.has_prior_focal_length = view.known
    if view.matrix is not None:
        (fx, _, cx), (_, fy, cy) = view.matrix[:2]
        camera.params = [fx, fy, cx + CORNER, cy + CORNER]
    return camera


def geometry(
    camera0: Any, points0: Array, camera1: Any, points1: Array, matches: Array, error: float
) -> Any:
    """Estimate the two-view geometry of matches (M, 2), with its inliers; seeds are fixed.

    Args:
        camera0: Camera of image 0.
        points0: (K0, 2) pixels of image 0, in the convention of this package.
        camera1: Camera of image 1.
        points1: (K1, 2) pixels of image 1.
        matches: Indices (M, 2) of points.
        error: Maximum distance of an inlier from its epipolar line in pixels.
    """
    pycolmap = colmap()
    options = pycolmap.TwoViewGeometryOptions()
    options.ransac.max_error = error
    options.ransac.random_seed = 0
    options.min_num_inliers = LEAST_MATCHES
    return pycolmap.estimate_two_view_geometry(
        camera0, points0 + CORNER, camera1, points1 + CORNER, matches.astype(np.uint32), options
    )


def write_database(
    path: Path,
    photos: Sequence[Photo],
    views: Sequence[View],
    view_of: Sequence[int],
    tracks: Tracks,
    errors: Sequence[float],
) -> dict[tuple[int, int], int]:
    """Write a new database with all photographs, tracks as matches, and two-view geometries.

    Args:
        path: Path of the database; an existing file is replaced.
        photos: The photographs; their ids in the database start at 1.
        views: Cameras.
        view_of: Index of the camera of each photograph.
        tracks: The tracks.
        errors: Maximum distance of an inlier from its epipolar line, by photograph.

    Returns:
        Number of inliers by pair.
    """
    pycolmap = colmap()
    path.unlink(missing_ok=True)
    cameras = [camera_of(view, i + 1) for i, view in enumerate(views)]
    found = {}
    with pycolmap.Database.open(path) as database, pycolmap.DatabaseTransaction(database):
        for camera in cameras:
            database.write_camera(camera, True)
            rig = pycolmap.Rig(rig_id=camera.camera_id)
            rig.add_ref_sensor(camera.sensor_id)
            database.write_rig(rig, True)
        points = []
        for i, photo in enumerate(photos):
            camera = cameras[view_of[i]]
            image = pycolmap.Image(name=photo.name, camera_id=camera.camera_id, image_id=i + 1)
            database.write_image(image, True)
            frame = pycolmap.Frame(frame_id=i + 1, rig_id=camera.camera_id)
            frame.add_data_id(pycolmap.data_t(camera.sensor_id, i + 1))
            database.write_frame(frame, True)
            points.append(tracks.keypoints(i))
            database.write_keypoints(i + 1, (points[i] + CORNER).astype(np.float32))
        for i, j, matches in tracks.pairs():
            if len(matches) < LEAST_MATCHES:
                continue
            database.write_matches(i + 1, j + 1, matches.astype(np.uint32))
            error = (errors[i] + errors[j]) / 2
            of_pair = cameras[view_of[i]], points[i], cameras[view_of[j]], points[j]
            model = geometry(*of_pair, matches, error)
            database.write_two_view_geometry(i + 1, j + 1, model)
            found[i, j] = len(model.inlier_matches)
    return found


def add_to_database(path: Path, names: Sequence[str], tracks: Tracks) -> int:
    """Add keypoints, matches and two-view geometries to a database; return the number of pairs.

    Existing keypoints keep their indices, and new ones are appended; points and matches are not
    added twice.

    Args:
        path: The database.
        names: Names of the images in the database.
        tracks: Tracks of these images.

    Raises:
        DataError: The file is not a database, or lacks an image.
    """
    pycolmap = colmap()
    try:
        header = path.open("rb").read(15)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check the path") from error
    if header != b"SQLite format 3":
        raise DataError(f"{path} is no database of COLMAP; pass one that COLMAP made")
    with pycolmap.Database.open(path) as database, pycolmap.DatabaseTransaction(database):
        images = {image.name: image for image in database.read_all_images()}
        if missing := [name for name in names if name not in images]:
            raise DataError(
                f"{path} has no image {checks.few(missing)}; add the images to it first, as with "
                "colmap feature_extractor"
            )
        cameras = {camera.camera_id: camera for camera in database.read_all_cameras()}
        points, places = [], []
        for i, name in enumerate(names):
            image_id = images[name].image_id
            merged, place = _merged(database, image_id, tracks.keypoints(i) + CORNER)
            points.append(merged[:, :2] - CORNER)
            places.append(place)
            if database.exists_keypoints(image_id):
                database.update_keypoints(image_id, merged)
            else:
                database.write_keypoints(image_id, merged)
        count = 0
        for i, j, matches in tracks.pairs():
            if len(matches) < LEAST_MATCHES:
                continue
            first, second = (images[names[k]] for k in (i, j))
            ids = first.image_id, second.image_id
            new = np.stack([places[i][matches[:, 0]], places[j][matches[:, 1]]], axis=1)
            if database.exists_matches(*ids):
                new = np.unique(np.concatenate([database.read_matches(*ids), new]), axis=0)
                database.delete_matches(*ids)
            database.write_matches(*ids, new.astype(np.uint32))
            if database.exists_two_view_geometry(*ids):
                database.delete_two_view_geometry(*ids)
            cams = cameras[first.camera_id], cameras[second.camera_id]
            model = geometry(cams[0], points[i], cams[1], points[j], new, COLMAP_ERROR)
            database.write_two_view_geometry(*ids, model)
            count += 1
    return count


def _merged(database: Any, image_id: int, points: Array) -> tuple[Array, Array]:
    """Return all keypoints of an image, new ones last, and the index of each new one."""
    points = points.astype(np.float32)
    there = np.zeros((0, 2), np.float32)
    if database.exists_keypoints(image_id):
        there = np.asarray(database.read_keypoints(image_id), np.float32)
    known = {tuple(point): i for i, point in enumerate(there[:, :2].tolist())}
    new = [point for point in map(tuple, points.tolist()) if point not in known]
    known.update({point: len(there) + i for i, point in enumerate(dict.fromkeys(new))})
    place = np.array([known[point] for point in map(tuple, points.tolist())], int)
    merged = np.zeros((max([len(there), *(place + 1)]), there.shape[1]), np.float32)
    merged[: len(there)] = there
    merged[place, :2] = points
    if there.shape[1] == 4:
        merged[len(there) :, 2] = 1  # scale
    elif there.shape[1] == 6:
        merged[len(there) :, [2, 5]] = 1  # affine shape
    return merged, place


def write_hloc(folder: StrPath, names: Sequence[str], tracks: Tracks) -> list[Path]:
    """Write `features.h5` and `matches.h5` in the format of hloc; return their paths."""
    with checks.needs("sfm", "hloc's files"):
        import h5py
    features, matches = Path(folder) / "features.h5", Path(folder) / "matches.h5"
    counts = []
    with replacing(features) as stream, h5py.File(stream, "w") as file:
        for i, name in enumerate(names):
            points = tracks.keypoints(i)
            counts.append(len(points))
            group = file.create_group(name)
            group.create_dataset("keypoints", data=points.astype(np.float32))
            group["keypoints"].attrs["uncertainty"] = 1.0
    with replacing(matches) as stream, h5py.File(stream, "w") as file:
        for i, j, rows in tracks.pairs():
            group = file.create_group("/".join(names[k].replace("/", "-") for k in (i, j)))
            matches0 = np.full(counts[i], -1, np.int32)
            matches0[rows[:, 0]] = rows[:, 1]
            group.create_dataset("matches0", data=matches0)
            scores = (matches0 >= 0).astype(np.float16)
            group.create_dataset("matching_scores0", data=scores)
    return [features, matches]
