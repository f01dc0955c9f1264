# SPDX-License-Identifier: Apache-2.0
"""Objects in images, by a trained detector.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> from quadtree_attention.models import create, save_weights
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> name, options = "retinanet_test_quadtree", {"num_classes": 2, "min_size": 64}
    >>> card = {"model": name, "kwargs": options, "task": "detect", "classes": ["cat", "dog"]}
    >>> _ = save_weights(path, create(name, **options).state_dict(), card)
    >>> found = Detector(path)(np.zeros((70, 45, 3)))
    >>> found.boxes.shape == (len(found), 4)
    True
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.images import ImageLike, to_image
from quadtree_attention.models.registry import load_with_card
from quadtree_attention.tasks.detect.masks import Array, encode_mask
from quadtree_attention.tasks.predictor import out_of_memory, usable_device
from quadtree_attention.viz.canvas import save_picture

SCORE = 0.5
MASK_THRESHOLD = 0.5  # of what belongs to an object


@dataclass(frozen=True, eq=False)
class Detections:
    """Objects of one image, surest first.

    Attributes:
        boxes: (N, 4) corners x0, y0, x1, y1 in pixels of the image as given, float32.
        labels: (N,) from 1 on, int64.
        names: Of their classes.
        scores: (N,) how sure the model is, from 0 to 1, float32.
        masks: (N, H, W) of bool; None where the model finds boxes alone.
        image: The image, upright.
        seconds: What finding them took.
    """

    boxes: Array
    labels: Array
    names: tuple[str, ...]
    scores: Array
    masks: Array | None
    image: Image.Image
    seconds: float

    def __len__(self) -> int:
        return len(self.names)

    def draw(self, path: str | os.PathLike[str] | None = None) -> Image.Image:
        """The image with boxes, masks, names and scores; also written to a file if named.

        Raises:
            OptionError: The file cannot be written.
        """
        from quadtree_attention.tasks.detect.draw import draw

        picture = draw(self)
        if path is not None:
            save_picture(picture, path)
        return picture

    def as_dicts(self) -> list[dict[str, Any]]:
        """The same for JSON: name, label, score, box, and the mask as run lengths of COCO."""
        dicts: list[dict[str, Any]] = []
        for i, name in enumerate(self.names):
            entry: dict[str, Any] = {
                "name": name,
                "label": int(self.labels[i]),
                "score": round(float(self.scores[i]), 6),
                "box": [round(float(value), 3) for value in self.boxes[i]],
            }
            if self.masks is not None:
                entry["segmentation"] = encode_mask(self.masks[i])
            dicts.append(entry)
        return dicts


class Detector:
    """Finds objects in images.

    Args:
        path: Weights with their card, as training writes them (`best.safetensors`). Without names
            of classes in the card, names are numbers.
        device: Where to run; None takes a GPU if there is one.
        score: Least score of what is reported, 0 to 1. What the model itself lets go, usually
            below 0.05, cannot be had.
        size: Pixels of the shorter side that images are looked at with; None takes that of the
            weights. The limit of the longer side follows.

    Raises:
        CheckpointError: The weights cannot be read, or are none of a detector.
        OptionError: An option has a value that is not accepted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        score: float = SCORE,
        size: int | None = None,
    ) -> None:
        if not 0 <= score <= 1:
            raise OptionError(f"score must be between 0 and 1, got {score}; pass such")
        if size is not None and size < 1:
            raise OptionError(f"size must be at least 1, got {size}; pass a larger one")
        self.path = Path(path)
        self.score = score
        self.device = usable_device(device)
        self.card, model = load_with_card(self.path, task="detect")
        self.model = model.to(self.device).eval()
        self.names = _class_names(self.card, self.path)
        _raise_threshold(model, score)
        transform = cast(Any, model).transform
        if size is not None:
            transform.max_size = round(transform.max_size * size / transform.min_size[-1])
            transform.min_size = (size,)
        self.size = int(transform.min_size[-1])
        self.max_size = int(transform.max_size)

    def __call__(self, image: ImageLike) -> Detections:
        """Objects of an image.

        Args:
            image: A path, the bytes of a file, a PIL image, an array (H, W), (H, W, 3) or
                (H, W, 4), or a tensor (3, H, W). Numbers are uint8, uint16, or floats from 0 to 1.
                Photos are turned as their EXIF tag says; what is transparent becomes white.

        Raises:
            DataError: A file cannot be read as an image.
            ShapeError: An array or tensor is no image.
            DTypeError: It holds other numbers.
        """
        return self.many([to_image(image)])[0]

    def many(self, images: Sequence[Image.Image]) -> list[Detections]:
        """Objects of RGB images that go through the model together."""
        began = time.perf_counter()
        inputs = [_pixels(image).to(self.device).float() / 255 for image in images]
        try:
            with torch.inference_mode():
                answers = [
                    {name: value.cpu() for name, value in answer.items()}
                    for answer in self.model(inputs)
                ]
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise OptionError(
                f"{self.device} has no room for {len(images)} images with a shorter side of "
                f"{self.size} pixels; pass a smaller size, or fewer images at a time"
            ) from error
        seconds = (time.perf_counter() - began) / len(images)
        return [
            self._detections(answer, image, seconds)
            for answer, image in zip(answers, images, strict=True)
        ]

    def _detections(
        self, answer: dict[str, Tensor], image: Image.Image, seconds: float
    ) -> Detections:
        order = answer["scores"].argsort(descending=True, stable=True)
        order = order[answer["scores"][order] >= self.score]
        labels = answer["labels"][order]
        masks = None
        if "masks" in answer:
            masks = (answer["masks"][order, 0] > MASK_THRESHOLD).numpy()
        return Detections(
            boxes=answer["boxes"][order].float().numpy(),
            labels=labels.numpy(),
            names=tuple(self.names[label - 1] for label in labels.tolist()),
            scores=answer["scores"][order].float().numpy(),
            masks=masks,
            image=image,
            seconds=seconds,
        )


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _raise_threshold(model: nn.Module, score: float) -> None:
    """Lets the model itself drop what is not reported, before masks are as large as the image."""
    heads = cast(Any, model)
    heads = getattr(heads, "roi_heads", heads)
    below = np.nextafter(np.float32(score), np.float32(-1))  # the model wants more than that
    heads.score_thresh = max(heads.score_thresh, float(below))


def _class_names(card: dict[str, Any], path: Path) -> list[str]:
    count = card["kwargs"].get("num_classes")
    names = card.get("classes")
    if names is None and isinstance(count, int):
        return [str(label) for label in range(1, count + 1)]
    if not isinstance(names, list) or len(names) != count:
        found = len(names) if isinstance(names, list) else "no list"
        raise CheckpointError(
            f"the card of {path} must name the {count} classes of the model, got {found} names; "
            "restore the card, or delete it to go on with numbers"
        )
    return [str(name) for name in names]
