# SPDX-License-Identifier: Apache-2.0
"""Colours of scenes: texture look-up and shading of the first surface on every ray."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from quadtree_attention.synthetic.cameras import Camera
from quadtree_attention.synthetic.layout import Scene, Surfaces
from quadtree_attention.synthetic.solids import Sight, cast
from quadtree_attention.synthetic.textures import Bank

# Offsets of the rays in a pixel, in different columns and rows
PATTERNS = {
    1: ((0.0, 0.0),),
    2: ((-0.25, -0.25), (0.25, 0.25)),
    4: ((-0.125, -0.375), (0.375, -0.125), (0.125, 0.375), (-0.375, 0.125)),
}
STAIN = (0.17, 0.09)  # texels of the stain per texel of the texture, along and across
AMBIENT = 0.85  # brightness of a surface parallel to the light


def mean_colour(colours: Iterable[Tensor]) -> Tensor:
    """Average samples (B, 3, H, W) into an image."""
    first, *others = colours
    for colour in others:
        first = first.add_(colour)
    return (first / (1 + len(others))).clamp_(0, 1)


def solid_table(scene: Scene) -> Tensor:
    """Return the shading parameters of solids (B, S, 7): half lengths, light, shape."""
    solids = scene.solids
    light = (solids.rotation.mT @ scene.light[:, None, :, None])[..., 0]  # (B, S, 3)
    round_ = torch.tensor([kind == "ellipsoid" for kind in solids.kinds])
    round_ = round_.expand(len(scene.light), -1)[..., None]
    return torch.cat([solids.half, light, round_], dim=-1)


def face_table(surfaces: Surfaces, texels: int) -> Tensor:
    """Return the shading parameters of faces (B, S, 6, 15); textures have side `texels`."""
    columns = [
        surfaces.texture[..., None],
        surfaces.axes.flatten(3),
        surfaces.offset * texels,
        surfaces.gain,
        surfaces.bias,
        surfaces.stain[..., None],
        surfaces.stain_gain[..., None],
    ]
    return torch.cat(columns, dim=-1)


def paint(
    own: Tensor,
    faces: Tensor,
    sight: Sight,
    camera: Camera,
    bank: Bank,
    samples: int,
    dx: float | Tensor,
    dy: float | Tensor,
) -> Tensor:
    """Return the colours (B, 3, H, W) of one ray per pixel, from tables of solids and faces."""
    solids = torch.cat([sight.slope.flatten(2), sight.origin, own], dim=-1).flatten(0, 1).t()
    faces = faces.flatten(0, 2).t()
    # With more rays per pixel, each covers fewer texels
    pixel = 1 / (camera.K[:, 0, 0] * samples**0.5)
    x, y = camera.rays(dx, dy)
    depth, slot = cast(sight, x, y)
    return _shade(solids, faces, bank, depth, slot, x, y, pixel)


def _shade(
    solids: Tensor,
    faces: Tensor,
    bank: Bank,
    depth: Tensor,
    slot: Tensor,
    x: Tensor,
    y: Tensor,
    pixel: Tensor,
) -> Tensor:
    """Return colours (B, 3, H, W) of surface points; `pixel` (B,) is the pixel size at depth 1."""
    batch, height, width = depth.shape
    count = solids.shape[1] // batch
    first = torch.arange(batch, device=depth.device)[:, None, None] * count
    row = (slot + first).flatten()
    own = solids.index_select(1, row)  # (19, N)
    slope, origin, half, light = own[:9].unflatten(0, (3, 3)), own[9:12], own[12:15], own[15:18]
    is_round = own[18] > 0
    depth, pixel = depth.flatten(), pixel[:, None, None].expand_as(depth).flatten()
    flat_x, flat_y = (t.expand(batch, height, width).flatten() for t in (x, y))

    ray = slope[:, 0] * flat_x + slope[:, 1] * flat_y + slope[:, 2]  # (3, N)
    point = origin + depth * ray
    face, u, v, normal = _surface(point, half, is_round)
    ray = ray * half
    towards = dot(normal, ray)
    inner = towards.abs() / length(ray)  # cosine of the angle between ray and normal
    lit = dot(normal, light) * -towards.sign()  # the normal points to the camera

    own = faces.index_select(1, row * 6 + face)  # (15, N)
    axes, gain, bias = own[1:5], own[7:10], own[10:13]
    texels_per_length = length(axes[:2])
    # The footprint of a pixel on a slanted surface is elongated: use its mean side
    footprint = texels_per_length * depth * pixel * inner.clamp(min=0.05).rsqrt()
    u, v = axes[0] * u + axes[1] * v + own[5], axes[2] * u + axes[3] * v + own[6]
    colour = bank.look_up(own[0].long(), u, v, footprint)
    across, along = STAIN
    larger = u * across + v * along, v * across - u * along
    stain = bank.look_up(own[13].long(), *larger, footprint * math.hypot(*STAIN))
    colour = gain * (colour - 0.5) + bias + own[14] * (stain - 0.5)
    colour = colour.clamp_(0, 1) * (AMBIENT + lit)
    return colour.unflatten(1, (batch, height, width)).transpose(0, 1)


def _surface(
    point: Tensor, half: Tensor, is_round: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return face (0 ... 5), coordinates on it, and unit normal (3, N) of points on solids.

    The points of an ellipsoid belong to the faces of its bounding box onto which they project.
    """
    reach = point.abs()
    on_x = (reach[0] >= reach[1]) & (reach[0] >= reach[2])
    on_z = ~on_x & (reach[2] > reach[1])
    along = torch.where(on_x, point[0], torch.where(on_z, point[2], point[1]))
    face = torch.where(on_x, 0, torch.where(on_z, 4, 2)) + (along > 0)
    place = point * half / along.abs()
    u = torch.where(on_x, place[2], place[0])
    v = torch.where(on_z | on_x, place[1], place[2])
    flat = torch.stack([on_x, ~(on_x | on_z), on_z]) * along.sign()
    curved = point / half
    curved = curved / length(curved)
    return face, u, v, torch.where(is_round, curved, flat)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return dot products (N,) of (C, N); reductions over a short first axis are slow on CPUs."""
    first, *others = a * b
    for product in others:
        first = first + product
    return first


def length(vector: Tensor) -> Tensor:
    """Return the norms (N,) of vectors (C, N)."""
    return dot(vector, vector).sqrt()
