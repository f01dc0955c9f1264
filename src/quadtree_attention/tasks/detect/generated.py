# SPDX-License-Identifier: Apache-2.0
"""Coloured shapes on noise: objects with boxes and masks that need no files."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from quadtree_attention.images import Array
from quadtree_attention.tasks.contract import Source
from quadtree_attention.tasks.detect.readers import Annotation, Box, Truth
from quadtree_attention.tasks.detect.rle import encode_mask

CLASSES = ["disc", "square", "triangle"]
MOST = 3  # maximum number of shapes in an image
TRIES = 20  # attempts to place a shape


class GeneratedShapes(Source[Truth]):
    """Images of discs, squares and triangles that do not overlap, determined by a seed.

    Args:
        count: Number of images.
        size: Longer side in pixels; the shorter side is three quarters of it.
        seed: Seed of the images.
    """

    def __init__(self, count: int, size: int = 128, *, seed: int = 0) -> None:
        self.names = [f"shapes {seed}/{index}" for index in range(count)]
        self.width, self.height = size, max(1, size * 3 // 4)
        self.seed = seed
        self.classes = list(CLASSES)
        self._last: tuple[int, Image.Image, Truth] | None = None

    def identity(self, index: int) -> list[Any]:
        return [self.seed, index, self.width, self.height]

    def images(self, index: int) -> tuple[Image.Image]:
        return (self._made(index)[0],)

    def truth(self, index: int) -> Truth:
        return self._made(index)[1]

    def _made(self, index: int) -> tuple[Image.Image, Truth]:
        """Return an image and its objects; the last one is cached."""
        if self._last is None or self._last[0] != index:
            self._last = (index, *self._make(index))
        return self._last[1:]

    def _make(self, index: int) -> tuple[Image.Image, Truth]:
        rng = np.random.default_rng((self.seed, index))
        pixels = rng.integers(60, 140, (self.height, self.width, 3), dtype=np.uint8)
        found: list[Annotation] = []
        for number in range(1, int(rng.integers(1, MOST + 1)) + 1):
            if (place := self._place(rng, [a.box for a in found])) is None:
                continue
            label = int(rng.integers(1, len(CLASSES) + 1))
            mask = self._shape(label, *place)
            # Red, green or blue dominates by class, so that a network learns them within a minute
            colour = np.where(np.arange(3) == label - 1, 225, 40) + rng.integers(-30, 31, 3)
            pixels[mask] = colour.astype(np.uint8)
            rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
            x0, y0 = float(columns[0]), float(rows[0])
            x1, y1 = float(columns[-1] + 1), float(rows[-1] + 1)
            box, given = (x0, y0, x1, y1), (x0, y0, x1 - x0, y1 - y0)
            area, encoded = float(mask.sum()), encode_mask(mask)
            found.append(Annotation(number, label, box, given, area, False, encoded))
        path = Path(f"{self.name(index)}.png")
        truth = Truth(index, path, self.width, self.height, tuple(found))
        return Image.fromarray(pixels), truth

    def _place(
        self, rng: np.random.Generator, boxes: list[Box]
    ) -> tuple[float, float, float] | None:
        """Centre and radius of a shape that overlaps no other one; None if none was found."""
        side = min(self.width, self.height)
        for _ in range(TRIES):
            radius = rng.uniform(0.15, 0.28) * side
            x = rng.uniform(radius + 1, self.width - radius - 1)
            y = rng.uniform(radius + 1, self.height - radius - 1)
            if all(
                x + radius < x0 or x - radius > x1 or y + radius < y0 or y - radius > y1
                for x0, y0, x1, y1 in boxes
            ):
                return x, y, radius
        return None

    def _shape(self, label: int, x: float, y: float, radius: float) -> Array:
        canvas = Image.new("L", (self.width, self.height))
        pen = ImageDraw.Draw(canvas)
        around = [x - radius, y - radius, x + radius, y + radius]
        if CLASSES[label - 1] == "disc":
            pen.ellipse(around, fill=255)
        elif CLASSES[label - 1] == "square":
            pen.rectangle(around, fill=255)
        else:
            turns = (math.pi * (2 * i / 3 - 0.5) for i in range(3))
            corners = [(x + radius * math.cos(a), y + radius * math.sin(a)) for a in turns]
            pen.polygon(corners, fill=255)
        return np.array(canvas) > 0
