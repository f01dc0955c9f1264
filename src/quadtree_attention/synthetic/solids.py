# SPDX-License-Identifier: Apache-2.0
"""Boxes and ellipsoids, and the exact depth at which rays meet them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quadtree_attention.synthetic.cameras import Camera

Kind = Literal["room", "plane", "box", "bar", "ellipsoid"]
ROUNDING = 1e-6  # relative difference of equal depths, computed twice
NEAREST = 0.05  # a camera sees nothing nearer: no surface may fill its view with one texel


@dataclass(frozen=True)
class Solids:
    """The solids of every scene of a batch, in slots whose kind is the same in all scenes.

    Slot 0 is the room, seen from inside. A plane is a very thin box, a bar a long one.
    """

    kinds: tuple[Kind, ...]
    rotation: Tensor  # (B, S, 3, 3), columns are the solid's axes in the world
    centre: Tensor  # (B, S, 3)
    half: Tensor  # (B, S, 3), half its lengths along its axes
    active: Tensor  # (B, S) bool: the slot holds a solid


@dataclass(frozen=True)
class Sight:
    """Solids from one camera, in coordinates of each solid in which it reaches from -1 to 1.

    There, the point at `depth` on the ray through (x, y, 1) is
    `origin + depth * (slope[..., 0] * x + slope[..., 1] * y + slope[..., 2])`.
    """

    kinds: tuple[Kind, ...]
    slope: Tensor  # (B, S, 3, 3)
    origin: Tensor  # (B, S, 3)
    nearest: Tensor  # (B, S), depth from which on it is seen; infinite for an empty slot
    used: tuple[int, ...] | None  # slots, the room aside, that some scene fills; None: not known

    def direction(self, slot: int | slice, axis: int, x: Tensor, y: Tensor) -> Tensor:
        # Grouped so that on a grid, x (B, 1, W) and y (B, H, 1), one operation sees all pixels;
        # no fused multiply-add, which would round differently in different batches
        a, b, c = self.slope[:, None, None, slot, axis].unbind(-1)
        return a * x + (b * y + c)


def see(solids: Solids, camera: Camera, device: torch.device, dtype: torch.dtype) -> Sight:
    """Both must be on the CPU in float64; the result is on `device` in `dtype`."""
    inverse = solids.rotation.mT / solids.half[..., None]  # (B, S, 3, 3)
    slope = inverse @ camera.rotation[:, None]
    origin = (inverse @ (camera.centre[:, None] - solids.centre)[..., None])[..., 0]
    return Sight(
        solids.kinds,
        slope.to(device, dtype),
        origin.to(device, dtype),
        torch.where(solids.active, NEAREST, torch.inf).to(device, dtype),
        used_slots(solids),
    )


def used_slots(solids: Solids) -> tuple[int, ...]:
    """Slots, the room aside, that some scene fills; `solids` must be on the CPU."""
    filled: list[bool] = solids.active.any(dim=0).tolist()
    return tuple(slot for slot in range(1, len(filled)) if filled[slot])


def cast(sight: Sight, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The first surface on every ray.

    Where it is not known which slots are used, all are looked at together, which takes memory for
    all of them unless a compiler fuses the operations.

    Args:
        sight: The solids.
        x: Image coordinates at depth 1, (B, H, W) or (B, 1, W).
        y: (B, H, W) or (B, H, 1).

    Returns:
        Depth along the optical axis, and slot of the solid (uint8), both (B, H, W).
    """
    if sight.used is None:
        return _cast_together(sight, x, y)
    depth = _slabs(sight, 0, x, y)[1]
    slot = torch.zeros_like(depth, dtype=torch.uint8)
    for index in sight.used:
        if sight.kinds[index] == "ellipsoid":
            found = _ellipsoid(sight, index, x, y)
            hit = found < depth  # False for NaN, rays that pass by
        else:
            found, end = _slabs(sight, index, x, y)
            hit = found < torch.minimum(end, depth)
        hit &= found > sight.nearest[:, index, None, None]
        depth = torch.where(hit, found, depth)
        slot = torch.where(hit, index, slot)
    return depth, slot


def _cast_together(sight: Sight, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """As `cast`, by a minimum over the last axis, that of the slots."""
    x, y = x[..., None], y[..., None]
    every = slice(None)
    ball = _ellipsoid(sight, every, x, y)  # (B, H, W, S)
    start, end = _slabs(sight, every, x, y)
    is_round = _is(sight, "ellipsoid")
    found = torch.where(is_round, ball, start)
    hit = (is_round | (start < end)) & (found > sight.nearest[:, None, None])
    found = torch.where(_is(sight, "room"), end, torch.where(hit, found, torch.inf))
    depth = found.amin(dim=-1)
    # No argmin: compiled by torch 2.11 for CPUs it names other slots. Rounding is allowed for, as
    # kernels may compute `found` anew.
    nearest = found <= depth[..., None] * (1 + ROUNDING)
    number = torch.arange(len(sight.kinds), device=found.device, dtype=found.dtype)
    slot = torch.where(nearest, number, len(sight.kinds)).amin(dim=-1)
    return depth, slot.to(torch.uint8)


def _is(sight: Sight, kind: Kind) -> Tensor:
    """(S,) bool; by comparing, since a list of constants would be copied to the device."""
    number = torch.arange(len(sight.kinds), device=sight.origin.device)
    found = number < 0
    for index, other in enumerate(sight.kinds):
        if other == kind:
            found = found | (number == index)
    return found


def _slabs(sight: Sight, slot: int | slice, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Distances at which rays enter and leave the box of a slot; a miss if they leave first."""
    start, end = None, None
    for axis in range(3):
        # The sum changes nothing but 0, whose reciprocal times 0 would be NaN
        step = sight.direction(slot, axis, x, y).add_(1e-20).reciprocal_()
        middle = step * -sight.origin[:, None, None, slot, axis]
        reach = step.abs_()
        low, high = middle - reach, middle.add_(reach)
        start = low if start is None else torch.maximum(start, low)
        end = high if end is None else torch.minimum(end, high)
    assert start is not None and end is not None
    return start, end


def _ellipsoid(sight: Sight, slot: int | slice, x: Tensor, y: Tensor) -> Tensor:
    """Distances at which rays enter the unit ball of a slot; NaN for a miss."""
    ox, oy, oz = sight.origin[:, None, None, slot].unbind(-1)
    dx, dy, dz = (sight.direction(slot, axis, x, y) for axis in range(3))
    a = dx * dx + dy * dy + dz * dz
    b = dx * ox + dy * oy + dz * oz
    # The ray's nearest point to the centre gives the distance without cancellation,
    # which b * b - a * c suffers from when the ball is small and far
    t = b / a
    nx, ny, nz = ox - t * dx, oy - t * dy, oz - t * dz
    miss = nx * nx + ny * ny + nz * nz
    return -t - torch.sqrt((1 - miss) / a)
