# SPDX-License-Identifier: Apache-2.0
"""Procedural textures of noise, patterns, shapes and strokes."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.errors import OptionError
from quadtree_attention.synthetic.cameras import pixel_grid
from quadtree_attention.synthetic.draws import Draws, hash_bits
from quadtree_attention.synthetic.textures import SIZE, Textures

SHAPES = 48  # shapes per texture
GLYPH, PITCH = (5, 7), (7, 11)  # size of a letter, distances of letters and lines


class ProceduralTextures(Textures):
    """Procedural textures, determined by a seed: texture i is the same in banks of any length.

    Args:
        count: Number of textures.
        size: Side in pixels.
        seed: Seed of the textures.
        device: Device of the textures.

    Example:
        >>> ProceduralTextures(4, size=32, seed=1).count
        4
    """

    def __init__(
        self,
        count: int = 96,
        *,
        size: int = SIZE,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if count < 1 or size < 16:
            raise OptionError(
                f"textures must be at least one of at least 16 pixels, got {count=}, {size=}"
            )
        images = torch.zeros(count, 3, size, size, dtype=torch.uint8, device=device)
        for number, family in enumerate(FAMILIES):
            indices = range(number, count, len(FAMILIES))
            if not indices:
                continue
            draws = Draws(seed, indices, stream=10)
            made = family(draws, size, torch.device(device))
            made = made + _per_item(draws.uniform(0, 0.05), made) * fractal(draws, size, 3, made)
            images[number :: len(FAMILIES)] = (made.clamp(0, 1) * 255 + 0.5).to(torch.uint8)
        super().__init__(images)


def _per_item(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (B,) or (B, C) to (B, 1 or C, 1, 1), float32, on the device of `like`."""
    values = values.to(like.device, torch.float32)
    return values.reshape(len(values), -1, 1, 1)


def fractal(
    draws: Draws, size: int, channels: int, like: Tensor, finest: int | None = None
) -> Tensor:
    """Return fractal noise (B, channels, S, S) with mean 0 and standard deviation about 1.

    Args:
        draws: The random numbers.
        size: S.
        channels: Number of independent maps.
        like: A tensor on the device.
        finest: Side of the finest noise in cells; None: S.
    """
    fade = draws.uniform(0.45, 0.95)
    total = draws.noise(channels, 3, 3, device=like.device)
    weight, power = torch.ones_like(fade), torch.ones_like(fade)
    while (side := 2 * total.shape[-1]) <= (finest or size):
        total = F.interpolate(total, (side, side), mode="bicubic", align_corners=False)
        weight = weight * fade
        power = power + weight**2
        total += draws.noise(channels, side, side, device=like.device) * _per_item(weight, like)
    total = F.interpolate(total, (size, size), mode="bicubic", align_corners=False)
    # Interpolation reduces the variance to about one half
    return total * _per_item((2 / power).sqrt(), like)


def noise(draws: Draws, size: int, device: torch.device) -> Tensor:
    """Return noise textures, as of clouds, dirt or marble: grey with some colour."""
    like = torch.zeros(1, device=device)
    grey = fractal(draws, size, 1, like)
    veins = (grey * _per_item(draws.uniform(2, 8), like)).sin()
    grey = torch.where(_per_item(draws.chance(0.3), like) > 0, veins, grey)
    chroma = fractal(draws, size, 3, like)
    strength = _per_item(draws.uniform(0.08, 0.22), like)
    tint = _per_item(draws.uniform(0.0, 0.08), like)
    return _per_item(_colours(draws, 0.3, 0.7), like) + strength * grey + tint * chroma


def _colours(draws: Draws, low: float, high: float, *shape: int) -> Tensor:
    """Draw colours (B, *shape, 3): a brightness plus a colour cast."""
    return draws.uniform(low, high, *shape, 1) + draws.uniform(-0.2, 0.2, *shape, 3)


def _turned(draws: Draws, size: int, like: Tensor, *, wobble: float) -> tuple[Tensor, Tensor]:
    """Return pixel coordinates (B, S, S) of a rotated and slightly bent grid."""
    grid = pixel_grid(size, size, like) + 0.5
    angle = draws.uniform(0, 2 * math.pi)
    cos, sin = (_per_item(t, like)[:, 0] for t in (angle.cos(), angle.sin()))
    bend = fractal(draws, size, 2, like, finest=16) * _per_item(draws.uniform(0, wobble), like)
    x = cos * grid[..., 0] - sin * grid[..., 1] + bend[:, 0]
    y = sin * grid[..., 0] + cos * grid[..., 1] + bend[:, 1]
    return x, y


def patterns(draws: Draws, size: int, device: torch.device) -> Tensor:
    """Return checkers, stripes or bricks in two colours, with random brightness per cell."""
    like = torch.zeros(1, device=device)
    x, y = _turned(draws, 2 * size, like, wobble=4)
    cell = _per_item(draws.log_uniform(12, 120), like)[:, 0]
    kind = _per_item(draws.integers(0, 3), like)[:, 0]
    row = (y / cell).floor()
    # Bricks have an aspect ratio of 2, and rows are shifted by half a brick
    along = torch.where(kind == 2, x / (2 * cell) + 0.5 * row.remainder(2), x / cell)
    column = torch.where(kind == 1, 0, along.floor())
    joint = ((y / cell - row) < 0.12) | ((along - along.floor()) < 0.06)
    is_second = torch.where(kind == 2, joint, (row + column).remainder(2) > 0)
    first, second = (_per_item(_colours(draws, 0.1, 0.9), like) for _ in range(2))
    key = draws.integers(0, 2**20, 1, 1).to(device)
    vary = _random_per_cell(row, column, key) * _per_item(draws.uniform(0, 0.35), like)
    image = torch.where(is_second[:, None], second, first + vary)
    return F.avg_pool2d(image, 2) + 0.05 * fractal(draws, size, 1, like)


def _random_per_cell(row: Tensor, column: Tensor, key: Tensor) -> Tensor:
    """Return random numbers in [-0.5, 0.5], constant per cell, (B, 1, S, S)."""
    return ((_cell_bits(row, column, key) & 0xFFFF) / 0xFFFF - 0.5)[:, None]


def _cell_bits(row: Tensor, column: Tensor, key: Tensor) -> Tensor:
    """Return a random int32 per cell."""
    bits = hash_bits(row.int() * 8191 + key.int())
    return hash_bits(bits + column.int())


def shapes(draws: Draws, size: int, device: torch.device) -> Tensor:
    """Return overlapping discs and convex polygons."""
    like = torch.zeros(1, device=device)
    grid = (pixel_grid(size, size, like) + 0.5) / size
    image = _per_item(_colours(draws, 0.1, 0.9), like).expand(-1, -1, size, size)
    centres = draws.uniform(-0.05, 1.05, SHAPES, 2).to(device, torch.float32)
    radii = draws.log_uniform(0.02, 0.3, SHAPES).sort(dim=1, descending=True).values
    radii = radii.to(device, torch.float32)
    corners = _edge_directions(draws).to(device, torch.float32)  # (B, SHAPES, 4, 2)
    is_disc = draws.chance(0.4, SHAPES).to(device)
    colours = _colours(draws, 0.05, 0.95, SHAPES).to(device, torch.float32)
    for i in range(SHAPES):
        x, y = (grid[..., axis] - centres[:, i, axis, None, None] for axis in range(2))
        out = torch.where(
            is_disc[:, i, None, None], (x * x + y * y).sqrt(), _polygon(x, y, corners[:, i])
        )
        cover = ((radii[:, i, None, None] - out) * size + 0.5).clamp_(0, 1)[:, None]
        image = torch.lerp(image, _per_item(colours[:, i], like), cover)
    grain = _per_item(draws.uniform(0.0, 0.1), like)
    return image + grain * fractal(draws, size, 1, like)


def _edge_directions(draws: Draws) -> Tensor:
    """Draw four normals per shape, in uneven directions around the circle."""
    quarter = torch.arange(4) * (math.pi / 2)
    angle = quarter + draws.uniform(-0.6, 0.6, SHAPES, 4) + draws.uniform(0, 3, SHAPES, 1)
    stretch = draws.uniform(0.7, 2.5, SHAPES, 4)
    return torch.stack([angle.cos() * stretch, angle.sin() * stretch], dim=-1)


def _polygon(x: Tensor, y: Tensor, edges: Tensor) -> Tensor:
    """Return the distance of points from the centre in the norm of a polygon."""
    out = None
    for i in range(4):
        way = edges[:, i, 0, None, None] * x + edges[:, i, 1, None, None] * y
        out = way if out is None else torch.maximum(out, way)
    assert out is not None
    return out


def strokes(draws: Draws, size: int, device: torch.device) -> Tensor:
    """Return lines of invented letters, each a random subset of nine strokes."""
    like = torch.zeros(1, device=device)
    x, y = _turned(draws, 2 * size, like, wobble=1.5)
    stroke = _per_item(draws.log_uniform(1.5, 9), like)[:, 0]
    x, y = x / stroke, y / stroke
    column, row = (x / PITCH[0]).floor(), (y / PITCH[1]).floor()
    key = draws.integers(0, 2**20, 1, 1).to(device)
    bits = _cell_bits(row, column, key)
    x, y = x - column * PITCH[0], y - row * PITCH[1]
    blank = (bits >> 20) & 7 == 0  # between words
    blank |= (_cell_bits(row, torch.zeros_like(row), key + 1) & 7) < 2  # between paragraphs
    ink = _letter(x.floor(), y.floor(), bits) & ~blank & (x < GLYPH[0]) & (y < GLYPH[1])
    paper = _colours(draws, 0.55, 0.95)
    dark = _colours(draws, 0.0, 0.35)
    swap = draws.chance(0.3, 1)
    light, dark = torch.where(swap, dark, paper), torch.where(swap, paper, dark)
    image = torch.where(ink[:, None], _per_item(dark, like), _per_item(light, like))
    return F.avg_pool2d(image, 2) + 0.04 * fractal(draws, size, 1, like)


def _letter(x: Tensor, y: Tensor, bits: Tensor) -> Tensor:
    """Return True for the inked points of the 5 x 7 raster of a letter."""
    upper = y < 3
    places = [
        *(y == 0, y == 3, y == 6),
        *((x == 0) & upper, (x == 0) & ~upper, (x == 4) & upper, (x == 4) & ~upper),
        *((x == 2) & upper, (x == 2) & ~upper),
    ]
    ink = torch.zeros_like(places[0])
    for i, place in enumerate(places):
        ink |= place & ((bits >> i) & 1 == 1)
    return ink


def gradients(draws: Draws, size: int, device: torch.device) -> Tensor:
    """Return colour gradients with faint noise, as of walls and skies."""
    like = torch.zeros(1, device=device)
    x, y = _turned(draws, size, like, wobble=size / 8)
    share = torch.sigmoid((x + y) / (0.35 * size))[:, None]
    first, second = (_per_item(_colours(draws, 0.25, 0.85), like) for _ in range(2))
    faint = _per_item(draws.uniform(0.005, 0.04), like)
    return torch.lerp(first, second, share) + faint * fractal(draws, size, 1, like)


Family = Callable[[Draws, int, torch.device], Tensor]
# Shapes and noise have most detail to match; one texture of eight is a gradient
FAMILIES: tuple[Family, ...] = (
    *(noise, shapes, patterns, strokes),
    *(shapes, noise, shapes, gradients),
)
