# SPDX-License-Identifier: Apache-2.0
"""Coloured shapes on noise: objects with boxes and masks that need no files."""

import math

import numpy as np
import torch
from PIL import Image, ImageDraw

from quadtree_attention.tasks.detect.coco import Box, Problem, Target
from quadtree_attention.tasks.detect.masks import Array

CLASSES = ["disc", "square", "triangle"]
MOST = 3  # shapes in an image
TRIES = 20  # to find room for one


class GeneratedShapes:
    """Images of discs, squares and triangles that do not touch; the same for the same seed.

    Args:
        count: Images.
        size: Pixels of the longer side; the shorter one has three quarters of it.
        seed: Decides what is drawn.
        masks: Whether to give masks as well.
    """

    def __init__(self, count: int, size: int = 128, *, seed: int = 0, masks: bool = False) -> None:
        self.count = count
        self.width, self.height = size, max(1, size * 3 // 4)
        self.seed = seed
        self.masks = masks
        self.classes = list(CLASSES)
        self.problems: list[Problem] = []

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"shapes {self.seed}/{index}"

    def objects(self, index: int) -> int:
        return len(self.read(index)[1]["labels"])

    def read(self, index: int) -> tuple[Image.Image, Target]:
        rng = np.random.default_rng((self.seed, index))
        pixels = rng.integers(60, 140, (self.height, self.width, 3), dtype=np.uint8)
        boxes: list[Box] = []
        labels: list[int] = []
        masks: list[Array] = []
        for _ in range(int(rng.integers(1, MOST + 1))):
            if (place := self._place(rng, boxes)) is None:
                continue
            label = int(rng.integers(1, len(CLASSES) + 1))
            mask = self._shape(label, *place)
            pixels[mask] = _colour(rng, label)
            rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
            boxes.append((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
            labels.append(label)
            masks.append(mask)
        return Image.fromarray(pixels), self._target(boxes, labels, masks)

    def _place(
        self, rng: np.random.Generator, boxes: list[Box]
    ) -> tuple[float, float, float] | None:
        """Centre and radius of a shape apart from all others; None if there is no room."""
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

    def _target(self, boxes: list[Box], labels: list[int], masks: list[Array]) -> Target:
        areas = [float(mask.sum()) for mask in masks]
        target = {
            "boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "iscrowd": torch.zeros(len(labels), dtype=torch.int64),
            "area": torch.tensor(areas),
        }
        if self.masks:
            room = (0, self.height, self.width)
            stacked = np.stack(masks) if masks else np.zeros(room, dtype=bool)
            target["masks"] = torch.from_numpy(stacked)
        return target


def _colour(rng: np.random.Generator, label: int) -> Array:
    """Mostly red, green or blue, by the class, so that a model learns them within a minute."""
    colour = np.where(np.arange(3) == label - 1, 225, 40)
    return (colour + rng.integers(-30, 31, 3)).astype(np.uint8)
