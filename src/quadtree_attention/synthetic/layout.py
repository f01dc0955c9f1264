# SPDX-License-Identifier: Apache-2.0
"""Random scenes: a room, the objects in it, their surfaces, and the cameras.

Everything is computed on the CPU in float64. World coordinates are those of the first camera.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.synthetic.cameras import (
    Camera,
    from_axis_angle,
    from_quaternion,
    inside,
    intrinsics,
    project,
    rotate,
    unproject,
)
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.options import ContentOptions, Range, SceneOptions
from quadtree_attention.synthetic.solids import Kind, Sight, Solids, cast, see

# Slots are filled at random, so that every combination of kinds occurs
PATTERN: tuple[Kind, ...] = ("plane", "box", "ellipsoid", "bar", "plane", "box", "plane")
ATTEMPTS = 8  # candidates of the second camera per scene
ROUNDS = (0, 1, 3, ATTEMPTS)  # first candidate of each round: most scenes need one candidate only
PROBE = (12, 16)  # size of the images in which their overlap is measured
SAME_SURFACE = 3e-5  # relative difference of depths due to rounding


@dataclass(frozen=True)
class Surfaces:
    """The texture of each of six faces of each solid.

    A point (u, v) of a face has texel `axes @ (u, v) + offset` of `texture`, whose colour c
    becomes `gain * (c - 0.5) + bias`. A second, much larger and fainter texture is added, so that
    mirrored repetitions of a texture differ.
    """

    texture: Tensor  # (B, S, 6) int64
    axes: Tensor  # (B, S, 6, 2, 2), texels per length
    offset: Tensor  # (B, S, 6, 2), in textures
    gain: Tensor  # (B, S, 6, 3)
    bias: Tensor  # (B, S, 6, 3)
    stain: Tensor  # (B, S, 6) int64, the second texture
    stain_gain: Tensor  # (B, S, 6)


@dataclass(frozen=True)
class Scene:
    """The scenes of a batch."""

    solids: Solids
    surfaces: Surfaces
    light: Tensor  # (B, 3), direction to the light, scaled by its intensity


def first_camera(draws: Draws, size: tuple[int, int], focal: Range) -> Camera:
    """Draw the intrinsics of a camera at the world origin."""
    height, width = size
    batch = len(draws)
    middle = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64)
    centre = middle + draws.uniform(-0.03, 0.03, 2) * max(size)
    matrix = intrinsics(draws.log_uniform(*focal) * max(size), centre)
    eye = torch.eye(3, dtype=torch.float64).repeat(batch, 1, 1)
    return Camera(matrix, eye, torch.zeros(batch, 3, dtype=torch.float64), size)


def place(draws: Draws, camera: Camera, options: ContentOptions, textures: int) -> Scene:
    """Draw a scene in front of the camera; `textures` is the number of textures."""
    room = _room(draws, options.room)
    solids = _with_objects(draws, room, camera, options)
    surfaces = _surfaces(draws, solids, camera, options, textures)
    light = draws.unit() * draws.uniform(0.0, 0.4, 1)
    return Scene(solids, surfaces, light)


def _room(draws: Draws, length: Range) -> Solids:
    """Draw a room around the camera, which is in the rear part and looks ahead."""
    degrees = torch.stack(
        [draws.uniform(-25, 20), draws.uniform(-50, 50), draws.uniform(-8, 8)], dim=-1
    )
    tilt, turn, roll = (
        from_axis_angle(torch.deg2rad(degrees[:, i, None]) * torch.eye(3, dtype=torch.float64)[i])
        for i in range(3)
    )
    rotation = roll @ tilt @ turn
    half = draws.log_uniform(*length, 1) * draws.uniform(0.6, 1.0, 3)
    half = half * torch.tensor([0.8, 0.5, 1.0], dtype=torch.float64)
    where = draws.uniform(-0.6, 0.6, 3)
    where[:, 2] = where[:, 2] * 0.5 - 0.5
    centre = -rotate(rotation, where * half)
    active = torch.ones(len(draws), 1, dtype=torch.bool)
    return Solids(("room",), rotation[:, None], centre[:, None], half[:, None], active)


def _with_objects(draws: Draws, room: Solids, camera: Camera, options: ContentOptions) -> Solids:
    low, high = options.objects
    if high == 0:
        return room
    kinds = tuple(islice(cycle(PATTERN), high))
    centre, distance = _centres(draws, room, camera, options.depth, high)
    rank = draws.uniform(0, 1, high).argsort(dim=-1).argsort(dim=-1)
    active = rank < draws.integers(low, high + 1, 1)
    solids = Solids(
        kinds,
        _rotations(draws, room, kinds),
        centre,
        _halves(draws, kinds, distance, camera, options.thin),
        active,
    )
    return _join(room, solids)


def _join(a: Solids, b: Solids) -> Solids:
    return Solids(
        a.kinds + b.kinds,
        torch.cat([a.rotation, b.rotation], dim=1),
        torch.cat([a.centre, b.centre], dim=1),
        torch.cat([a.half, b.half], dim=1),
        torch.cat([a.active, b.active], dim=1),
    )


def _centres(
    draws: Draws, room: Solids, camera: Camera, depth: Range, count: int
) -> tuple[Tensor, Tensor]:
    """Draw centres of objects (B, count, 3) all over the image, and distances (B, count)."""
    height, width = camera.size
    pixels = draws.uniform(-0.05, 1.05, count, 2) * torch.tensor([width, height])
    rays = (pixels - camera.K[:, None, :2, 2]) / camera.K[:, None, 0, :1]
    centre = F.pad(rays, (0, 1), value=1.0) * draws.log_uniform(*depth, count, 1)
    local = rotate(room.rotation[:, 0].mT, centre - room.centre)
    centre = rotate(room.rotation[:, 0], local.clamp(-room.half * 0.9, room.half * 0.9))
    centre = centre + room.centre
    return centre, centre.norm(dim=-1)


def _rotations(draws: Draws, room: Solids, kinds: tuple[Kind, ...]) -> Tensor:
    """Draw rotations (B, count, 3, 3): half of the objects are upright, the others at any angle."""
    count = len(kinds)
    yaw = draws.uniform(-math.pi, math.pi, count, 1) * torch.tensor([0.0, 1.0, 0.0])
    upright = room.rotation @ from_axis_angle(yaw.double())
    free = from_quaternion(draws.normal(count, 4))
    # Planes at random angles would often be seen edge-on: tilt them from the fronto-parallel pose
    tilt = draws.uniform(-math.pi, math.pi, count, 1)
    tilt = torch.cat([tilt.cos(), tilt.sin(), torch.zeros_like(tilt)], dim=-1)
    tilt = from_axis_angle(tilt * draws.uniform(0, math.radians(75), count, 1))
    spin = draws.uniform(-math.pi, math.pi, count, 1) * torch.tensor([0.0, 0.0, 1.0])
    facing = tilt @ from_axis_angle(spin.double())
    is_plane = torch.tensor([kind == "plane" for kind in kinds])[:, None, None]
    free = facing.where(is_plane, free)
    return upright.where(draws.chance(0.5, count, 1, 1), free)


def _halves(
    draws: Draws, kinds: tuple[Kind, ...], distance: Tensor, camera: Camera, thin_share: float
) -> Tensor:
    """Draw half lengths (B, count, 3) relative to the view, so that near objects do not fill it."""
    count = len(kinds)
    view = max(camera.size) / camera.K[:, 0, 0, None]  # width of the view at depth 1
    seen = (distance * view)[..., None]  # (B, count, 1)
    shape = draws.uniform(0.4, 1.0, count, 3)
    size = draws.log_uniform(0.05, 0.25, count, 1)
    body = shape * size
    plane = torch.cat([body[..., :2] * 1.3, torch.full_like(size, 0.004)], dim=-1)
    thin = draws.log_uniform(0.003, 0.015, count, 1) * shape
    bar = torch.cat([thin[..., :1], size * 2, thin[..., 2:]], dim=-1)
    by_kind = {"plane": plane, "bar": bar, "box": body, "ellipsoid": body}
    half = torch.stack([by_kind[kind][:, i] for i, kind in enumerate(kinds)], dim=1)
    if thin_share > 0:  # nothing is drawn otherwise, which would move all that is drawn later
        half = _wires(draws, count).where(draws.chance(thin_share, count, 1), half)
    return half * seen


def _wires(draws: Draws, count: int) -> Tensor:
    """Draw half lengths (B, count, 3) relative to the view: 1.5 to 8 pixels wide out of 640."""
    width = draws.log_uniform(0.0012, 0.006, count, 1)
    length = draws.log_uniform(0.1, 0.5, count, 1)
    return torch.cat([width, length, width], dim=-1)


def _surfaces(
    draws: Draws, solids: Solids, camera: Camera, options: ContentOptions, textures: int
) -> Surfaces:
    count = len(solids.kinds)
    faces = (count, 6)
    distance = solids.centre.norm(dim=-1, keepdim=True).repeat(1, 1, 6)
    distance[:, 0] = _to_walls(solids)
    density = camera.K[:, :1, :1] / distance  # (B, S, 6), pixels per length
    density = density / draws.log_uniform(*options.texture_scale, *faces)
    angle = draws.integers(0, 4, *faces) * (math.pi / 2) + draws.uniform(-0.3, 0.3, *faces)
    mirror = torch.where(draws.chance(0.5, *faces), -1.0, 1.0)
    cos, sin = angle.cos(), angle.sin()
    axes = torch.stack([cos * mirror, -sin, sin * mirror, cos], dim=-1).unflatten(-1, (2, 2))
    plain = draws.chance(options.textureless, *faces, 1)
    contrast = draws.uniform(0.5, 1.0, *faces, 1) * draws.uniform(0.85, 1.15, *faces, 3)
    faint = draws.uniform(0.0, 0.12, *faces, 1)
    stain = draws.uniform(0.1, 0.35, *faces)
    tone = draws.uniform(-0.12, 0.12, *faces, 1) + draws.uniform(-0.05, 0.05, *faces, 3)
    colour = draws.uniform(0.2, 0.85, *faces, 1) + draws.uniform(-0.1, 0.1, *faces, 3)
    texture = draws.integers(0, textures, *faces)
    offset = draws.uniform(0, 2, *faces, 2)
    stain_texture = draws.integers(0, textures, *faces)
    faint_stain = 0.3 * stain
    if options.blank > 0:  # nothing is drawn otherwise, which would move all that is drawn later
        marked = ~draws.chance(options.blank, *faces)
        faint, faint_stain = faint * marked[..., None], faint_stain * marked
    return Surfaces(
        texture=texture,
        axes=axes * density[..., None, None],
        offset=offset,
        gain=torch.where(plain, faint, contrast),
        bias=torch.where(plain, colour, 0.5 + tone),
        stain=stain_texture,
        stain_gain=torch.where(plain[..., 0], faint_stain, stain),
    )


def _to_walls(solids: Solids) -> Tensor:
    """Return the approximate distance of the visible part of each face of the room, (B, 6)."""
    half = solids.half[:, 0]
    camera = rotate(solids.rotation[:, 0].mT, -solids.centre[:, 0])
    nearest = torch.stack([half + camera, half - camera], dim=-1).flatten(1)
    return (nearest * half.amax(dim=-1, keepdim=True)).sqrt()


def second_camera(
    draws: Draws, scene: Scene, camera: Camera, size: tuple[int, int], options: SceneOptions
) -> Camera:
    """Return the first of several random cameras whose view overlaps enough with `camera`."""
    from quadtree_attention.synthetic.probe import first_depth  # Numba is slow to import

    depth = first_depth(_probe_sight(scene.solids, camera), *camera.resized(*PROBE).rays())
    typical = depth.flatten(1).median(dim=1).values
    tries = _in_room(scene.solids, _candidates(draws, camera, typical, size, options))
    misfit = torch.full((len(draws), ATTEMPTS), torch.inf, dtype=torch.float64)
    left = torch.arange(len(draws))
    for first, end in pairwise(ROUNDS):
        item = left.repeat_interleave(end - first)
        attempt = torch.arange(first, end).repeat(len(left))
        chosen = _choose_cameras(tries, item * ATTEMPTS + attempt)
        solids, given = _choose(scene.solids, item), _choose_cameras(camera, item)
        shared = _shared(solids, given, depth[item], chosen)
        low, high = options.overlap
        misfit[item, attempt] = (low - shared).clamp(min=0) * 10 + (shared - high).clamp(min=0)
        left = (misfit.amin(dim=1) > 0).nonzero()[:, 0]
        if not len(left):
            break
    # argmin returns the first of several cameras with enough overlap
    best = misfit.argmin(dim=1) + torch.arange(len(draws)) * ATTEMPTS
    return _choose_cameras(tries, best)


def _in_room(solids: Solids, tries: Camera) -> Camera:
    """Move cameras, `ATTEMPTS` per scene, into the room if they are outside."""
    rotation, centre, half = (
        t[:, 0].repeat_interleave(ATTEMPTS, 0)
        for t in (solids.rotation, solids.centre, solids.half * 0.9)
    )
    local = rotate(rotation.mT, tries.centre - centre).clamp(-half, half)
    return Camera(tries.K, tries.rotation, rotate(rotation, local) + centre, tries.size)


def _choose(solids: Solids, item: Tensor) -> Solids:
    tensors = (solids.rotation, solids.centre, solids.half, solids.active)
    return Solids(solids.kinds, *(t[item] for t in tensors))


def _choose_cameras(cameras: Camera, item: Tensor) -> Camera:
    return cameras.map(lambda t: t[item])


def _candidates(
    draws: Draws, camera: Camera, typical: Tensor, size: tuple[int, int], options: SceneOptions
) -> Camera:
    """Draw `ATTEMPTS` cameras per scene; later ones move less, the last one hardly at all."""
    shape = (ATTEMPTS,)
    # The full range for the first half, then decreasing
    motion = torch.linspace(2, 0.02, ATTEMPTS, dtype=torch.float64).clamp(max=1)
    way = draws.unit(*shape) * torch.tensor([1.0, 0.7, 0.6])
    way = F.normalize(way, dim=-1) * draws.uniform(*options.baseline, *shape, 1)
    scale = typical[:, None, None] * motion[:, None]
    centre = way * scale
    aside = torch.cat([draws.uniform(-0.2, 0.2, *shape, 2), torch.zeros_like(way[..., :1])], -1)
    target = typical[:, None, None] * (aside * motion[:, None] + torch.tensor([0.0, 0.0, 1.0]))
    look = F.normalize(target - centre, dim=-1)
    ahead = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).expand_as(look)
    axis = torch.linalg.cross(ahead, look)
    angle = torch.atan2(axis.norm(dim=-1, keepdim=True), look[..., 2:])
    turn = from_axis_angle(F.normalize(axis, dim=-1) * angle)
    away = draws.uniform(0, 2 * math.pi, *shape, 1)
    away = torch.cat([away.cos(), away.sin(), torch.zeros_like(away)], dim=-1)
    away = away * torch.deg2rad(draws.uniform(*options.rotation, *shape, 1)) * motion[:, None]
    sign = torch.where(draws.chance(0.5, *shape, 1), -1.0, 1.0)
    roll = torch.deg2rad(draws.uniform(*options.roll, *shape, 1)) * sign * motion[:, None]
    rotation = turn @ from_axis_angle(away) @ from_axis_angle(roll * ahead)
    return Camera(
        _second_intrinsics(draws, camera, size, options.focal_ratio, motion),
        rotation.flatten(0, 1),
        centre.flatten(0, 1),
        size,
    )


def _second_intrinsics(
    draws: Draws, camera: Camera, size: tuple[int, int], ratio: Range, motion: Tensor
) -> Tensor:
    height, width = size
    zoom = draws.log_uniform(*ratio, ATTEMPTS) ** motion
    focal = camera.K[:, 0, :1] * zoom * (max(size) / max(camera.size))
    middle = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64)
    jitter = draws.uniform(-0.03, 0.03, ATTEMPTS, 2) * max(size)
    return intrinsics(focal.flatten(), (middle + jitter).flatten(0, 1))


def _probe_sight(solids: Solids, camera: Camera) -> Sight:
    return see(solids, camera, camera.K.device, torch.float64)


def _shared(solids: Solids, camera: Camera, depth: Tensor, other: Camera) -> Tensor:
    """Return the overlap of two views (B,): the smaller share of visible pixels.

    `depth` is the depth of `camera`, at resolution `PROBE`.
    """
    from quadtree_attention.synthetic.probe import first_depth

    sight, other_sight = _probe_sight(solids, camera), _probe_sight(solids, other)
    small, other_small = camera.resized(*PROBE), other.resized(*PROBE)
    other_depth = first_depth(other_sight, *other_small.rays())
    forth = transfer(depth, small, other, other_sight, first_depth)[1]
    back = transfer(other_depth, other_small, camera, sight, first_depth)[1]
    shares = (visible.flatten(1).double().mean(dim=1) for visible in (forth, back))
    return torch.minimum(*shares)


def cast_depth(sight: Sight, x: Tensor, y: Tensor) -> Tensor:
    return cast(sight, x, y)[0]


def transfer(
    depth: Tensor,
    camera: Camera,
    other: Camera,
    sight: Sight,
    first_depth: Callable[[Sight, Tensor, Tensor], Tensor] = cast_depth,
) -> tuple[Tensor, Tensor]:
    """Project the surface points of a view to the other view, with their visibility.

    A point is visible if it is the first surface on the ray of the other camera through it: an
    exact test, independent of the pixels of the other view.

    Args:
        depth: (B, H, W) of the view.
        camera: Camera of the view.
        other: The other camera.
        sight: The solids from the other camera.
        first_depth: Function that returns the depth of the first surface on rays.

    Returns:
        Pixels (B, H, W, 2) and visibility (B, H, W).
    """
    points = other.from_world(camera.to_world(unproject(depth, camera.K)))
    pixels = project(points, other.K)
    within = inside(pixels, other.size)
    there = points[..., 2].where(within, 1)
    x, y = points[..., 0] / there, points[..., 1] / there
    first = first_depth(sight, x.where(within, 0), y.where(within, 0))
    return pixels, within & (first > there * (1 - SAME_SURFACE))
