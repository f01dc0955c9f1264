# SPDX-License-Identifier: Apache-2.0
"""Boxes and ellipsoids, and the exact depth of their intersections with rays."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quadtree_attention.synthetic.cameras import Camera

Kind = Literal["room", "plane", "box", "bar", "ellipsoid"]
ROUNDING = 1e-6  # relative rounding difference of depths computed twice
NEAREST = 0.05  # minimum depth of a camera, so that no single texel fills its view


@dataclass(frozen=True)
class Solids:
    """The solids of every scene of a batch, in slots whose kind is the same in all scenes.

    Slot 0 is the room, seen from inside. A plane is a very thin box, a bar a long box.
    """

    kinds: tuple[Kind, ...]
    rotation: Tensor  # (B, S, 3, 3), columns are the axes of the solid in world coordinates
    centre: Tensor  # (B, S, 3)
    half: Tensor  # (B, S, 3), half lengths along these axes
    active: Tensor  # (B, S) bool: the slot holds a solid


@dataclass(frozen=True)
class Sight:
    """Solids as seen from one camera, in coordinates in which each solid fills [-1, 1].

    In these coordinates the point at `depth` on the ray through (x, y, 1) is
    `origin + depth * (slope[..., 0] * x + slope[..., 1] * y + slope[..., 2])`.
    """

    kinds: tuple[Kind, ...]
    slope: Tensor  # (B, S, 3, 3)
    origin: Tensor  # (B, S, 3)
    nearest: Tensor  # (B, S), minimum depth of visible points; infinite for an empty slot
    used: tuple[int, ...] | None  # slots other than the room that any scene fills; None: unknown

    def direction(self, slot: int | slice, axis: int, x: Tensor, y: Tensor) -> Tensor:
        # Grouped so that on a grid, x (B, 1, W) and y (B, H, 1), one operation runs on all pixels;
        # no fused multiply-add, which would round differently in different batches
        a, b, c = self.slope[:, None, None, slot, axis].unbind(-1)
        return a * x + (b * y + c)


def see(solids: Solids, camera: Camera, device: torch.device, dtype: torch.dtype) -> Sight:
    """Transform solids on the CPU in float64 to a camera; the result has `device` and `dtype`."""
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
    """Return the slots other than the room that any scene fills; `solids` are on the CPU."""
    filled: list[bool] = solids.active.any(dim=0).tolist()
    return tuple(slot for slot in range(1, len(filled)) if filled[slot])


def cast(sight: Sight, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first surface on every ray.

    If `used` is None, all slots are processed in one operation, which needs memory for all of them
    unless a compiler fuses the operations.

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
            hit = found < depth  # False for NaN: no intersection
        else:
            found, end = _slabs(sight, index, x, y)
            hit = found < torch.minimum(end, depth)
        hit &= found > sight.nearest[:, index, None, None]
        depth = torch.where(hit, found, depth)
        slot = torch.where(hit, index, slot)
    return depth, slot


def _cast_together(sight: Sight, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `cast` by a minimum over the last axis, the slots."""
    x, y = x[..., None], y[..., None]
    every = slice(None)
    ball = _ellipsoid(sight, every, x, y)  # (B, H, W, S)
    start, end = _slabs(sight, every, x, y)
    is_round = _is(sight, "ellipsoid")
    found = torch.where(is_round, ball, start)
    hit = (is_round | (start < end)) & (found > sight.nearest[:, None, None])
    found = torch.where(_is(sight, "room"), end, torch.where(hit, found, torch.inf))
    depth = found.amin(dim=-1)
    # No argmin: compiled by torch 2.11 for CPUs it returns wrong slots. The tolerance is needed
    # because compiled kernels may recompute `found` with other rounding.
    nearest = found <= depth[..., None] * (1 + ROUNDING)
    number = torch.arange(len(sight.kinds), device=found.device, dtype=found.dtype)
    slot = torch.where(nearest, number, len(sight.kinds)).amin(dim=-1)
    return depth, slot.to(torch.uint8)


def _is(sight: Sight, kind: Kind) -> Tensor:
    """Return (S,) bool, by comparisons: a list of constants would be copied to the device."""
    number = torch.arange(len(sight.kinds), device=sight.origin.device)
    found = number < 0
    for index, other in enumerate(sight.kinds):
        if other == kind:
            found = found | (number == index)
    return found


def _slabs(sight: Sight, slot: int | slice, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return depths at which rays enter and leave the box of a slot; a miss if start >= end."""
    start, end = None, None
    for axis in range(3):
        # The sum affects zeros only, whose reciprocal times 0 would be NaN
        step = sight.direction(slot, axis, x, y).add_(1e-20).reciprocal_()
        middle = step * -sight.origin[:, None, None, slot, axis]
        reach = step.abs_()
        low, high = middle - reach, middle.add_(reach)
        start = low if start is None else torch.maximum(start, low)
        end = high if end is None else torch.minimum(end, high)
    assert start is not None and end is not None
    return start, end


def _ellipsoid(sight: Sight, slot: int | slice, x: Tensor, y: Tensor) -> Tensor:
    """Return depths at which rays enter the unit ball of a slot; NaN for a miss."""
    ox, oy, oz = sight.origin[:, None, None, slot].unbind(-1)
    dx, dy, dz = (sight.direction(slot, axis, x, y) for axis in range(3))
    a = dx * dx + dy * dy + dz * dz
    b = dx * ox + dy * oy + dz * oz
    # The point of the ray nearest to the centre gives the distance without the cancellation of
    # b * b - a * c for a small and distant ball
    t = b / a
    nx, ny, nz = ox - t * dx, oy - t * dy, oz - t * dz
    miss = nx * nx + ny * ny + nz * nz
    return -t - torch.sqrt((1 - miss) / a)
