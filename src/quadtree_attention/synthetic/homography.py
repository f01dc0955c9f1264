# SPDX-License-Identifier: Apache-2.0
"""Pairs of views of one textured plane, with the homography between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quadtree_attention.synthetic.cameras import BEHIND, inside, pixel_grid
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.fused import apart, fused, send
from quadtree_attention.synthetic.options import HomographyOptions, check_size
from quadtree_attention.synthetic.photometric import distort
from quadtree_attention.synthetic.render import PATTERNS
from quadtree_attention.synthetic.textures import Bank, Textures

ATTEMPTS = 8  # candidate homographies per pair
PROBE = 12  # points along each side at which the overlap is measured
HORIZON = 1e-3  # minimum denominator of points in front of the camera


@dataclass(frozen=True)
class HomographyPair:
    """Two views of a plane. Pixel centres are integers, points are (x, y)."""

    image0: Tensor  # (B, 3, H0, W0) between 0 and 1
    image1: Tensor  # (B, 3, H1, W1)
    H_0to1: Tensor  # (B, 3, 3), maps pixels of view 0 to view 1
    flow0to1: Tensor  # (B, H0, W0, 2) pixels; `BEHIND` beyond the horizon
    flow1to0: Tensor  # (B, H1, W1, 2)
    visible0: Tensor  # (B, H0, W0) bool: inside view 1
    visible1: Tensor  # (B, H1, W1)


def homography_pairs(
    textures: Textures,
    indices: Sequence[int],
    *,
    size: tuple[int, int] = (480, 640),
    size1: tuple[int, int] | None = None,
    seed: int = 0,
    options: HomographyOptions | None = None,
) -> HomographyPair:
    """Render pairs of views of one textured plane each, on the device of the textures.

    Args:
        textures: Textures of the planes.
        indices: Indices of the pairs of the batch.
        size: (height, width) of the first view.
        size1: (height, width) of the second view; None: as the first.
        seed: Seed of the data set.
        options: Ranges of the homographies and photometric distortion.

    Raises:
        OptionError: A size, seed or index is not accepted.

    Example:
        >>> from quadtree_attention.synthetic import ProceduralTextures, homography_pairs
        >>> pair = homography_pairs(ProceduralTextures(8, size=32), range(2), size=(24, 33))
        >>> pair.image0.shape, pair.H_0to1.shape
        (torch.Size([2, 3, 24, 33]), torch.Size([2, 3, 3]))
    """
    options = HomographyOptions() if options is None else options
    size1 = size if size1 is None else size1
    check_size("size", size)
    check_size("size1", size1)
    with apart(textures.device):
        draws = Draws(seed, indices, stream=2)
        forth = _homography(draws, size, size1, options)
        back = torch.linalg.inv(forth)
        texture = draws.integers(0, len(textures))
        to_texels = _to_texels(draws, size, textures.size, options.texture_scale)
        numbers = [_pack(to_texels, forth, texture), _pack(to_texels @ back, back, texture)]
        bank = textures.bank
        views = [
            _view(packed, bank.texels, bank.levels, bank.size, *sizes, options.samples)
            for packed, sizes in zip(
                send(torch.stack(numbers).float(), textures.device),
                ((size, size1), (size1, size)),
                strict=True,
            )
        ]
        image0, image1 = (
            distort(image, indices, seed=seed, view=4 + view, strength=options.photometric)
            for view, (image, *_) in enumerate(views)
        )
        return HomographyPair(
            image0=image0,
            image1=image1,
            H_0to1=send(forth.float(), textures.device),
            flow0to1=views[0][1],
            flow1to0=views[1][1],
            visible0=views[0][2],
            visible1=views[1][2],
        )


def apply_homography(H: Tensor, points: Tensor) -> Tensor:
    """Map points (..., 2) by homographies (B, 3, 3) to (B, ..., 2); `BEHIND` beyond the horizon."""
    x, y, w = _homogeneous(H, points)
    in_front = w > HORIZON
    w = w.where(in_front, 1)
    return torch.stack([x / w, y / w], dim=-1).where(in_front[..., None], BEHIND)


def _homogeneous(H: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Map to homogeneous points, by sums: a matrix product may run in a lower precision."""
    axes = (1,) * (points.ndim - 1)
    rows = (H[:, i].reshape(-1, 3, *axes) for i in range(3))
    x, y, w = (row[:, 0] * points[..., 0] + row[:, 1] * points[..., 1] + row[:, 2] for row in rows)
    return x, y, w


def _homography(
    draws: Draws, size: tuple[int, int], size1: tuple[int, int], options: HomographyOptions
) -> Tensor:
    """Return the first candidate with enough overlap (B, 3, 3), with w = 1 in mid-view."""
    to_pixels = torch.linalg.inv(_pixels_to_unit(size1))
    tries = to_pixels @ _candidates(draws, options) @ _pixels_to_unit(size)
    flat = tries.flatten(0, 1)
    shared = torch.minimum(
        _overlap(flat, size, size1), _overlap(torch.linalg.inv(flat), size1, size)
    )
    low, high = options.overlap
    misfit = (low - shared).clamp(min=0) * 10 + (shared - high).clamp(min=0)
    best = misfit.reshape(-1, ATTEMPTS).argmin(dim=1)
    return tries[torch.arange(len(draws)), best]


def _candidates(draws: Draws, options: HomographyOptions) -> Tensor:
    """Draw (B, ATTEMPTS, 3, 3) in units of half the diagonal; later candidates move less."""
    motion = torch.linspace(2, 0.02, ATTEMPTS, dtype=torch.float64).clamp(max=1)
    sign = torch.where(draws.chance(0.5, ATTEMPTS), -1.0, 1.0)
    angle = torch.deg2rad(draws.uniform(*options.rotation, ATTEMPTS)) * sign * motion
    scale = draws.log_uniform(*options.scale, ATTEMPTS) ** motion
    shift, tilt = (draws.uniform(0, 2 * math.pi, ATTEMPTS) for _ in range(2))
    way = draws.uniform(*options.translation, ATTEMPTS) * motion
    perspective = draws.uniform(*options.perspective, ATTEMPTS) * motion
    cos, sin = angle.cos() * scale, angle.sin() * scale
    one = torch.ones_like(cos)
    entries = [
        *(cos, -sin, way * shift.cos()),
        *(sin, cos, way * shift.sin()),
        *(perspective * tilt.cos(), perspective * tilt.sin(), one),
    ]
    return torch.stack(entries, dim=-1).unflatten(-1, (3, 3))


def _pixels_to_unit(size: tuple[int, int]) -> Tensor:
    height, width = size
    scale = 2 / math.hypot(height, width)
    x, y = -(width - 1) / 2 * scale, -(height - 1) / 2 * scale
    return torch.tensor([[scale, 0, x], [0, scale, y], [0, 0, 1]], dtype=torch.float64)


def _overlap(H: Tensor, size: tuple[int, int], other: tuple[int, int]) -> Tensor:
    """Return the share of a view that is inside the other view, (N,)."""
    scale = torch.tensor([size[1] - 1, size[0] - 1]) / (PROBE - 1)
    points = pixel_grid(PROBE, PROBE, like=H) * scale
    return inside(apply_homography(H, points), other).flatten(1).double().mean(dim=1)


def _to_texels(
    draws: Draws, size: tuple[int, int], texels: int, scale: tuple[float, float]
) -> Tensor:
    """Map pixels of view 0 to texels, (B, 3, 3); the middle of the view is inside the texture."""
    density = 1 / draws.log_uniform(*scale)
    where = draws.uniform(0.3, 0.7, 2) * texels
    zero, one = torch.zeros_like(density), torch.ones_like(density)
    x = where[:, 0] - density * (size[1] - 1) / 2
    y = where[:, 1] - density * (size[0] - 1) / 2
    entries = [density, zero, x, zero, density, y, zero, zero, one]
    return torch.stack(entries, dim=-1).unflatten(-1, (3, 3))


def _pack(to_texels: Tensor, to_other: Tensor, texture: Tensor) -> Tensor:
    """Concatenate all parameters of a view, (B, 20), for a single copy to the device."""
    # Determinant of the matrix rounded to float32, on the CPU: on a GPU it would synchronise
    determinant = torch.linalg.det(to_texels.float().double()).abs()
    parts = [to_texels.flatten(1), to_other.flatten(1), determinant[:, None], texture[:, None]]
    return torch.cat(parts, dim=1)


@fused(batched=1)
def _view(
    packed: Tensor,
    texels: Tensor,
    levels: Tensor,
    texture_size: int,
    size: tuple[int, int],
    other_size: tuple[int, int],
    samples: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the image, the flow to the other view, and the mask of points inside it."""
    bank = Bank(texels, levels, texture_size)
    image = _render(bank, packed, size, samples)
    grid = pixel_grid(*size, like=packed)
    target = apply_homography(packed[:, 9:18].unflatten(1, (3, 3)), grid)
    return image, target - grid, inside(target, other_size)


def _render(bank: Bank, packed: Tensor, size: tuple[int, int], samples: int) -> Tensor:
    """Render the plane, (B, 3, H, W)."""
    batch = len(packed)
    H = packed[:, :9].unflatten(1, (3, 3))  # from pixels to texels
    determinant, texture = packed[:, 18, None, None], packed[:, 19, None, None].long()
    index = texture.expand(batch, *size).flatten()
    grid = pixel_grid(*size, like=H)
    total: Tensor | None = None
    for dx, dy in PATTERNS[samples]:
        x, y, w = _homogeneous(H, torch.stack([grid[..., 0] + dx, grid[..., 1] + dy], dim=-1))
        w = w.clamp(min=HORIZON)  # beyond the horizon: the mean colour of the texture
        area = determinant / w**3 / samples  # texels per pixel
        colour = bank.look_up(index, (x / w).flatten(), (y / w).flatten(), area.sqrt().flatten())
        colour = colour.unflatten(1, (batch, *size))
        total = colour if total is None else total.add_(colour)
    assert total is not None
    return (total / samples).transpose(0, 1).contiguous()
