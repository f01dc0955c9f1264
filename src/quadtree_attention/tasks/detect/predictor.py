# SPDX-License-Identifier: Apache-2.0
"""Object detection with a trained detector.

Example:
    >>> import numpy as np
    >>> from quadtree_attention import models
    >>> name, options = "retinanet_test_quadtree", {"num_classes": 2, "min_size": 64}
    >>> card = {"model": name, "kwargs": options, "task": "detect", "classes": ["cat", "dog"]}
    >>> found = Detector(models.create(name, **options), card)(np.zeros((70, 45, 3)))
    >>> found.boxes.shape == (len(found), 4)
    True
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor

from quadtree_attention import checks
from quadtree_attention.images import ImageLike, to_image
from quadtree_attention.tasks.contract import Prepared
from quadtree_attention.tasks.detect import TASK
from quadtree_attention.tasks.detect.result import Detections
from quadtree_attention.tasks.detect.rle import encode_mask
from quadtree_attention.tasks.predictor import Predictor
from quadtree_attention.tasks.readers import class_names

MASK_THRESHOLD = 0.5  # minimum probability of a pixel of an object


class Preprocess:
    """Conversion of images to bytes (3, H, W); the network resizes images of any sizes."""

    def __call__(self, image: ImageLike) -> Prepared:
        given = to_image(image)
        return Prepared((given,), (pil_to_tensor(given),), key=None)


class Detector(Predictor[Detections]):
    """Predictor of objects in images of any size.

    Args:
        network: The detector.
        card: Its card. If the card has no class names, names are numbers.
        size: Longer side of the network's input in pixels; None: as trained.
        threshold: Minimum score of a detection, 0 to 1. The network has its own minimum, usually
            0.05; lower values have no effect.
        shorter_side: Shorter side of the network's input in pixels, with a longer side of at most
            `size`; without `size`, the limit of training is scaled by the same factor.
        **common: Arguments of `Predictor`.
    """

    task = TASK
    scored_with: ClassVar = {"threshold": 0.0}

    def __init__(
        self,
        network: nn.Module,
        card: dict[str, Any],
        *,
        size: int | None = None,
        threshold: float = 0.5,
        shorter_side: int | None = None,
        **common: Any,
    ) -> None:
        checks.count(1, size=size, shorter_side=shorter_side)
        checks.between(0, 1, threshold=threshold)
        common |= {"size": size, "threshold": threshold, "shorter_side": shorter_side}
        super().__init__(network, card, **common)
        self.names = class_names(card, card["kwargs"]["num_classes"], self.path, first=1)
        self.threshold = threshold
        self.preprocess = Preprocess()
        transform = cast(Any, network).transform
        shorter, longer = transform.min_size[-1], transform.max_size
        if size is not None:
            shorter, longer = shorter_side or size, size
        elif shorter_side is not None:
            shorter, longer = shorter_side, round(longer * shorter_side / shorter)
        self.sides = int(shorter), int(longer)

    def forward(self, batch: Sequence[Prepared]) -> list[dict[str, Tensor]]:
        images = [item.inputs[0].to(self.device).float() / 255 for item in batch]
        found = self.network(images, score_threshold=self.threshold, sides=self.sides)
        return [{name: value.cpu() for name, value in one.items()} for one in found]

    def finish(self, raw: Mapping[str, Tensor], item: Prepared) -> Detections:
        size = item.images[0].size
        scale = min(self.sides[0] / min(size), self.sides[1] / max(size))  # as in the network
        width, height = (max(1, int(side * scale)) for side in size)
        return replace(detections(raw, self.names, self.threshold), seen=((width, height),))


def detections(
    answer: Mapping[str, Tensor], names: Sequence[str], threshold: float = 0.0
) -> Detections:
    """Return the detections of one image with scores above the threshold, best first."""
    answer = {name: value.cpu() for name, value in answer.items()}
    order = answer["scores"].argsort(descending=True, stable=True)
    order = order[answer["scores"][order] >= threshold]
    labels = answer["labels"][order]
    segmentations = None
    if "masks" in answer:  # (N, 1, H, W), probabilities
        masks = (answer["masks"][order, 0] > MASK_THRESHOLD).numpy()
        segmentations = tuple(encode_mask(mask) for mask in masks)
    return Detections(
        boxes=answer["boxes"][order].float().numpy(),
        labels=labels.numpy(),
        names=tuple(names[label - 1] for label in labels.tolist()),
        scores=answer["scores"][order].float().numpy(),
        segmentations=segmentations,
    )
