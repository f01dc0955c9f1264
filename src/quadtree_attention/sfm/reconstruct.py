# SPDX-License-Identifier: Apache-2.0
"""Reconstruction from matches: verified pairs, tracks, COLMAP's mapper, and files of a model."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quadtree_attention.errors import OptionError
from quadtree_attention.images import Array, to_image
from quadtree_attention.sfm.database import LEAST_MATCHES, colmap
from quadtree_attention.sfm.matching import anchored
from quadtree_attention.sfm.pairs import Pair
from quadtree_attention.sfm.photos import Photo
from quadtree_attention.sfm.tracks import PairPoints
from quadtree_attention.sfm.verify import agreeing
from quadtree_attention.tasks.match.result import Matches

MAPPERS = ("incremental", "global")
SPACING = 6.0  # distance in input pixels below which tracks are merged
COLMAP_SCALE = 1.6  # pixels of a photograph per input pixel that COLMAP's limits are meant for
LEAST_IMAGES = 2  # minimum images of a model
REPROJECTION = 1.25  # maximum error of an observation, in input pixels
SURE = 0.4  # minimum share of matches that agree,
FEW = 2  # except in this number of pairs of each photograph
KEPT = 0.4  # minimum share of the tracks of three or more photographs that a good model keeps
WORTH = 0.01  # minimum relative reduction of the error by refined cameras
ROUNDS = 2  # of adjustment and filter
LEAST_ANGLE = 1.5  # degrees between the rays of a point, as in COLMAP
FORWARD_ANGLE = 4.0  # minimum median angle of a first pair with forward motion; COLMAP: 16


def verified(pairs: Iterable[tuple[Pair, Matches]], scales: Sequence[float]) -> list[PairPoints]:
    """Return the matches of pairs that agree on a fundamental matrix.

    Pairs of which less than `SURE` of the matches agree are left out, too, unless they are among
    the `FEW` best pairs of a photograph: between distant photographs of a street a third agrees by
    chance, and the wrong tracks prevent a model.

    Args:
        pairs: Matches as `PairMatcher` gives them; both halves are the same matches.
        scales: Of each photograph, its pixels to one pixel that the network sees.
    """
    found: list[PairPoints] = []
    sure, pairs_of = set[int](), [list[int]() for _ in scales]
    for (i, j), matches in pairs:
        inliers = agreeing(matches, (scales[i] + scales[j]) / 2)
        if inliers is None:
            continue
        for image in (i, j):
            pairs_of[image].append(len(found))
        if inliers.mean() >= SURE:
            sure.add(len(found))
        values = matches.keypoints0, matches.keypoints1, anchored(matches), matches.confidence
        found.append(PairPoints(i, j, *(x[inliers] for x in values)))
    for numbers in pairs_of:
        sure.update(sorted(numbers, key=lambda n: -len(found[n].points0))[:FEW])
    return [found[n] for n in sorted(sure)]


@dataclass(frozen=True)
class Attempt:
    """Options of COLMAP's incremental mapper.

    Args:
        refines: Refine cameras while photographs are added; False: keep them until the end.
        two_views: Use points with only two observations.
        forward: The first pair may move forward and have a median angle of `FORWARD_ANGLE`. With
            COLMAP's limits there is no first pair if all cameras move along their view.
    """

    refines: bool
    two_views: bool = False
    forward: bool = False


# In this order, until all linked photographs are registered and the share `KEPT` of the tracks is
# kept. A known focal length is fixed at first, since it is poorly determined by planes or forward
# motion.
CALIBRATED = (
    Attempt(False), Attempt(False, False, True), Attempt(False, True), Attempt(False, True, True),
)  # fmt: skip
GUESSED = (
    Attempt(True), Attempt(True, False, True), Attempt(True, True), Attempt(True, True, True),
    Attempt(False),
)  # fmt: skip
KNOWN = (*CALIBRATED, *GUESSED[:2])


def map_images(
    database: Path,
    folder: Path,
    *,
    attempts: Sequence[Attempt] = GUESSED[:1],
    mapper: str = "incremental",
    scale: float | None = None,
    linked: int = 0,
    long_tracks: int = 0,
    progress: bool | None = None,
) -> tuple[list[Any], Attempt]:
    """Run COLMAP's mapper; return the models, the largest first, and the attempt they are from.

    Args:
        database: The database.
        folder: New folder for its output.
        attempts: Options of the incremental mapper, tried until one succeeds; the best is kept.
        mapper: "incremental" or "global".
        scale: Pixels of a photograph per pixel of the network's input, which scales the limits of
            errors; None: COLMAP's own limits.
        linked: Number of photographs that a successful attempt registers.
        long_tracks: Number of tracks of three or more photographs, of which it keeps `KEPT`.
        progress: Show a progress bar; None: in a terminal.
    """
    best: list[Any] = []
    chosen = attempts[0]
    if mapper == "global":
        return _globally(database, folder, refines=chosen.refines), chosen
    for number, attempt in enumerate(attempts):
        models = _incrementally(
            database, folder / str(number), attempt, scale, total=linked, progress=progress
        )
        if not best or (models and _size(models[0]) > _size(best[0])):
            best, chosen = models, attempt
        if best:
            registered, kept, _ = _size(best[0])
            if registered >= linked and kept >= KEPT * long_tracks:
                break
    return best, chosen


def _size(model: Any) -> tuple[int, int, int]:
    """Photographs, points seen by three or more of them, and all points."""
    kept = sum(point.track.length() > 2 for point in model.points3D.values())
    return model.num_reg_images(), kept, model.num_points3D()


def _incrementally(
    database: Path,
    folder: Path,
    attempt: Attempt,
    scale: float | None,
    *,
    total: int,
    progress: bool | None,
) -> list[Any]:
    from tqdm import tqdm

    pycolmap = colmap()
    folder.mkdir(parents=True, exist_ok=True)
    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = 0
    options.extract_colors = False  # COLMAP would read the stored pixels, not the upright ones
    options.min_model_size = LEAST_IMAGES
    options.triangulation.ignore_two_view_tracks = not attempt.two_views
    if attempt.two_views:
        options.mapper.abs_pose_min_num_inliers = LEAST_MATCHES
    if attempt.forward:
        options.mapper.init_max_forward_motion = 1.0
        options.mapper.init_min_tri_angle = FORWARD_ANGLE
    if scale is not None:
        coarser = scale / COLMAP_SCALE
        options.mapper.init_max_error *= max(1.0, coarser)
        options.mapper.abs_pose_max_error *= max(1.0, coarser)
        _limit_errors(options, scale)
    if not attempt.refines:
        options.ba_refine_focal_length = options.ba_refine_extra_params = False
        options.mapper.abs_pose_refine_focal_length = False
        options.mapper.abs_pose_refine_extra_params = False
    hidden = None if progress is None else not progress
    with tqdm(total=total, unit="image", leave=False, disable=hidden) as bar:
        models = pycolmap.incremental_mapping(
            database, folder, folder, options, "", lambda: bar.update(2), bar.update
        )
    return sorted(models.values(), key=_size, reverse=True)


def _globally(database: Path, folder: Path, *, refines: bool) -> list[Any]:
    pycolmap = colmap()
    if not hasattr(pycolmap, "global_mapping"):
        raise OptionError(f"pycolmap {pycolmap.__version__} has no global mapper; pass incremental")
    folder.mkdir(parents=True, exist_ok=True)
    options = pycolmap.GlobalPipelineOptions()
    options.random_seed = 0
    adjustment = options.mapper.bundle_adjustment
    adjustment.refine_focal_length = adjustment.refine_extra_params = refines
    models = pycolmap.global_mapping(database, folder, folder, options)
    return sorted(models.values(), key=_size, reverse=True)


def _limit_errors(options: Any, scale: float) -> None:
    options.mapper.filter_max_reproj_error = REPROJECTION * scale
    options.triangulation.merge_max_reproj_error = REPROJECTION * scale
    options.triangulation.complete_max_reproj_error = REPROJECTION * scale


def triangulated(model: Any, database: Path, folder: Path, attempt: Attempt, scale: float) -> Any:
    """Triangulate the tracks of a database with the cameras of a model, then adjust both.

    Args:
        model: A model, whose points are replaced.
        database: The database.
        folder: New folder for COLMAP's output.
        attempt: Options of the mapper that made the model.
        scale: As for `map_images`.
    """
    pycolmap = colmap()
    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = 0
    options.extract_colors = False
    options.triangulation.ignore_two_view_tracks = not attempt.two_views
    _limit_errors(options, scale)
    folder.mkdir(parents=True)
    found = pycolmap.triangulate_points(model, database, folder, folder, True, options)
    return adjusted(found, scale, cameras=attempt.refines)


def adjusted(model: Any, scale: float, *, cameras: bool) -> Any:
    """Return a model after bundle adjustment, without observations of large errors.

    Args:
        model: A model.
        scale: As for `map_images`.
        cameras: Refine focal lengths and distortion, too.
    """
    pycolmap = colmap()
    options = pycolmap.BundleAdjustmentOptions()
    options.print_summary = False
    options.refine_focal_length = options.refine_extra_params = cameras
    changed = pycolmap.Reconstruction(model)
    for _ in range(ROUNDS):
        config = pycolmap.BundleAdjustmentConfig()
        for number in changed.reg_image_ids():
            config.add_image(number)
        config.fix_gauge(pycolmap.BundleAdjustmentGauge.TWO_CAMS_FROM_WORLD)
        pycolmap.create_default_bundle_adjuster(options, config, changed).solve()
        manager = pycolmap.ObservationManager(changed)
        manager.filter_all_points3D(REPROJECTION * scale, LEAST_ANGLE)
    changed.update_point_3d_errors()
    return changed


def refined(model: Any, scale: float) -> Any:
    """Refine the cameras of a model, if that reduces its error by more than `WORTH`.

    Args:
        model: A model.
        scale: As for `map_images`.
    """
    changed = adjusted(model, scale, cameras=True)
    before, after = (m.compute_mean_reprojection_error() for m in (model, changed))
    better = after < (1 - WORTH) * before and changed.num_points3D() > 0.9 * model.num_points3D()
    return changed if better else model


def colour(model: Any, photos: Sequence[Photo]) -> None:
    """Set the colours of all points to means over their photographs, read one at a time."""
    ids = {point_id: row for row, point_id in enumerate(model.points3D)}
    sums, counts = np.zeros((len(ids), 3)), np.zeros(len(ids))
    for number in sorted(model.reg_image_ids()):
        image = model.images[number]
        seen = [p for p in image.points2D if p.has_point3D()]
        if not seen:
            continue
        pixels = np.asarray(to_image(photos[number - 1].path))
        at = np.floor([p.xy for p in seen]).astype(int)
        at = at.clip(0, np.array(pixels.shape[1::-1]) - 1)
        rows = np.array([ids[p.point3D_id] for p in seen])
        np.add.at(sums, rows, pixels[at[:, 1], at[:, 0]])
        np.add.at(counts, rows, 1)
    means = (sums / counts.clip(min=1)[:, None]).round().astype(np.uint8)
    for point_id, row in ids.items():
        model.points3D[point_id].color = means[row]


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points of a model.

    Args:
        points: (N, 3).
        colours: (N, 3), 0 to 255.
        lengths: (N,), track lengths.
        errors: (N,), mean reprojection errors in pixels.
    """

    points: Array
    colours: Array
    lengths: Array
    errors: Array

    @classmethod
    def of(cls, model: Any) -> "Cloud":
        found = list(model.points3D.values())
        return cls(
            np.array([p.xyz for p in found]).reshape(-1, 3),
            np.array([p.color for p in found], np.uint8).reshape(-1, 3),
            np.array([p.track.length() for p in found], int),
            np.array([p.error for p in found], float),
        )


def transforms(model: Any, photos: Sequence[Photo]) -> bytes:
    """Return `transforms.json`: cameras in the format of NeRF and Gaussian splatting.

    Matrices map the camera to the world; the camera looks along -z, y is up.
    """
    frames = []
    for number in sorted(model.reg_image_ids()):
        image = model.images[number]
        world = np.linalg.inv(np.vstack([image.cam_from_world().matrix(), [0, 0, 0, 1]]))
        world[:, 1:3] *= -1
        frames.append(
            {
                "file_path": photos[number - 1].path,
                **_intrinsics(model.cameras[image.camera_id]),
                "transform_matrix": world.round(9).tolist(),
            }
        )
    shared = {key: value for key, value in frames[0].items() if key in _CAMERA} if frames else {}
    if all(frame[key] == value for frame in frames for key, value in shared.items()):
        frames = [{k: v for k, v in frame.items() if k not in _CAMERA} for frame in frames]
    else:
        shared = {}
    whole = shared | {"ply_file_path": "points.ply", "frames": frames}
    return (json.dumps(whole, indent=1) + "\n").encode()


_CAMERA = ("camera_model", "w", "h", "fl_x", "fl_y", "cx", "cy", "k1", "k2", "p1", "p2")


def _intrinsics(camera: Any) -> dict[str, Any]:
    k1 = float(camera.params[3]) if camera.model.name == "SIMPLE_RADIAL" else 0.0
    return {
        "camera_model": "OPENCV",
        "w": camera.width,
        "h": camera.height,
        "fl_x": camera.focal_length_x,
        "fl_y": camera.focal_length_y,
        "cx": camera.principal_point_x,
        "cy": camera.principal_point_y,
        "k1": k1,
        "k2": 0.0,
        "p1": 0.0,
        "p2": 0.0,
    }
