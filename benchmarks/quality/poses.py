# SPDX-License-Identifier: Apache-2.0
"""`quadtree sfm` and SIFT with COLMAP on rendered scenes, against the cameras that rendered them.

`--data` is a folder of photographs, the textures of rooms and objects. A scene is a path of a
camera through a room: JPEG files with noise, blur and changes of brightness. The
methods get the focal length, or find it, beginning with 1.2 times the longer side; there is no EXIF
data. An error is the larger one of the angles between rotations and between directions of
translation of two cameras, over all pairs of photographs; a pair with a photograph outside the
first model is a failure.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measure import use_threads
from benchmarks.quality import check_folders, check_methods
from benchmarks.quality.sfm import BASELINE, METHODS, Scene, described
from benchmarks.result import ROOT, slug
from benchmarks.suite import Work
from quadtree_attention.images import Array, images_inside, to_image
from quadtree_attention.synthetic import SceneOptions, Textures, distort
from quadtree_attention.synthetic.cameras import Camera, intrinsics
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.layout import first_camera, place
from quadtree_attention.synthetic.solids import Solids
from quadtree_attention.synthetic.views import both_views
from quadtree_attention.tasks.match.metrics import auc

DATA = ROOT.parent / "shared" / "data" / "free_photos" / "images"
SIDE, TILES = 512, 6  # of a photograph in a texture; each texture is a square of TILES x TILES
TEXTURES = 4
QUALITY = 92  # of JPEG files
DEPTH = 3.0  # unit of the paths, with objects between 1.5 and 5
THRESHOLDS = 5, 10, 20  # degrees
FOCAL = "given", "unknown"
LIBRARIES = ("pycolmap",)
Pose = tuple[Tensor, Tensor]  # centre (3,), and the point at which the camera looks (3,)


def orbit(share: float) -> Pose:
    """A quarter of a circle round a point: each photograph is 8 degrees from the next."""
    angle = (share - 0.5) * math.pi / 2
    return _at(math.sin(angle), -0.15, 1 - math.cos(angle)), _at(0, 0, 1)


def wide(share: float) -> Pose:
    """Most of half a circle, in large steps."""
    return orbit(0.5 + (share - 0.5) * 5 / 3)


def walk(share: float) -> Pose:
    """Forward along the view, with the small movements of a hand."""
    sway = 0.03 * math.sin(11 * share)
    centre = _at(sway, 0.02 * math.cos(17 * share), 0.5 * share)
    return centre, centre + _at(0.1 * math.sin(7 * share), 0.05 * math.sin(5 * share), 1)


def narrow(share: float) -> Pose:
    """Sideways by a quarter of the depth of the scene, looking ahead."""
    centre = _at(0.25 * (share - 0.5), 0.03 * math.sin(9 * share), 0)
    return centre, centre + _at(0.05 * math.sin(13 * share), 0.05 * math.cos(8 * share), 1)


def survey(share: float) -> Pose:
    """Strips above the floor, looking down and up to seven degrees aside: all points in a plane."""
    row, column = divmod(round(share * 11), 4)
    centre = _at(0.34 * (column - 1.5), 0, 0.32 * (row - 1))
    tilt = _at(0.12 * math.sin(37 * share), 0, 0.12 * math.cos(23 * share))
    return centre, centre + tilt + _at(0, 1, 0)


@dataclass(frozen=True)
class Rendered:
    """How a scene is rendered.

    Attributes:
        path: The pose of the camera at a share of its path.
        focal: Focal length over the longer side.
        seed: Seed of the content.
        objects: Least and most objects in the room.
        photographs: Number of photographs.
        plain: Share of surfaces with almost no texture.
        strength: Of photometric distortions.
    """

    path: Callable[[float], Pose]
    focal: float
    seed: int
    objects: tuple[int, int] = (8, 12)
    photographs: int = 12
    plain: float = 0.1
    strength: float = 0.4


SCENES = {
    "orbit": Rendered(orbit, 0.9, 11),
    "wide": Rendered(wide, 0.75, 28, photographs=8),
    "plain": Rendered(wide, 0.75, 28, photographs=8, plain=0.6, strength=1.0),
    "walk": Rendered(walk, 0.75, 1),
    "narrow": Rendered(narrow, 0.9, 2),
    "survey": Rendered(survey, 0.75, 3, (0, 0)),
}


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    check_methods(parser, options, BASELINE)
    check_folders(parser, [options.data])


def plan(options: Namespace) -> list[list[Work]]:
    """Every method on every scene, with and without its focal length."""
    use_threads(options.threads, opencv=True)
    methods = [method for name in options.methods for method in METHODS[name](options)]
    options.methods = {method.name: method.settings for method in methods}
    textures = collages(options.data)
    works = []
    for name in options.scenes:
        rendered = SCENES[name]
        if options.photographs:
            rendered = replace(rendered, photographs=options.photographs)
        height, width = size = tuple(options.image)
        parts = name, rendered.photographs, width, height
        folder = options.folder / "photographs" / "-".join(map(str, parts))
        poses = photographs(rendered, textures, folder, size)
        for known, method in product(FOCAL, methods):
            true = rendered.focal * max(size)
            case = {"scene": name, "focal": known, "method": method.name}
            scene = Scene(folder, true if known == "given" else None)
            more = {"find": method.find, "scene": scene, "poses": poses, "focal": true}
            works.append([Work(case, "cpu", more)])
    return works


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """What is known about a model, its focal length over the true one, and areas of errors."""
    scene = work.more["scene"]
    folder = options.folder / slug(work["method"]) / scene.folder.name  # its matches are kept
    models = work.more["find"](scene, folder)
    cameras = list(models[0].cameras.values()) if models else []
    focal = cameras[0].mean_focal_length() / work.more["focal"] if cameras else None
    errors = pose_errors(_poses(models[0]) if models else {}, work.more["poses"])
    areas = dict(zip(map(str, THRESHOLDS), auc(errors, THRESHOLDS), strict=True))
    more = {"focal": focal, "auc": areas}
    return {"photographs": len(work.more["poses"]), **described(models), **more}


def pose_errors(found: dict[str, Array], true: dict[str, Array]) -> list[float]:
    """Errors of all pairs of the true poses (3, 4), world to camera, in degrees."""
    errors = []
    for first, second in combinations(sorted(true), 2):
        if first not in found or second not in found:
            errors.append(math.inf)
            continue
        (turn, shift), (true_turn, true_shift) = (
            _relative(poses[first], poses[second]) for poses in (found, true)
        )
        rotated = (np.trace(turn @ true_turn.T) - 1) / 2
        cosines = np.clip([rotated, shift @ true_shift], -1, 1)
        errors.append(float(np.degrees(np.arccos(cosines)).max()))
    return errors


def _relative(first: Array, second: Array) -> tuple[Array, Array]:
    """Rotation and direction from one pose (3, 4) to another."""
    rotation = second[:, :3] @ first[:, :3].T
    shift = second[:, 3] - rotation @ first[:, 3]
    return rotation, shift / max(float(np.linalg.norm(shift)), 1e-12)


def _poses(model: Any) -> dict[str, Array]:
    images = (model.images[number] for number in model.reg_image_ids())
    return {image.name: image.cam_from_world().matrix() for image in images}


def collages(folder: Path) -> Textures:
    """Large textures, so that none is repeated in a photograph: squares of photographs."""
    from PIL import ImageOps

    paths, count = images_inside(folder), TEXTURES * TILES**2
    chosen = [paths[i * len(paths) // count] for i in range(count)]
    squares = [np.asarray(ImageOps.fit(to_image(path), (SIDE, SIDE))) for path in chosen]
    grid = torch.from_numpy(np.stack(squares)).unflatten(0, (TEXTURES, TILES, TILES))
    return Textures(grid.permute(0, 5, 1, 3, 2, 4).flatten(2, 3).flatten(3, 4).contiguous())


def photographs(
    rendered: Rendered, textures: Textures, folder: Path, size: tuple[int, int]
) -> dict[str, Array]:
    """Write the photographs of a scene, unless they are there; return their poses by name.

    Poses are (3, 4), world to camera.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draws = Draws(rendered.seed, [0])
    focal = rendered.focal, rendered.focal
    options = SceneOptions(
        objects=rendered.objects,
        depth=(1.5, 5.0),
        room=(9.0, 10.0),
        focal=focal,
        texture_scale=(0.5, 1.0),
        textureless=rendered.plain,
        samples=4,
    )
    scene = place(draws, first_camera(draws, size, focal), options, len(textures))
    middle = torch.full_like(scene.surfaces.offset, 0.5)  # textures are mirrored at their edges
    scene = replace(scene, surfaces=replace(scene.surfaces, offset=middle))
    poses = {}
    for i in range(rendered.photographs):
        camera = _camera(rendered, scene.solids, i / (rendered.photographs - 1), size)
        name = f"{i:02d}.jpg"
        poses[name] = torch.cat(
            [camera.rotation[0].mT, -camera.rotation[0].mT @ camera.centre[0, :, None]], dim=1
        ).numpy()
        if (folder / name).exists():
            continue
        image = both_views(scene, (camera, camera), textures, options.samples)[0][0]
        image = distort(image, [i], seed=rendered.seed, strength=rendered.strength)
        pixels = (image[0] * 255).round().byte().permute(1, 2, 0)
        Image.fromarray(pixels.numpy()).save(folder / name, quality=QUALITY)
    return poses


def _camera(rendered: Rendered, solids: Solids, share: float, size: tuple[int, int]) -> Camera:
    """The camera of a path at a share of it.

    A path is in the axes of the first camera, in units of `DEPTH`; in a room without objects, in
    those of the room, from its centre, in units of the height above the floor.
    """
    if rendered.objects[1]:
        axes, origin, unit = torch.eye(3, dtype=torch.float64), _at(0, 0, 0), DEPTH
        down = axes[:, 1]
    else:
        axes, origin = solids.rotation[0, 0], solids.centre[0, 0]
        unit, down = float(solids.half[0, 0, 1]), -axes[:, 2]
    centre, target = (axes @ (unit * point) + origin for point in rendered.path(share))
    ahead = normalize(target - centre, dim=0)
    aside = normalize(torch.linalg.cross(down, ahead), dim=0)
    rotation = torch.stack([aside, torch.linalg.cross(ahead, aside), ahead], dim=1)
    middle = torch.tensor([[(size[1] - 1) / 2, (size[0] - 1) / 2]], dtype=torch.float64)
    matrix = intrinsics(torch.tensor([rendered.focal * max(size)], dtype=torch.float64), middle)
    return Camera(matrix, rotation[None], centre[None], size)


def _at(x: float, y: float, z: float) -> Tensor:
    return torch.tensor([x, y, z], dtype=torch.float64)
