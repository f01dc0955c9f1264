# SPDX-License-Identifier: Apache-2.0
"""From matches to a model: verified pairs, tracks, COLMAP's mapper, and the files of a model."""

import json
from collections.abc import Iterable, Iterator, Sequence
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
SPACING = 6.0  # pixels, as the network sees them, within which tracks are one
COLMAP_SCALE = (
    1.6  # pixels of a photograph to one of the network that COLMAP's limits are right for
)
LEAST_IMAGES = 2  # of a model
REPROJECTION = 1.25  # largest error of an observation, in pixels as the network sees them
WORTH = 0.01  # share by which refined cameras must lower the error
ROUNDS = 2  # of adjustment and filter
LEAST_ANGLE = 1.5  # degrees between the rays of a point, as COLMAP has it
FORWARD_ANGLE = 4.0  # least median angle of a first pair that may move forward; COLMAP's is 16


def verified(
    pairs: Iterable[tuple[Pair, Matches]], scales: Sequence[float]
) -> Iterator[PairPoints]:
    """Matches of pairs that agree on a fundamental matrix; pairs with too few are left out.

    Args:
        pairs: Matches as `PairMatcher` gives them; both halves are the same matches.
        scales: Of each photograph, its pixels to one pixel that the network sees.
    """
    for (i, j), matches in pairs:
        inliers = agreeing(matches, (scales[i] + scales[j]) / 2)
        if inliers is not None:
            values = matches.keypoints0, matches.keypoints1, anchored(matches), matches.confidence
            yield PairPoints(i, j, *(x[inliers] for x in values))


@dataclass(frozen=True)
class Attempt:
    """Options of COLMAP's incremental mapper.

    Args:
        refines: Refine cameras while photographs are added; False: keep them until the end.
        two_views: Use points that only two photographs see.
        forward: The first pair may move forward and have a median angle of `FORWARD_ANGLE`. With
            COLMAP's limits there is no first pair if all cameras move along their view.
    """

    refines: bool
    two_views: bool = False
    forward: bool = False


# In this order, until all photographs that are linked are registered. A focal length that is known
# is kept first: where photographs show a plane or move forward, it is hardly determined.
KNOWN = (Attempt(False), Attempt(False, True), Attempt(False, True, True), Attempt(True))
GUESSED = (Attempt(True), Attempt(True, True), Attempt(True, True, True), Attempt(False))
CALIBRATED = (Attempt(False), Attempt(False, True), Attempt(False, True, True))


def map_images(
    database: Path,
    folder: Path,
    *,
    attempts: Sequence[Attempt] = GUESSED[:1],
    mapper: str = "incremental",
    scale: float | None = None,
    linked: int = 0,
    progress: bool | None = None,
) -> list[Any]:
    """Models by COLMAP's mapper, the largest first.

    Args:
        database: The database.
        folder: New folder, which it writes to.
        attempts: How the incremental mapper is run, until one is successful; the best is kept.
        mapper: "incremental" or "global".
        scale: Pixels of a photograph to one that matches were measured in, which sets the limits of
            errors; None: COLMAP's own limits.
        linked: Photographs that an attempt has to register to be successful.
        progress: Show a progress bar; None: in a terminal.
    """
    best: list[Any] = []
    if mapper == "global":
        return _globally(database, folder, refines=attempts[0].refines)
    for number, attempt in enumerate(attempts):
        models = _incrementally(
            database, folder / str(number), attempt, scale, total=linked, progress=progress
        )
        if not best or (models and _size(models[0]) > _size(best[0])):
            best = models
        if best and best[0].num_reg_images() >= linked:
            break
    return best


def _size(model: Any) -> tuple[int, int]:
    return model.num_reg_images(), model.num_points3D()


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
        options.mapper.filter_max_reproj_error = REPROJECTION * scale
        options.triangulation.merge_max_reproj_error = REPROJECTION * scale
        options.triangulation.complete_max_reproj_error = REPROJECTION * scale
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


def refined(model: Any, scale: float) -> Any:
    """The model with refined cameras, if that lowers its error by more than `WORTH`; else itself.

    Args:
        model: A model.
        scale: As for `map_images`.
    """
    pycolmap = colmap()
    options = pycolmap.BundleAdjustmentOptions()
    options.print_summary = False
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
    before, after = (m.compute_mean_reprojection_error() for m in (model, changed))
    better = after < (1 - WORTH) * before and changed.num_points3D() > 0.9 * model.num_points3D()
    return changed if better else model


def colour(model: Any, photos: Sequence[Photo]) -> None:
    """Colours of all points: means over the photographs that see them, read one at a time."""
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
        lengths: (N,), images that see each.
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
    """`transforms.json`: cameras as NeRF and Gaussian splatting have them.

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
