# SPDX-License-Identifier: Apache-2.0
"""Reconstruction of a model and its files from a folder of photographs."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.files import Lock, StrPath, make_folder, write_all
from quadtree_attention.images import Array
from quadtree_attention.sfm import pairs as choose
from quadtree_attention.sfm.database import COLMAP_ERROR, LEAST_MATCHES, colmap, write_database
from quadtree_attention.sfm.extend import extend_tracks
from quadtree_attention.sfm.matching import PairMatcher, match_pairs, seen_size
from quadtree_attention.sfm.pairs import Pair
from quadtree_attention.sfm.photos import Photo, Photos, cameras, read_photos
from quadtree_attention.sfm.reconstruct import (
    CALIBRATED,
    COLMAP_SCALE,
    GUESSED,
    KNOWN,
    MAPPERS,
    SPACING,
    Attempt,
    Cloud,
    colour,
    map_images,
    refined,
    transforms,
    triangulated,
    verified,
)
from quadtree_attention.sfm.refine import refine_tracks
from quadtree_attention.sfm.tracks import build
from quadtree_attention.tasks.cluster import Cluster
from quadtree_attention.tasks.contract import Items, table
from quadtree_attention.tasks.match import TASK
from quadtree_attention.tasks.match.result import Matches
from quadtree_attention.tasks.store import Store
from quadtree_attention.viz.ply import encode_ply

OURS = frozenset(
    {
        "matches",
        "database.db",
        "sparse",
        "points.ply",
        "transforms.json",
        "report.html",
        "report.json",
        Lock.NAME,
        ".unfinished",
    }
)


@dataclass(frozen=True, eq=False)
class Report:
    """The result of a reconstruction.

    Attributes:
        out: The folder of the results.
        registered: Names of the photographs in the model.
        left_out: Reasons why others are not in the model, by name.
        models: Number of photographs of each model, the largest first.
        pairs: Number of matched pairs.
        verified: Number of pairs with a verified geometry.
        points: Number of points of the model.
        track_length: Mean number of photographs per point.
        error: Mean reprojection error in pixels.
        focal: Focal lengths of the cameras in pixels.
        seconds: Time by stage.
        lengths: Number of points by track length.
        views: Number of points and mean reprojection error, by name.
    """

    out: Path
    registered: Sequence[str]
    left_out: Mapping[str, str]
    models: Sequence[int]
    pairs: int
    verified: int
    points: int = 0
    track_length: float = 0.0
    error: float = 0.0
    focal: Sequence[float] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    lengths: Mapping[int, int] = field(default_factory=dict)
    views: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        found = {key: value for key, value in vars(self).items() if key != "out"}
        return found | {"out": str(self.out)}

    def to_text(self) -> str:
        count = len(self.registered) + len(self.left_out)
        rows = {"registered": f"{len(self.registered)} of {count} photographs"}
        if len(self.models) > 1:
            rows["registered"] += f"; further models of {', '.join(map(str, self.models[1:]))}"
        rows["pairs"] = f"{self.verified:,} of {self.pairs:,} agree on a geometry"
        if self.points:
            rows["points"] = f"{self.points:,}, seen by {self.track_length:.2f} photographs each"
            rows["error"] = f"{self.error:.2f} pixels (mean reprojection error)"
            rows["focal length"] = ", ".join(f"{f:.0f}" for f in self.focal[:3]) + " pixels"
        rows |= {f"left out: {name}": why for name, why in self.left_out.items()}
        rows["written"] = str(self.out)
        return table(rows)


@dataclass(frozen=True)
class Chosen:
    """Options of pairs, cameras and the mapper; see `quadtree sfm --help`."""

    pairs: StrPath | None = None
    sequential: int | None = None
    nearest: int | None = None
    mapper: str = "incremental"
    sharing: str = "auto"
    focal: float | None = None
    camera: Array | None = None

    def __post_init__(self) -> None:
        checks.one_of(MAPPERS, mapper=self.mapper)
        checks.at_least(1, sequential=self.sequential, nearest=self.nearest)
        given = [n for n in ("pairs", "sequential", "nearest") if getattr(self, n) is not None]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} exclude each other; pass one of them")
        if self.focal is not None and self.camera is not None:
            raise OptionError("focal and camera exclude each other; pass one of them")


def build_model(
    photos: StrPath,
    out: StrPath,
    *,
    matcher: PairMatcher | None = None,
    chosen: Chosen | None = None,
    batch: int | None = None,
    force: bool = False,
    progress: bool | None = None,
    cluster: Cluster | None = None,
) -> Report:
    """Reconstruct cameras and points from the photographs in a folder.

    Matches are stored in `out/matches`, so that an interrupted run can be resumed. All other files
    are written at the end, together.

    Args:
        photos: Folder of photographs.
        out: Folder of the results.
        matcher: The matcher; None: the packaged weights.
        chosen: Options of pairs, cameras and the mapper.
        batch: Batch size of the network.
        force: Match again, and replace matches of other settings.
        progress: Show progress bars; None: in a terminal.
        cluster: Cluster that matches the pairs; None: this process.

    Raises:
        DataError: There are fewer than two photographs.
        OptionError: An option is not accepted, or `out` contains other files.
        MissingDependencyError: pycolmap is not installed.
    """
    colmap()  # before the slow part
    chosen = chosen or Chosen()
    found, out = read_photos(photos), Path(out)
    _check_ours(out)
    matcher = matcher or PairMatcher.from_pretrained()
    make_folder(out)
    with Lock(out, "a reconstruction"):
        clock = _Clock()
        shutil.rmtree(out / ".unfinished", ignore_errors=True)
        listed = _pairs(found, photos, matcher, chosen)
        clock.stop("pairs")
        source = Items(
            [f"{found.used[i].name}__{found.used[j].name}" for i, j in listed],
            [(Path(found.used[i].path), Path(found.used[j].path)) for i, j in listed],
        )
        settings = matcher.settings() if cluster is None else cluster.settings(matcher)
        store = Store.create(out / "matches", TASK, settings, source, force=force)
        match_pairs(matcher, source, store, batch=batch, progress=progress, cluster=cluster)
        matcher.cache.clear()  # up to 1 GiB that the mapper can use
        clock.stop("matching")
        return _model(out, found, listed, store, matcher, chosen, clock, progress)


def _model(
    out: Path,
    photos: Photos,
    listed: Sequence[Pair],
    store: Store,
    matcher: PairMatcher,
    chosen: Chosen,
    clock: "_Clock",
    progress: bool | None,
) -> Report:
    used = photos.used
    views, view_of = cameras(used, sharing=chosen.sharing, focal=chosen.focal, matrix=chosen.camera)
    size: int = matcher.preprocess.size  # type: ignore[attr-defined]
    scales = [max(photo.size) / max(seen_size(photo.size, size)) for photo in used]
    pairs = verified(_matches(listed, used, store, progress), scales)
    tracks = build(pairs, [SPACING * scale for scale in scales])
    paths = [photo.path for photo in used]
    tracks = refine_tracks(tracks, pairs, paths, scales)
    clock.stop("tracks")
    work = out / ".unfinished"
    work.mkdir()
    errors = [COLMAP_ERROR * max(1.0, scale / COLMAP_SCALE) for scale in scales]
    inliers = write_database(work / "database.db", used, views, view_of, tracks, errors)
    clock.stop("verification")
    scale = float(np.median(scales))
    attempts: Sequence[Attempt] = KNOWN if all(view.known for view in views) else GUESSED
    if chosen.camera is not None:
        attempts = CALIBRATED
    models, attempt = map_images(
        work / "database.db",
        work / "sparse",
        attempts=attempts,
        mapper=chosen.mapper,
        scale=scale,
        linked=_largest_component(len(used), inliers),
        long_tracks=int((np.diff(tracks.starts) > 2).sum()),
        progress=progress,
    )
    clock.stop("mapping")
    if models:
        tracks = extend_tracks(models, tracks, paths, scales)
        write_database(work / "database.db", used, views, view_of, tracks, errors)
    for number, model in enumerate(models):
        folder = work / "triangulated" / str(number)
        models[number] = triangulated(model, work / "database.db", folder, attempt, scale)
    if models and attempts is KNOWN:
        models[0] = refined(models[0], scale)
    clock.stop("extension")
    report = _summary(out, photos, listed, models, inliers, clock)
    _write(out, work, used, models, report)
    return report


def _largest_component(count: int, inliers: Mapping[Pair, int]) -> int:
    """Number of photographs in the largest component linked by pairs with enough inliers."""
    group = list(range(count))

    def root(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i

    for (i, j), found in inliers.items():
        if found >= LEAST_MATCHES:
            group[root(i)] = root(j)
    return max(Counter(root(i) for i in range(count)).values())


def _write(
    out: Path, work: Path, photos: Sequence[Photo], models: Sequence[Any], report: Report
) -> None:
    """Replace the files of an earlier run by the new ones."""
    from quadtree_attention.sfm.report import page

    for name in ("sparse", "triangulated"):
        shutil.rmtree(work / name, ignore_errors=True)
    for number, model in enumerate(models):
        colour(model, photos)
        folder = work / "sparse" / str(number)
        folder.mkdir(parents=True)
        model.write(folder)
    contents = {out / "report.json": (json.dumps(report.to_dict(), indent=1) + "\n").encode()}
    if models:
        cloud = Cloud.of(models[0])
        contents[out / "points.ply"] = encode_ply(cloud.points, cloud.colours)
        contents[out / "transforms.json"] = transforms(models[0], photos)
    else:
        for name in ("points.ply", "transforms.json"):
            (out / name).unlink(missing_ok=True)
    contents[out / "report.html"] = page(report, models[0] if models else None, photos)
    shutil.rmtree(out / "sparse", ignore_errors=True)
    if models:
        (work / "sparse").rename(out / "sparse")
    (work / "database.db").replace(out / "database.db")
    write_all(contents)
    shutil.rmtree(work)


def _matches(
    listed: Sequence[Pair], photos: Sequence[Photo], store: Store, progress: bool | None
) -> Iterator[tuple[Pair, Matches]]:
    from tqdm import tqdm

    hidden = None if progress is None else not progress
    for i, j in tqdm(listed, unit="pair", leave=False, disable=hidden):
        matches = store.get(f"{photos[i].name}__{photos[j].name}")
        if isinstance(matches, Matches):
            yield (i, j), matches


def _pairs(photos: Photos, folder: StrPath, matcher: PairMatcher, chosen: Chosen) -> list[Pair]:
    used = photos.used
    if chosen.pairs is not None:
        return choose.listed(used, chosen.pairs, folder)
    if chosen.sequential is not None:
        return choose.sequential(len(used), chosen.sequential)
    if chosen.nearest is None and len(used) <= choose.EXHAUSTIVE:
        return choose.exhaustive(len(used))
    return choose.nearest(choose.describe(matcher, used), chosen.nearest or choose.NEAREST)


def _check_ours(out: Path) -> None:
    """Raise `OptionError` for a folder with files that are not results."""
    if out.is_dir():
        foreign = sorted(path.name for path in out.iterdir() if path.name not in OURS)
        if foreign:
            raise OptionError(
                f"{out} holds {foreign[0]}, which is no result of quadtree sfm; write to a new "
                "folder"
            )
    elif out.exists():
        raise OptionError(f"{str(out)!r} is a file; write to a folder")


def _summary(
    out: Path,
    photos: Photos,
    listed: Sequence[Pair],
    models: Sequence[Any],
    inliers: Mapping[Pair, int],
    clock: "_Clock",
) -> Report:
    used = photos.used
    good = {pair: count for pair, count in inliers.items() if count >= LEAST_MATCHES}
    members = [{number - 1 for number in model.reg_image_ids()} for model in models]
    inside = members[0] if members else set[int]()
    left_out = dict(photos.left_out)
    for i, photo in enumerate(used):
        if i not in inside:
            left_out[photo.name] = _why(i, inside, members, good)
    turned = [photo.name for photo in used if photo.turned]
    warnings = []
    if turned:
        warnings.append(
            f"{checks.few(turned)}: EXIF says that the pixels are stored turned; all coordinates "
            "are those of the upright photograph, so save it upright before other programs use it"
        )
    facts: dict[str, Any] = {}
    if models:
        model = models[0]
        cloud = Cloud.of(model)
        lengths = Counter(cloud.lengths.tolist())
        facts = {
            "points": model.num_points3D(),
            "track_length": model.compute_mean_track_length(),
            "error": model.compute_mean_reprojection_error(),
            "focal": [camera.mean_focal_length() for _, camera in sorted(model.cameras.items())],
            "lengths": dict(sorted(lengths.items())),
            "views": {used[i].name: _of_view(model, i + 1) for i in sorted(inside)},
        }
    return Report(
        out,
        [used[i].name for i in sorted(inside)],
        left_out,
        [len(m) for m in members],
        len(listed),
        len(good),
        seconds=clock.seconds,
        warnings=warnings,
        **facts,
    )


def _of_view(model: Any, number: int) -> dict[str, float]:
    image = model.images[number]
    seen = [p for p in image.points2D if p.has_point3D()]
    placed = np.array([model.points3D[p.point3D_id].xyz for p in seen]).reshape(-1, 3)
    camera = model.cameras[image.camera_id]
    local = placed @ image.cam_from_world().rotation.matrix().T + image.cam_from_world().translation
    projected = np.asarray(camera.img_from_cam(local))
    apart = np.linalg.norm(projected - np.array([p.xy for p in seen]).reshape(-1, 2), axis=1)
    return {"points": len(seen), "error": float(apart.mean()) if len(seen) else 0.0}


def _why(i: int, inside: set[int], members: Sequence[set[int]], good: Mapping[Pair, int]) -> str:
    """Return the reason why a photograph is not in the first model."""
    mine = {pair: count for pair, count in good.items() if i in pair}
    if not mine:
        return "its matches with no other photograph agree on a geometry"
    for number, others in enumerate(members[1:], start=1):
        if i in others:
            return f"it is in another model, sparse/{number}, of {len(others)} photographs"
    linked = sum(1 for pair in mine if inside.intersection(pair))
    best = max(mine.values())
    if not inside:
        return f"no model was found; {len(mine)} pairs agree, the best with {best} matches"
    if not linked:
        return f"it matches {len(mine)} photographs, none of which is in the model"
    return f"it matches {linked} photographs of the model, but its pose could not be determined"


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(now - self._last, 3)
        self._last = now
