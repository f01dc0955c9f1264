# SPDX-License-Identifier: Apache-2.0
"""Photographs of a textured hilly ground from known cameras."""

from pathlib import Path

import numpy as np
from PIL import Image

from quadtree_attention.images import Array

HEIGHT = 0.6  # of the hills; cameras are at 4


def texture(size: int = 1024, seed: int = 0) -> Array:
    """(size, size, 3), noise of several scales that repeats at its edges."""
    random = np.random.default_rng(seed)
    total = np.zeros((size, size, 3))
    for level in range(2, 9):
        coarse = random.normal(size=(2**level, 2**level, 3))
        tiled = np.kron(coarse, np.ones((size // 2**level, size // 2**level, 1)))
        blur = np.hanning(2 * (size // 2**level) + 1)
        kernel = np.fft.fft(blur / blur.sum(), size)
        smooth = np.fft.ifft(np.fft.fft(tiled, axis=0) * kernel[:, None, None], axis=0).real
        smooth = np.fft.ifft(np.fft.fft(smooth, axis=1) * kernel[None, :, None], axis=1).real
        total += smooth * 0.75**level
    low, high = np.quantile(total, [0.01, 0.99])
    return ((total - low) / (high - low)).clip(0, 1) * 255


def ground(x: Array, y: Array) -> Array:
    return HEIGHT * np.sin(1.3 * x) * np.cos(1.1 * y + 0.5)


def pose(angle: float, tilt: float = 0.35, turn: float = 0.0) -> Array:
    """World to camera (3, 4), of a camera at a distance of 4 that looks at the origin."""
    direction = np.array([np.sin(angle) * np.sin(tilt), np.cos(angle) * np.sin(tilt), np.cos(tilt)])
    forward = -direction
    right = np.cross(forward, [np.sin(turn), np.cos(turn), 0.0])
    right /= np.linalg.norm(right)
    rotation = np.stack([right, np.cross(forward, right), forward])
    return np.column_stack([rotation, -rotation @ (4 * direction)])


def photograph(motion: Array, size: tuple[int, int], focal: float, surface: Array) -> Image.Image:
    """What a camera with its principal point in the middle sees."""
    width, height = size
    u, v = np.meshgrid(np.arange(width), np.arange(height))
    rays = np.stack([(u + 0.5 - width / 2) / focal, (v + 0.5 - height / 2) / focal,
                     np.ones(u.shape)], axis=-1)  # fmt: skip
    rotation, shift = motion[:, :3], motion[:, 3]
    rays, centre = rays @ rotation, -rotation.T @ shift
    far = (HEIGHT - centre[2]) / rays[..., 2]
    for _ in range(60):  # towards the ground, by a share of the height above it
        x, y, z = (centre + far[..., None] * rays).transpose(2, 0, 1)
        far += 0.5 * (z - ground(x, y)) / np.abs(rays[..., 2])
    x, y, _ = (centre + far[..., None] * rays).transpose(2, 0, 1)
    scale = len(surface) / 6  # texels per unit
    row, column = (y * scale) % len(surface), (x * scale) % len(surface)
    r, c = row.astype(int), column.astype(int)
    below, beside = (r + 1) % len(surface), (c + 1) % len(surface)
    a, b = (row - r)[..., None], (column - c)[..., None]
    pixels = (1 - a) * ((1 - b) * surface[r, c] + b * surface[r, beside])
    pixels += a * ((1 - b) * surface[below, c] + b * surface[below, beside])
    return Image.fromarray(pixels.round().astype(np.uint8))


def write_photographs(
    folder: Path,
    count: int = 4,
    *,
    size: tuple[int, int] = (256, 192),
    focal: float = 260.0,
    arc: float = 1.2,
) -> dict[str, Array]:
    """Photographs along an arc above the ground; their poses, world to camera, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    surface = texture()
    poses = {}
    for i, angle in enumerate(np.linspace(-arc / 2, arc / 2, count)):
        name = f"{i:02d}.png"
        poses[name] = pose(angle)
        photograph(poses[name], size, focal, surface).save(folder / name)
    return poses
