# SPDX-License-Identifier: Apache-2.0
"""Image classification with a trained classifier.

Example:
    >>> import numpy as np
    >>> from quadtree_attention import models
    >>> card = {"model": "test_quadtree", "kwargs": {"num_classes": 2}, "classes": ["cat", "dog"]}
    >>> classifier = Classifier(models.create("test_quadtree", num_classes=2), card)
    >>> sorted(classifier(np.zeros((70, 45, 3))).names)
    ['cat', 'dog']
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.errors import CheckpointError
from quadtree_attention.images import ImageLike, to_image
from quadtree_attention.tasks.classify import TASK
from quadtree_attention.tasks.classify.result import Classification
from quadtree_attention.tasks.contract import Prepared
from quadtree_attention.tasks.predictor import Predictor
from quadtree_attention.tasks.readers import class_names

with checks.needs("models", "classifying"):
    from timm.data import create_transform
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

MEAN, STD = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
NORM: dict[str, Any] = {"mean": MEAN, "std": STD, "interpolation": "bicubic"}


@dataclass(frozen=True)
class Preprocess:
    """Resized centre crop of an image, as in validation.

    Attributes:
        size: Side of the crop in pixels.
        crop: Side of the crop, as a share of the shorter side of the image.
    """

    size: int
    crop: float

    def __call__(self, image: ImageLike) -> Prepared:
        given = to_image(image)
        return Prepared((given,), (self.transform(given),), key=self.size)

    @cached_property
    def transform(self) -> Any:
        """Transform of an RGB image to a normalised tensor (3, size, size)."""
        return create_transform(self.size, crop_pct=self.crop, **NORM)


class Classifier(Predictor[Classification]):
    """Predictor of image classes, with the preprocessing of validation.

    It accepts weights of a training run (`best.safetensors`, or a checkpoint in the same folder)
    and of `quadtree convert`.

    Args:
        network: The classifier.
        card: Its card. If the card has no class names, names are numbers.
        size: Side of the network's input in pixels; None: as trained.
        top: Classes per image.
        **common: Arguments of `Predictor`.
    """

    task = TASK
    batch = 16

    def __init__(
        self,
        network: nn.Module,
        card: dict[str, Any],
        *,
        size: int | None = None,
        top: int = 5,
        **common: Any,
    ) -> None:
        checks.count(1, size=size, top=top)
        super().__init__(network, card, size=size, top=top, **common)
        if (count := int(cast(Any, network).num_classes)) < 1:
            raise CheckpointError(
                f"{self.path} has no classifier, only a backbone; take weights of a classifier, or "
                "train one on top of it"
            )
        self.names = class_names(card, count, self.path)
        self.top = top
        config = cast(Any, network).pretrained_cfg  # defaults of cards without sizes
        trained = self._positive("image_size", config["input_size"][-1])
        crop = self._positive("eval_crop", config["crop_pct"])
        self.preprocess = Preprocess(size or trained, crop)

    def forward(self, batch: Sequence[Prepared]) -> list[Tensor]:
        (images,) = self.stack(batch)
        return list(self.network(images).float().cpu())

    def finish(self, raw: Tensor, item: Prepared) -> Classification:
        if raw.isnan().any():
            raise CheckpointError(
                f"the network of {self.path} returns NaN in {self.dtype}; use float32, or other "
                "weights: these are damaged, or their training diverged"
            )
        return Classification(logits=raw.numpy(), classes=self.names, top=self.top)

    def _positive(self, key: str, otherwise: Any) -> Any:
        value = self.card.get(key, otherwise)
        accepted = int if isinstance(otherwise, int) else (int, float)  # a JSON 1.0 may come as 1
        if isinstance(value, bool) or not isinstance(value, accepted) or value <= 0:
            raise CheckpointError(
                f"{key} in the card of {self.path} must be a {type(otherwise).__name__} above 0, "
                f"got {value!r}; restore the card, or delete it to go on with {otherwise}"
            )
        return value
