# SPDX-License-Identifier: Apache-2.0
"""Refinement and extension of tracks by the pixels of the photographs.

The centre of a coarse cell may be on a plain wall. Each track is therefore moved to the corner with
the strongest texture in its cell. The patch around it is aligned with every photograph in which
matches determine its approximate position, by least-squares matching (Gruen 1985) with an affine
map and a change of brightness and contrast, in inverse compositional Gauss-Newton steps (Baker and
Matthews 2004). A point is accepted by its correlation. Matches of neighbouring cells determine
positions, too, so that tracks become longer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from quadtree_attention.images import Array, to_image
from quadtree_attention.sfm.tracks import PairPoints, Tracks, assembled

CORRELATION = 0.7  # minimum, of two aligned patches
TEXTURE = 4.0  # minimum mean square gradient in any direction, in grey levels (0 to 255) per pixel
CONTRAST = 2.0  # minimum standard deviation of a patch, in grey levels
MOVED = 4.0  # maximum shift of a point by the alignment, in input pixels
RADIUS = 7  # samples from the centre of a patch to its edge
WIDTH = 5.0  # standard deviation of the weights in a patch, in samples
STEPS = 8  # of the alignment
DAMPING = 0.02  # of the affine map, and a tenth of it of the position
SHRUNK = 2  # longer side of the image used, relative to the network's input
CELL = 8.0  # distance of coarse cells, in input pixels
NEIGHBOURS, REACH = 16, 3 * CELL  # matches of an affine map, and their maximum distance
MOST_STRETCH, MOST_ZOOM = 3.0, 4.0  # of an affine map
SPACING = 2.0  # distance in input pixels below which refined tracks are merged
LEVELS, SMALLEST = 5, 32  # of a pyramid, and the sides of its smallest level
AT_ONCE = 2048  # patches
PHOTOGRAPHS = 64  # photographs whose pixels are cached, at most 7 MB each

_TICKS = torch.arange(-RADIUS, RADIUS + 1, dtype=torch.float64)
_GRID = torch.cartesian_prod(_TICKS, _TICKS).flip(1)  # (P, 2), x before y
_WEIGHTS = torch.exp(-_GRID.square().sum(1) / (2 * WIDTH**2)).float()
_WEIGHTS /= _WEIGHTS.sum()


@dataclass(frozen=True, eq=False)
class Pixels:
    """A photograph in grey, at several sizes.

    Args:
        levels: Each half as large as the one before, (1, 1, H, W).
        scale: Pixels of the photograph per pixel of the first level, along x and y (2,).
        unit: Pixels of the first level per pixel of the network's input.
    """

    levels: Sequence[Tensor]
    scale: Array
    unit: float

    @classmethod
    def of(cls, path: str, scale: float) -> "Pixels":
        """Read a photograph with `scale` pixels per pixel of the network's input."""
        image = to_image(path).convert("L")
        full = image.size
        factor = min(1.0, SHRUNK / scale)
        if factor < 1:
            width, height = (round(side * factor) for side in full)
            image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
        levels = [torch.from_numpy(np.array(image, np.float32))[None, None]]
        kernel = torch.tensor([1, 4, 6, 4, 1]) / 16
        while len(levels) < LEVELS and min(levels[-1].shape[2:]) >= 2 * SMALLEST:
            padded = F.pad(levels[-1], (2, 2, 2, 2), mode="replicate")
            across = F.conv2d(padded, kernel[None, None, None], stride=(1, 2))
            levels.append(F.conv2d(across, kernel[None, None, :, None], stride=(2, 1)))
        shrink = np.divide(full, image.size)
        return cls(levels, shrink, scale / float(shrink.mean()))

    @property
    def size(self) -> Tensor:
        """Width and height of the first level."""
        return torch.tensor(self.levels[0].shape[:1:-1], dtype=torch.float64)

    def inner(self, points: Array) -> Tensor:
        """Map points (N, 2) of the photograph to pixels of the first level."""
        return torch.from_numpy((points + 0.5) / self.scale - 0.5)

    def outer(self, points: Tensor) -> Array:
        """Map points (N, 2) of the first level to pixels of the photograph."""
        return (points.numpy() + 0.5) * self.scale - 0.5

    def sampled(self, level: int, points: Tensor) -> Tensor:
        """Sample grey values (N, P) at points (N, P, 2) of the first level."""
        image = self.levels[level]
        last = torch.tensor(image.shape[:1:-1], dtype=torch.float64) - 1
        places = (points / 2**level * 2 / last - 1).float()[None]
        return F.grid_sample(
            image, places, mode="bicubic", padding_mode="border", align_corners=True
        )[0, 0]

    def corners(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pixels (N, 2) with the strongest texture near points, and the texture (N,)."""
        reach = round(CELL / 2 * self.unit)
        texture = F.pad(_texture(self.levels[0]), (reach,) * 4)[0, 0]
        centres = points.round().long().clamp(min=0)
        centres = torch.minimum(centres, self.size.long() - 1)
        ticks = torch.arange(2 * reach + 1)
        rows = (centres[:, 1, None] + ticks)[:, :, None]  # padded by `reach`
        columns = (centres[:, 0, None] + ticks)[:, None]
        strongest, place = texture[rows, columns].flatten(1).max(dim=1)
        moved = torch.stack([place % len(ticks), place // len(ticks)], dim=1) - reach
        return (centres + moved).double(), strongest


def _texture(image: Tensor) -> Tensor:
    """Smaller eigenvalue of the structure tensor of an image (1, 1, H, W)."""
    padded = F.pad(image, (1, 1, 1, 1), mode="replicate")
    slope = torch.tensor([-0.5, 0, 0.5])
    smooth = torch.tensor([0.25, 0.5, 0.25])
    across = torch.outer(smooth, slope)
    gx, gy = F.conv2d(padded, torch.stack([across, across.T])[:, None])[0]
    ticks = torch.arange(-7, 8)
    kernel = torch.exp(-ticks.square() / (2 * (WIDTH / 2) ** 2))
    kernel = kernel / kernel.sum()
    products = F.pad(torch.stack([gx * gx, gx * gy, gy * gy])[:, None], (7,) * 4, mode="replicate")
    products = F.conv2d(products, kernel[None, None, None])
    xx, xy, yy = F.conv2d(products, kernel[None, None, :, None])
    return ((xx + yy) / 2 - ((xx - yy).square() / 4 + xy.square()).sqrt())[None]


def refine_tracks(
    tracks: Tracks, pairs: Sequence[PairPoints], paths: Sequence[str], scales: Sequence[float]
) -> Tracks:
    """Move tracks to corners, and verify and extend them by the pixels of the photographs.

    Args:
        tracks: Tracks whose anchors are centres of cells.
        pairs: The verified matches of the tracks.
        paths: Files of the photographs.
        scales: Pixels of each photograph per pixel of the network's input.
    """

    @lru_cache(PHOTOGRAPHS)
    def pixels(image: int) -> Pixels:
        return Pixels.of(paths[image], scales[image])

    matches: dict[int, dict[int, tuple[Array, Array]]] = {}
    for pair in pairs:
        points = pair.points0, pair.points1
        matches.setdefault(pair.image0, {})[pair.image1] = points
        matches.setdefault(pair.image1, {})[pair.image0] = points[::-1]
    anchored = tracks.images[tracks.anchors]
    parts: list[tuple[Array, Array, Array, Array]] = []
    for image in sorted(matches):
        chosen = np.flatnonzero(anchored == image)
        if not len(chosen):
            continue
        source = pixels(image)
        corners, texture = source.corners(source.inner(tracks.points[tracks.anchors[chosen]]))
        strong = texture >= TEXTURE
        chosen, corners = chosen[strong.numpy()], corners[strong]
        count = len(chosen)
        parts.append((chosen, np.full(count, image), source.outer(corners), np.ones(count)))
        for other, points in sorted(matches[image].items()):
            target = pixels(other)
            found, rows, correlation = _found(source, target, corners, points)
            parts.append(
                (chosen[rows], np.full(len(rows), other), target.outer(found), correlation)
            )
    if not parts:
        return tracks
    track, images, places, weights = (np.concatenate(x) for x in zip(*parts, strict=True))
    return assembled(track, images, places, weights, [SPACING * scale for scale in scales])


def _found(
    source: Pixels, target: Pixels, corners: Tensor, matches: tuple[Array, Array]
) -> tuple[Tensor, Array, Array]:
    """Return points in another photograph, the indices of their corners, and their correlation."""
    points0, points1 = source.inner(matches[0]), target.inner(matches[1])
    expected, maps, near = local_maps(corners, points0, points1, REACH * source.unit)
    rows = near.nonzero()[:, 0]
    expected, maps = expected[rows], maps[rows]
    found, correlation = align(source, target, corners[rows], expected, maps)
    close = (found - expected).norm(dim=1) <= MOVED * target.unit
    good = close & (correlation >= CORRELATION)
    return found[good], rows[good].numpy(), correlation[good].double().numpy()


def local_maps(
    points: Tensor, matches0: Tensor, matches1: Tensor, reach: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate affine maps from nearby matches by robust weighted least squares.

    Args:
        points: (N, 2) of image 0.
        matches0: (M, 2) of image 0.
        matches1: (M, 2) of image 1.
        reach: Distance from which on matches have weight 0.

    Returns:
        The points in image 1 (N, 2), the linear parts of the maps (N, 2, 2), and a mask of points
        with enough nearby matches (N,).
    """
    count = min(NEIGHBOURS, len(matches0))
    far, nearest = torch.cdist(points, matches0).topk(count, largest=False)
    weights = torch.exp(-(far / (reach / 2)).square()) * (far < reach)
    beside = (matches0[nearest] - points[:, None]) / reach
    factors = torch.cat([beside, torch.ones_like(far)[..., None]], dim=2)  # (N, K, 3)
    there = matches1[nearest]
    robust = weights
    for _ in range(4):
        weighted = (factors * robust[..., None]).transpose(1, 2)
        normal = weighted @ factors + 1e-9 * torch.eye(3, dtype=torch.float64)
        solved = torch.linalg.solve(normal, weighted @ there)  # (N, 3, 2)
        off = (factors @ solved - there).norm(dim=2) / reach
        robust = weights / (1 + (off / 0.04).square())
    maps = solved[:, :2].transpose(1, 2) / reach
    stretch = torch.linalg.svdvals(maps.nan_to_num())
    good = (robust.sum(dim=1) > 1) & (torch.linalg.eigvalsh(normal)[:, 0] > 0.02)
    good &= (stretch[:, 0] < MOST_STRETCH * stretch[:, 1]) & (torch.linalg.det(maps) > 0)
    good &= (stretch[:, 0] < MOST_ZOOM) & (stretch[:, 1] > 1 / MOST_ZOOM)
    return solved[:, 2], maps, good


def align(
    source: Pixels, target: Pixels, points0: Tensor, points1: Tensor, maps: Tensor
) -> tuple[Tensor, Tensor]:
    """Align the patches around points of image 1 with those around points of image 0.

    Patches are sampled at the pixels of the coarser image.

    Args:
        source: Image 0.
        target: Image 1.
        points0: (N, 2) of image 0.
        points1: (N, 2) of image 1, where the alignment starts.
        maps: Linear parts of affine maps of image 0 to image 1 (N, 2, 2).

    Returns:
        The points of image 1 (N, 2) and the correlation (N,); -1 where a patch leaves its image or
        has no contrast.
    """
    zoom = torch.linalg.det(maps).sqrt()
    step = (1 / zoom).clamp(min=1)
    levels = [
        spacing.log2().round().long().clamp(0, len(image.levels) - 1)
        for spacing, image in ((step, source), (step * zoom, target))
    ]
    found, correlation = points1.clone(), torch.full((len(points1),), -1.0)
    both = torch.stack(levels, dim=1)
    for level0, level1 in both.unique(dim=0).tolist():
        rows = ((both[:, 0] == level0) & (both[:, 1] == level1)).nonzero()[:, 0]
        for part in rows.split(AT_ONCE):
            found[part], correlation[part] = _aligned(
                partial(source.sampled, level0),
                partial(target.sampled, level1),
                (source.size, target.size),
                points0[part],
                points1[part],
                maps[part] * step[part, None, None],
                step[part],
            )
    return found, correlation


def _aligned(
    sample0: Callable[[Tensor], Tensor],
    sample1: Callable[[Tensor], Tensor],
    sizes: tuple[Tensor, Tensor],
    points0: Tensor,
    points1: Tensor,
    maps: Tensor,
    step: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run `align` at one level of each image; `maps` map samples to image 1."""
    spread = step[:, None, None]

    def patch(x: float = 0, y: float = 0) -> Tensor:
        shift = torch.tensor([x, y], dtype=torch.float64)
        return sample0(points0[:, None] + spread * (_GRID + shift))

    template, contrast0 = _normalised(patch())
    scale = contrast0.clamp(min=CONTRAST)[:, None]
    gx = (patch(x=0.5) - patch(x=-0.5)) / scale
    gy = (patch(y=0.5) - patch(y=-0.5)) / scale
    u, v = (_GRID / RADIUS).float().T
    steepest = [gx, gy, gx * u, gx * v, gy * u, gy * v, torch.ones_like(gx), template]
    columns = torch.stack(steepest, dim=-1)  # (N, P, 8)
    weighted = (columns * _WEIGHTS[:, None]).transpose(1, 2)
    damping = torch.tensor([0.1, 0.1, 1, 1, 1, 1, 0, 0]) * DAMPING + 1e-6
    inverse = torch.linalg.inv((weighted @ columns + torch.diag(damping)).double())
    identity = torch.eye(2, dtype=torch.float64)
    for _ in range(STEPS):
        seen, _ = _normalised(sample1(points1[:, None] + _GRID @ maps.transpose(1, 2)))
        change = weighted @ (seen - template)[..., None]
        change = (inverse @ change.double())[..., 0]
        shift = change[:, :2]
        shift = shift / shift.norm(dim=1, keepdim=True).clamp(min=1)
        bend = identity + change[:, 2:6].unflatten(1, (2, 2)).clamp(-0.2, 0.2) / RADIUS
        maps = maps @ torch.linalg.inv(bend)
        points1 = points1 - (maps @ shift[..., None])[..., 0]
    seen, contrast1 = _normalised(sample1(points1[:, None] + _GRID @ maps.transpose(1, 2)))
    correlation = (seen * template * _WEIGHTS).sum(dim=1)
    reach1 = RADIUS * maps.abs().sum(dim=2)
    good = _inside(points0, (RADIUS * step)[:, None], sizes[0]) & _inside(points1, reach1, sizes[1])
    good &= torch.minimum(contrast0, contrast1) >= CONTRAST
    return points1, torch.where(good, correlation, -1.0)


def _normalised(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise patches (N, P) to mean 0 and deviation 1; also return the deviations (N,)."""
    centred = patches - (patches * _WEIGHTS).sum(dim=1, keepdim=True)
    deviation = (centred.square() * _WEIGHTS).sum(dim=1).sqrt()
    return centred / deviation.clamp(min=1e-3)[:, None], deviation


def _inside(points: Tensor, reach: Tensor, size: Tensor) -> Tensor:
    """Return True for points (N, 2) at least `reach` away from the edges of an image."""
    return ((points >= reach) & (points <= size - 1 - reach)).all(dim=1)
