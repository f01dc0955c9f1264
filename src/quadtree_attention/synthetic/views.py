# SPDX-License-Identifier: Apache-2.0
"""Image, depth, flow and visibility of the two views of scenes, computed on the device."""

from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from quadtree_attention.synthetic.cameras import Camera, pixel_grid
from quadtree_attention.synthetic.fused import fused, send
from quadtree_attention.synthetic.layout import Scene, transfer
from quadtree_attention.synthetic.render import (
    PATTERNS,
    face_table,
    mean_colour,
    paint,
    solid_table,
)
from quadtree_attention.synthetic.solids import Kind, Sight, Solids, cast, see, used_slots
from quadtree_attention.synthetic.textures import Bank, Textures

Size = tuple[int, int]
View = tuple[Tensor, Tensor, Tensor, Tensor]  # image, depth, flow, visible


def both_views(
    scene: Scene, cameras: tuple[Camera, Camera], textures: Textures, samples: int
) -> tuple[View, View]:
    """Return image, depth, flow to the other view and visibility there, for each of two cameras.

    Args:
        scene: Scenes on the CPU in float64.
        cameras: Cameras on the CPU in float64.
        textures: Textures on the device that renders.
        samples: Rays per pixel.
    """
    ways = (cameras, cameras[::-1])
    numbers = torch.stack([_pack(scene, *way, textures) for way in ways]).float()
    view0, view1 = (
        _view(packed, scene.solids, *way, textures, samples)
        for packed, way in zip(send(numbers, textures.device), ways, strict=True)
    )
    return view0, view1


def _view(
    packed: Tensor, solids: Solids, camera: Camera, other: Camera, textures: Textures, samples: int
) -> View:
    kinds, used, bank = solids.kinds, used_slots(solids), textures.bank
    depth, flow, visible = _survey(packed, kinds, camera.size, other.size, used=used)
    offsets = send(torch.tensor(PATTERNS[samples]), textures.device)
    image = mean_colour(
        _sample(
            packed,
            *(offset, bank.texels, bank.levels, bank.size),
            *(kinds, camera.size, samples),
            used=used,
        )
        for offset in offsets
    )
    return image, depth, flow, visible


def _shapes(slots: int) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that `_pack` concatenates."""
    camera = [(3, 3), (3, 3), (3,)]
    sight = [(slots, 3, 3), (slots, 3), (slots,)]
    return [*camera, *camera, *sight, *sight, (slots, 7), (slots, 6, 15)]


def _pack(scene: Scene, camera: Camera, other: Camera, textures: Textures) -> Tensor:
    """Concatenate all parameters of a view, (B, N), for a single copy to the device."""
    place_ = torch.device("cpu"), torch.float64
    sights = [see(scene.solids, c, *place_) for c in (camera, other)]
    parts = [
        *(t for c in (camera, other) for t in (c.K, c.rotation, c.centre)),
        *(t for s in sights for t in (s.slope, s.origin, s.nearest)),
        solid_table(scene),
        face_table(scene.surfaces, textures.size),
    ]
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _unpack(packed: Tensor, slots: int) -> list[Tensor]:
    shapes = _shapes(slots)
    ends = [sum(prod(shape) for shape in shapes[:count]) for count in range(len(shapes) + 1)]
    columns = (packed[:, start:end] for start, end in pairwise(ends))
    return [c.unflatten(1, shape) for c, shape in zip(columns, shapes, strict=True)]


def _camera(parts: list[Tensor], size: Size) -> Camera:
    K, rotation, centre = parts
    return Camera(K, rotation, centre, size)


def _sight(parts: list[Tensor], kinds: tuple[Kind, ...], used: tuple[int, ...] | None) -> Sight:
    slope, origin, nearest = parts
    return Sight(kinds, slope, origin, nearest, used)


@fused(batched=1)
def _survey(
    packed: Tensor,
    kinds: tuple[Kind, ...],
    size: Size,
    other_size: Size,
    used: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return depth, flow to the other view, and visibility there."""
    parts = _unpack(packed, len(kinds))
    camera, other = _camera(parts[:3], size), _camera(parts[3:6], other_size)
    depth = cast(_sight(parts[6:9], kinds, used), *camera.rays())[0]
    target, visible = transfer(depth, camera, other, _sight(parts[9:12], kinds, used))
    return depth, target - pixel_grid(*size, like=depth), visible


@fused(batched=1)
def _sample(
    packed: Tensor,
    offset: Tensor,
    texels: Tensor,
    levels: Tensor,
    texture_size: int,
    kinds: tuple[Kind, ...],
    size: Size,
    samples: int,
    used: tuple[int, ...] | None = None,
) -> Tensor:
    """Return the colours of one ray per pixel, through its centre + `offset`."""
    parts = _unpack(packed, len(kinds))
    camera, sight = _camera(parts[:3], size), _sight(parts[6:9], kinds, used)
    bank = Bank(texels, levels, texture_size)
    dx, dy = offset.unbind()
    return paint(parts[12], parts[13], sight, camera, bank, samples, dx, dy)
