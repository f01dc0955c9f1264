# SPDX-License-Identifier: Apache-2.0
"""Pairs of images of synthetic scenes, rendered on the device that trains."""

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
MOTION = ("baseline", "rotation", "roll", "focal_ratio")  # what a curriculum makes harder


class MatchData(SyntheticData):
    """Synthetic scenes seen by two cameras, and planes; nothing is read but textures.

    Args:
        source: "synthetic".
        height: Of the images.
        width: Of the images.
        planes: Share of pairs that show one plane only.
        scene: Options of the scenes (`SceneOptions`).
        plane: Options of the planes (`HomographyOptions`).
        start: Share of the motion between cameras that training begins with; 1 is all.
        curriculum_epochs: Epochs in which the motion grows to what `scene` says.
        **common: As for `SyntheticData`.
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
        """Scenes, and some planes in training."""
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
        """Scenes with a share of the motion that grows with the epochs."""
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
    """(B, 3, H, W) -> (B, 1, H, W), as eyes weigh colours."""
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)
