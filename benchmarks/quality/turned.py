# SPDX-License-Identifier: Apache-2.0
"""Pairs of views of one photograph, turned over the whole circle and zoomed, with homographies."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from quadtree_attention.images import Array, to_image
from quadtree_attention.synthetic.photometric import distort

PAIRS, SEED = 24, 7
ZOOM = 3.5  # largest, of one view over the other
TILT = 0.15  # of the side of a window: how far perspective moves its corners
VIEW = 0.7  # longer side of a view over that of the photograph
CLEAREST = 2.5  # pixels of a view per pixel of the photograph, at most
TRIES = 200


def draw_pairs(
    large: Sequence[Path], small: Sequence[Path], folder: Path
) -> tuple[Path, list[str]]:
    """Writes the views of `PAIRS` pairs to a folder; the folder, and lines of a file of pairs.

    Two of three pairs are of large photographs, chosen in turns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(PAIRS):
        generator = np.random.default_rng([SEED, index])
        chosen = small[index * 17 % len(small)] if index % 3 == 2 else large[index * 7 % len(large)]
        photo = to_image(chosen).convert("RGB")
        views = _windows(generator, *photo.size)
        if generator.random() < 0.5:
            views = views[::-1]
        names = [f"{index:02d}_{view}.jpg" for view in range(2)]
        for view, (name, (to_photo, size)) in enumerate(zip(names, views, strict=True)):
            _render(photo, to_photo, size, index, view).save(folder / name, quality=95)
        matrix = np.linalg.inv(views[1][0]) @ views[0][0]
        numbers = " ".join(repr(float(x)) for x in np.ravel(matrix / matrix[2, 2]))
        lines.append(f"{names[0]} {names[1]} {numbers}")
    return folder, lines


def _windows(
    generator: np.random.Generator, width: int, height: int
) -> list[tuple[Array, tuple[int, int]]]:
    """Two views: the homography from its pixels to those of the photograph, and its size."""
    size = round(width * VIEW), round(height * VIEW)
    for attempt in range(TRIES):
        if attempt % 20 == 0:  # else tries would favour what fits more often
            zoom = ZOOM ** generator.uniform(0, 1)
            angle = generator.uniform(0, 2 * math.pi)
        wide = generator.uniform(0.6, 1) * 0.98 ** (attempt % 20)
        near = wide / zoom
        if near * width < size[0] / CLEAREST:
            continue
        centre = [
            generator.uniform(wide * side / 2, side - wide * side / 2) for side in (width, height)
        ]
        first = _window(np.array(centre), wide, 0, width, height)
        shift = generator.uniform(-0.35, 0.35, 2) * wide * np.array([width, height])
        second = _window(np.array(centre) + shift, near, angle, width, height)
        second += generator.uniform(-TILT, TILT, (4, 2)) * near * min(width, height)
        inside = (second >= 0).all() and (second <= np.array([width, height]) - 1).all()
        if inside:
            break
    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * (np.array(size) - 1)
    return [(_from_corners(corners, window), size) for window in (first, second)]


def _window(centre: Array, share: float, angle: float, width: int, height: int) -> Array:
    """Corners of a window of a share of the sides of the photograph, in its pixels."""
    x, y = share * width / 2, share * height / 2
    corners = np.array([[-x, -y], [x, -y], [x, y], [-x, y]])
    cos, sin = math.cos(angle), math.sin(angle)
    return corners @ np.array([[cos, sin], [-sin, cos]]) + centre


def _from_corners(corners: Array, targets: Array) -> Array:
    """The homography that takes four points to four others."""
    rows = []
    for (x, y), (u, v) in zip(corners, targets, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
    entries = np.linalg.solve(np.array(rows, float), targets.reshape(8))
    return np.append(entries, 1).reshape(3, 3)


def _render(
    photo: Image.Image, to_photo: Array, size: tuple[int, int], index: int, view: int
) -> Image.Image:
    """A view with four samples per pixel and side, as another camera would have taken it."""
    finer = 3
    half = np.array(
        [[1 / finer, 0, 0.5 / finer - 0.5], [0, 1 / finer, 0.5 / finer - 0.5], [0, 0, 1]]
    )
    edge = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])  # PIL counts from the edge of a pixel
    matrix = edge @ to_photo @ half @ np.linalg.inv(edge)
    entries = (matrix / matrix[2, 2]).reshape(9)[:8].tolist()
    large = photo.transform(
        (size[0] * finer, size[1] * finer),
        Image.Transform.PERSPECTIVE,
        entries,
        Image.Resampling.BICUBIC,
    )
    pixels = np.asarray(large.reduce(finer), np.float32) / 255
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    image = distort(image, [index], seed=SEED, view=view)
    return Image.fromarray((image[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
