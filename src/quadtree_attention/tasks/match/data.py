# SPDX-License-Identifier: Apache-2.0
"""Pairs of images of synthetic scenes, rendered on the training device."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from quadtree_attention import synthetic
from quadtree_attention.checks import at_least, between
from quadtree_attention.synthetic import SceneOptions, Textures
from quadtree_attention.tasks.training.data import Batch, SyntheticData, options_of
from quadtree_attention.tasks.training.loader import seed_from

SHARED = ("image0", "image1", "flow0to1", "flow1to0", "visible0", "visible1")
MOTION = ("baseline", "rotation", "roll", "focal_ratio")  # options whose range a curriculum widens


class MatchData(SyntheticData):
    """Pairs of views of synthetic scenes and planes; only textures are read from files.

    Args:
        source: "synthetic".
        height: Height of the images in pixels.
        width: Width of the images in pixels.
        planes: Share of pairs of a single plane.
        scene: Options of the scenes (`SceneOptions`).
        plane: Options of the planes (`HomographyOptions`).
        start: Initial share of the motion between cameras; 1 is the full motion of `scene`.
        curriculum_epochs: Epochs in which the motion increases to that of `scene`.
        **common: Arguments of `SyntheticData`.
    """

    def __init__(
        self,
        source: Literal["synthetic"] = "synthetic",
        height: int = 480,
        width: int = 640,
        planes: float = 0.2,
        scene: dict[str, Any] | None = None,
        plane: dict[str, Any] | None = None,
        start: float = 0.3,
        curriculum_epochs: int = 0,
        **common: Any,
    ) -> None:
        super().__init__(size=(height, width), **common)
        between(0, 1, planes=planes, start=start)
        at_least(0, curriculum_epochs=curriculum_epochs)
        self.planes = planes
        self.scene = options_of(SceneOptions, "scene", scene)
        self.plane = options_of(synthetic.HomographyOptions, "plane", plane)
        self.start = start
        self.curriculum_epochs = curriculum_epochs

    def render(self, textures: Textures, indices: list[int], *, training: bool) -> Batch:
        """Render scenes, and in training also planes."""
        made = self.seeded(training=training)
        if not training:
            return vars(synthetic.scene_pairs(textures, indices, **made, options=self.scene))
        seeds = [seed_from(self.seed, index) % 1000 for index in indices]
        flat = [i for i, s in zip(indices, seeds, strict=True) if s < 1000 * self.planes]
        deep = [i for i in indices if i not in flat]
        parts: list[synthetic.Pair | synthetic.HomographyPair] = []
        if deep:
            options = self._harder(indices[0] // self.pairs)
            parts.append(synthetic.scene_pairs(textures, deep, **made, options=options))
        if flat:
            parts.append(synthetic.homography_pairs(textures, flat, **made, options=self.plane))
        return {name: torch.cat([getattr(part, name) for part in parts]) for name in SHARED}

    def _harder(self, epoch: int) -> SceneOptions:
        """Return the scene options of an epoch, with a share of the motion."""
        if epoch >= self.curriculum_epochs:
            return self.scene
        share = self.start + (1 - self.start) * epoch / self.curriculum_epochs
        easier = {}  # no motion is 0, or a ratio of 1
        for name in MOTION:
            span = getattr(self.scene, name)
            ratio = name == "focal_ratio"
            easier[name] = tuple(v**share if ratio else v * share for v in span)
        return replace(self.scene, **easier)


def grey(images: Tensor) -> Tensor:
    """Convert colours to luminance: (B, 3, H, W) -> (B, 1, H, W)."""
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)
