# SPDX-License-Identifier: Apache-2.0
"""What images show, by a trained classifier.

Example:
    >>> import tempfile, timm
    >>> from pathlib import Path
    >>> from quadtree_attention.models.weights import save_weights
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> card = {"model": "test_quadtree", "kwargs": {"num_classes": 2}, "classes": ["cat", "dog"]}
    >>> model = timm.create_model("test_quadtree", num_classes=2)
    >>> _ = save_weights(path, model.state_dict(), card)
    >>> best, other = Classifier(path)(np.zeros((70, 45, 3)))
    >>> {best.name, other.name} == {"cat", "dog"}
    True
"""

import os
from collections.abc import Iterable, Iterator, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast, get_args, overload

import numpy as np
import torch
from torch import Tensor, nn

from quadtree_attention.errors import (
    CheckpointError,
    MissingDependencyError,
    OptionError,
    QuadtreeAttentionError,
)
from quadtree_attention.images import ImageLike, to_image
from quadtree_attention.models.registry import load_with_card
from quadtree_attention.tasks.predictor import out_of_memory, usable_device

try:
    from PIL import Image
    from timm.data import create_transform
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"classifying needs timm, torchvision and pillow, got {error}; "
        "pip install 'quadtree-attention[models]'"
    ) from error

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Prediction:
    """One answer: the class by number and by name, and how sure the model is, from 0 to 1."""

    label: int
    name: str
    probability: float


class Classifier:
    """Names what images show, with the preprocessing that evaluation in training uses.

    Args:
        path: Weights with their card, as training (`best.safetensors`) and `quadtree convert` write
            them. Without names of classes in the card, names are numbers. `last.ckpt` and
            `best.ckpt` of a run are read if the run's `best.safetensors` lies beside them.
        device: Where to run; None takes a GPU if there is one.
        topk: Answers per image, best first.
        image_size: Pixels of a side of what the model sees; None takes that of the card.
        batch_size: Images that go through the model together.
        dtype: "float32", or "bfloat16" for automatic mixed precision.

    Raises:
        CheckpointError: The weights cannot be read, or are none of a classifier.
        OptionError: An option has a value that is not accepted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        topk: int = 5,
        image_size: int | None = None,
        batch_size: int = 16,
        dtype: Precision = "float32",
    ) -> None:
        for name, value in (("topk", topk), ("image_size", image_size), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, got {value}; pass a larger one")
        if dtype not in get_args(Precision):
            raise OptionError(f"dtype must be float32 or bfloat16, got {dtype!r}; take one")
        self.path = Path(path)
        self.topk = topk
        self.batch_size = batch_size
        self.dtype = dtype
        self.device = usable_device(device)
        self.card, model = load_with_card(self.path, task="classify")
        self.model = model.to(self.device).eval()
        self.names = _class_names(self.card, _outputs(model, self.path), self.path)
        config = cast(Any, model).pretrained_cfg  # for weights whose card is silent
        self.image_size = image_size or _positive(
            self.card, "image_size", config["input_size"][-1], self.path
        )
        self.crop = _positive(self.card, "eval_crop", config["crop_pct"], self.path)
        self.transform = create_transform(
            self.image_size,
            crop_pct=self.crop,
            mean=IMAGENET_DEFAULT_MEAN,
            std=IMAGENET_DEFAULT_STD,
            interpolation="bicubic",
        )

    @overload  # a str is also an iterable of str: the first that fits is meant
    def __call__(self, images: ImageLike) -> list[Prediction]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, images: Iterable[ImageLike]) -> list[list[Prediction]]: ...
    def __call__(
        self, images: ImageLike | Iterable[ImageLike]
    ) -> list[Prediction] | list[list[Prediction]]:
        """The best answers for an image, or a list of them for each of many.

        Args:
            images: A path, the bytes of a file, a PIL image, an array (H, W), (H, W, 3) or
                (H, W, 4), a tensor (3, H, W), or many of these. Numbers are uint8, uint16, or
                floats from 0 to 1. Photos are turned as their EXIF tag says; what is transparent
                becomes white.

        Raises:
            DataError: A file cannot be read as an image.
            ShapeError: An array or tensor is no image.
            DTypeError: It holds other numbers.
        """
        if _is_one(images):
            return self._answers([cast(ImageLike, images)])[0]
        return self._answers(cast(Iterable[ImageLike], images))

    def each(
        self, images: Iterable[ImageLike]
    ) -> Iterator[list[Prediction] | QuadtreeAttentionError]:
        """Answers one after another; where an image cannot be read, the error in their place."""
        remaining = iter(images)
        while batch := list(islice(remaining, self.batch_size)):
            prepared = [self._try(image) for image in batch]
            readable = [x for x in prepared if isinstance(x, Tensor)]
            answers = iter(self._rank(self.logits(torch.stack(readable))) if readable else [])
            for x in prepared:
                yield next(answers) if isinstance(x, Tensor) else x

    def prepare(self, image: ImageLike) -> Tensor:
        """What the model sees of an image: (3, S, S), normalised."""
        return self.transform(to_image(image))

    def logits(self, images: Tensor) -> Tensor:
        """Scores of all classes for prepared images: (B, 3, S, S) -> (B, classes), float32, CPU."""
        mixed = self.dtype != "float32"
        precision = torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext()
        try:
            with torch.inference_mode(), precision:
                return self.model(images.to(self.device)).float().cpu()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise OptionError(
                f"{self.device} has no room for {len(images)} images of {self.image_size} pixels; "
                "pass a smaller batch size"
            ) from error

    def _answers(self, images: Iterable[ImageLike]) -> list[list[Prediction]]:
        from tqdm import tqdm

        total = len(images) if isinstance(images, Sized) else None
        few = total is not None and total <= self.batch_size
        bar = tqdm(
            self.each(images),
            desc="classifying",
            total=total,
            unit="image",
            leave=False,
            disable=True if few else None,  # None: shown in a terminal only
        )
        answers = []
        for outcome in bar:
            if isinstance(outcome, QuadtreeAttentionError):
                bar.close()
                raise outcome
            answers.append(outcome)
        return answers

    def _try(self, image: ImageLike) -> Tensor | QuadtreeAttentionError:
        try:
            return self.prepare(image)
        except QuadtreeAttentionError as error:
            return error

    def _rank(self, logits: Tensor) -> list[list[Prediction]]:
        if logits.isnan().any():
            raise CheckpointError(
                f"the model of {self.path} answers nan; its weights are damaged, or training "
                "diverged; take other weights"
            )
        # Stable: of equal scores the lower label comes first, on every device
        ordered = logits.softmax(dim=1).sort(dim=1, descending=True, stable=True)
        probabilities = ordered.values[:, : self.topk].tolist()  # (B, topk)
        labels = ordered.indices[:, : self.topk].tolist()
        return [
            [Prediction(i, self.names[i], p) for i, p in zip(*row, strict=True)]
            for row in zip(labels, probabilities, strict=True)
        ]


def _is_one(images: object) -> bool:
    if isinstance(images, Tensor | np.ndarray):
        return images.ndim < 4  # more axes: a batch
    one = isinstance(images, str | os.PathLike | bytes | Image.Image)
    return one or not isinstance(images, Iterable)


def _outputs(model: nn.Module, path: Path) -> int:
    count = int(cast(Any, model).num_classes)
    if count < 1:
        raise CheckpointError(
            f"{path} has no classifier, only a backbone; take weights of a classifier, or train "
            "one on top of it"
        )
    return count


def _class_names(card: dict[str, Any], outputs: int, path: Path) -> list[str]:
    names = card.get("classes")
    if names is None:
        return [str(label) for label in range(outputs)]
    if not isinstance(names, list) or len(names) != outputs:
        count = len(names) if isinstance(names, list) else "no list"
        raise CheckpointError(
            f"the card of {path} must name the {outputs} classes of the model, got {count} names; "
            "restore the card, or delete it to go on with numbers"
        )
    return [str(name) for name in names]


def _positive(card: dict[str, Any], key: str, otherwise: Any, path: Path) -> Any:
    value = card.get(key, otherwise)
    accepted = int if isinstance(otherwise, int) else (int, float)  # a JSON 1.0 may come as 1
    if isinstance(value, bool) or not isinstance(value, accepted) or value <= 0:
        raise CheckpointError(
            f"{key} in the card of {path} must be a {type(otherwise).__name__} above 0, got "
            f"{value!r}; restore the card, or delete it to go on with {otherwise}"
        )
    return value
