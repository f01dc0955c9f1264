# SPDX-License-Identifier: Apache-2.0
"""Semantic segmentation with a trained segmenter.

Example:
    >>> import tempfile
    >>> from quadtree_attention import models
    >>> from quadtree_attention.models.weights import save_weights
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> kwargs = {"num_classes": 2, "channels": 8, "head_channels": 8}
    >>> model = models.create("semfpn_test_quadtree", **kwargs)
    >>> card = {"model": "semfpn_test_quadtree", "kwargs": kwargs, "task": "segment"}
    >>> _ = save_weights(path, model.state_dict(), {**card, "classes": ["cat", "dog"]})
    >>> found = Segmenter.from_pretrained(path)(np.zeros((70, 45, 3)))
    >>> found.labels.shape, set(found.shares()) <= {"cat", "dog"}
    ((70, 45), True)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from quadtree_attention.checks import count
from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.images import ImageLike, to_image
from quadtree_attention.models.segmentation import SemanticFPN, sliding_window
from quadtree_attention.tasks.contract import Prepared
from quadtree_attention.tasks.predictor import Predictor
from quadtree_attention.tasks.readers import class_names
from quadtree_attention.tasks.segment import TASK
from quadtree_attention.tasks.segment.augment import at_base, normalised
from quadtree_attention.tasks.segment.result import BYTE, Segmentation
from quadtree_attention.viz.palette import Colour, colour, distinct

_NUMBERS_AT_ONCE = 2**26  # logits that are enlarged at a time: 256 MB


@dataclass(frozen=True)
class Preprocess:
    """Resizing of an image to the network's input; without options, the original size."""

    shorter_side: int | None = None
    size: int | None = None

    def __call__(self, image: ImageLike) -> Prepared:
        given = to_image(image)
        pixels = pil_to_tensor(at_base(given, self.shorter_side, self.size))
        return Prepared((given,), (pixels,), key=pixels.shape)


class Segmenter(Predictor[Segmentation]):
    """Predictor of the class of every pixel, at the original size of the image.

    Args:
        network: The segmenter.
        card: Its card. If the card has no class names, names are numbers.
        size: Longer side of the network's input in pixels; its maximum if `shorter_side` is given.
        shorter_side: Shorter side of the network's input in pixels. Without `size` and
            `shorter_side`: as trained.
        window: Side of a sliding window in pixels, for images that exceed the memory; None: whole
            images.
        stride: Pixels between windows; None: two thirds of the window.
        **common: Arguments of `Predictor`.

    Raises:
        CheckpointError: The card does not fit the network.
        OptionError: An option has a value that is not accepted.
    """

    task = TASK

    def __init__(
        self,
        network: SemanticFPN,
        card: dict[str, Any],
        *,
        size: int | None = None,
        shorter_side: int | None = None,
        window: int | None = None,
        stride: int | None = None,
        **common: Any,
    ) -> None:
        count(1, size=size, shorter_side=shorter_side, window=window, stride=stride)
        if stride is not None and (window is None or stride > window):
            raise OptionError(
                f"stride must be from 1 to the window, got stride {stride} and window {window}; "
                "pass a window of at least that many pixels"
            )
        if size is None and shorter_side is None:
            shorter_side = card.get("base_size")
            if shorter_side is not None and (type(shorter_side) is not int or shorter_side < 1):
                raise CheckpointError(
                    f"base_size in the card of {common.get('path')} must be pixels or null, got "
                    f"{shorter_side!r}; restore the card, or delete it"
                )
        if window is not None and stride is None:
            stride = max(1, window * 2 // 3)
        own = {"size": size, "shorter_side": shorter_side, "window": window, "stride": stride}
        super().__init__(network, card, **common | own)
        self.names = class_names(card, network.num_classes, self.path)
        self.palette = _palette(card, network.num_classes, self.path)
        self.preprocess = Preprocess(shorter_side, size)

    def forward(self, batch: Sequence[Prepared]) -> list[tuple[Tensor, float]]:
        (pixels,) = self.stack(batch)
        # channels last, Pillow's memory format, in which some convolutions are faster
        images = normalised(pixels.contiguous(memory_format=torch.channels_last))
        window, stride = self.options["window"], self.options["stride"]
        if window is None:
            logits = self.network(images).float()
        else:
            logits = sliding_window(self.network, images, window=window, stride=stride)
        if logits.isnan().any():
            raise CheckpointError(
                f"the model of {self.path} answers nan; its weights are damaged, or training "
                "diverged; take other weights"
            )
        pairs = zip(logits, batch, strict=True)
        found = [best_classes(x, (i.images[0].height, i.images[0].width)) for x, i in pairs]
        return [(labels.cpu(), confidence) for labels, confidence in found]

    def finish(self, raw: tuple[Tensor, float], item: Prepared) -> Segmentation:
        labels = raw[0].numpy().astype(np.uint8 if len(self.names) <= BYTE else np.uint16)
        about: dict[str, Any] = {"names": self.names, "palette": self.palette}
        return Segmentation(labels=labels, confidence=raw[1], **about)

    def advice(self) -> str:
        return "pass a window (--window 512), a smaller size (--size), or another device"


def best_classes(logits: Tensor, size: tuple[int, int]) -> tuple[Tensor, float]:
    """Return the best class of every pixel (H, W) at a size, and its mean probability.

    Classes are enlarged in chunks to limit the memory: ADE20K has 150 logits per pixel.

    Args:
        logits: (classes, h, w).
        size: (H, W).
    """
    step = max(1, _NUMBERS_AT_ONCE // (size[0] * size[1]))
    best = logits.new_full(size, -torch.inf)
    total = best.clone()  # log-sum-exp
    labels = torch.zeros(size, dtype=torch.long, device=logits.device)
    for first in range(0, len(logits), step):
        part = logits[None, first : first + step]
        if part.shape[2:] != size:
            part = F.interpolate(part, size, mode="bilinear", align_corners=False)
        value, place = part[0].max(dim=0)
        labels = torch.where(value > best, place + first, labels)
        best = torch.maximum(best, value)
        total = torch.logaddexp(total, part[0].logsumexp(dim=0))
    return labels, (best - total).exp().mean().item()


def _palette(card: dict[str, Any], count: int, path: str | Path | None) -> list[Colour]:
    given = card.get("palette") or distinct(count)
    try:
        colours = [colour(value) for value in given]
    except (TypeError, ValueError):
        colours = []
    if len(colours) != count:
        raise CheckpointError(
            f"the palette in the card of {path} must have a colour of three bytes for each of "
            f"{count} classes, got {str(given)[:80]}; restore the card, or delete it"
        )
    return colours
