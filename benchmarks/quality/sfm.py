# SPDX-License-Identifier: Apache-2.0
"""`quadtree sfm` and SIFT with COLMAP on the same photographs, in one run on a CPU.

`--data` is a folder of scenes: `images`, and cameras.json with the focal length in pixels. Both
methods get that focal length for one camera of all photographs, match all pairs, and use COLMAP's
incremental mapper. SIFT with COLMAP runs as COLMAP has it by default and, until all photographs are
registered, with the focal length kept, and with a first pair that may move forward, as in
lund_street, where COLMAP's limits accept none; the best model counts. SCENE/3 is every third
photograph of a scene.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import use_threads
from benchmarks.quality import DEFAULT, Method, check_folders, check_methods
from benchmarks.result import ROOT, slug
from benchmarks.suite import Work
from quadtree_attention.files import file_sha256
from quadtree_attention.images import images_inside
from quadtree_attention.sfm.database import colmap
from quadtree_attention.sfm.matching import PairMatcher
from quadtree_attention.sfm.pipeline import Chosen, build_model
from quadtree_attention.sfm.reconstruct import Attempt, map_images

DATA = ROOT.parent / "shared" / "data" / "free_multiview"
BASELINE = "SIFT + COLMAP"
SCENES = ("banana", "lund_street", "brighton_beach", "lund_street/3", "brighton_beach/3")
ATTEMPTS = (
    Attempt(refines=True),
    Attempt(refines=False),
    Attempt(refines=True, forward=True),
    Attempt(refines=False, forward=True),
)  # COLMAP's default first
LIBRARIES = ("pycolmap",)


@dataclass(frozen=True)
class Scene:
    """Photographs of a scene in a folder of their own, and their focal length in pixels or None."""

    folder: Path
    focal: float | None

    def __len__(self) -> int:
        return len(images_inside(self.folder))


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    check_methods(parser, options, BASELINE)
    check_folders(parser, [options.data / name.split("/")[0] for name in options.scenes])


def plan(options: Namespace) -> list[list[Work]]:
    """Every method on every scene."""
    use_threads(options.threads, opencv=True)
    methods = [method for name in options.methods for method in METHODS[name](options)]
    options.methods = {method.name: method.settings for method in methods}
    scenes = {name: _scene(name, options.data, options.folder) for name in options.scenes}
    return [
        [Work({"scene": name, "method": method.name}, "cpu", {"find": method.find, "scene": scene})]
        for name, scene in scenes.items()
        for method in methods
    ]


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """Registered photographs, points, track length and reprojection error."""
    scene = work.more["scene"]
    models = work.more["find"](scene, options.folder / slug(work["method"]) / scene.folder.name)
    return {"photographs": len(scene), **described(models)}


def described(models: Sequence[Any]) -> dict[str, Any]:
    """Photographs of all models; points, track length and reprojection error of the first."""
    model = models[0] if models else None
    return {
        "models": [found.num_reg_images() for found in models],
        "points": model.num_points3D() if model else 0,
        "track_length": model.compute_mean_track_length() if model else 0.0,
        "error": model.compute_mean_reprojection_error() if model else 0.0,
    }


def _scene(name: str, data: Path, work: Path) -> Scene:
    scene, _, step = name.partition("/")
    cameras = json.loads((data / scene / "cameras.json").read_text())["images"]
    folder = work / "photographs" / slug(name)
    folder.mkdir(parents=True, exist_ok=True)
    for camera in cameras[:: int(step or 1)]:
        target = folder / camera["file"]
        if not target.exists():
            target.symlink_to((data / scene / "images" / camera["file"]).resolve())
    return Scene(folder, cameras[0]["focal_px"])


def _ours(matcher: PairMatcher, scene: Scene, out: Path) -> list[Any]:
    chosen = Chosen(focal=scene.focal, sharing="one")
    report = build_model(scene.folder, out, matcher=matcher, chosen=chosen)
    folders = [out / "sparse" / str(number) for number in range(len(report.models))]
    return [colmap().Reconstruction(folder) for folder in folders]


def _sift(scene: Scene, out: Path) -> list[Any]:
    pycolmap = colmap()
    out.mkdir(parents=True, exist_ok=True)
    database = out / "database.db"
    database.unlink(missing_ok=True)
    pycolmap.extract_features(database, scene.folder, camera_mode=pycolmap.CameraMode.SINGLE)
    if scene.focal is not None:
        with pycolmap.Database.open(database) as file:
            (camera,) = file.read_all_cameras()
            camera.focal_length = scene.focal
            camera.has_prior_focal_length = True
            file.update_camera(camera)
    verification = pycolmap.TwoViewGeometryOptions()
    verification.ransac.random_seed = 0
    pycolmap.match_exhaustive(database, verification_options=verification)
    return map_images(database, out / "sparse", attempts=ATTEMPTS, linked=len(scene))[0]


def _networks(options: Namespace) -> list[Method]:
    made = []
    for name, path in options.weights or [(DEFAULT, None)]:
        matcher = PairMatcher.from_pretrained(path, device="cpu", size=options.size)
        assert matcher.path is not None
        settings = {"model": matcher.card["model"], "longer_side": matcher.preprocess.size}  # type: ignore[attr-defined]
        settings["weights_sha256"] = file_sha256(matcher.path)
        made.append(Method(name, partial(_ours, matcher), settings))
    return made


SETTINGS = {"features": "8192, full size", "matching": "exhaustive"}
METHODS = {"matcher": _networks, "sift": lambda _: [Method(BASELINE, _sift, SETTINGS)]}
