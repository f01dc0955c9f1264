# SPDX-License-Identifier: Apache-2.0
"""An image in, a class for every pixel out, in two lines.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> from quadtree_attention.models import create, save_weights
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> kwargs = {"num_classes": 2, "channels": 8, "head_channels": 8}
    >>> model = create("semfpn_test_quadtree", **kwargs)
    >>> card = {"model": "semfpn_test_quadtree", "kwargs": kwargs, "task": "segment"}
    >>> _ = save_weights(path, model.state_dict(), {**card, "classes": ["cat", "dog"]})
    >>> found = Segmenter(path)(np.zeros((70, 45, 3)))
    >>> found.labels.shape, set(found.shares()) <= {"cat", "dog"}
    ((70, 45), True)
"""

import io
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.files import write_whole
from quadtree_attention.images import ImageLike, to_image
from quadtree_attention.models.registry import load_with_card
from quadtree_attention.models.segmentation import SemanticFPN, sliding_window
from quadtree_attention.tasks.predictor import out_of_memory, usable_device
from quadtree_attention.tasks.segment.augment import at_base, normalised
from quadtree_attention.tasks.segment.sources import Array, Colour, palette
from quadtree_attention.viz.canvas import save_picture

Sliding = int | tuple[int, int] | None  # a window, or a window and the stride, in pixels
BYTE = 256  # classes that a label map of 8 bits can tell apart
_NUMBERS_AT_ONCE = 2**26  # logits that are enlarged together: 256 MB


@dataclass(frozen=True, eq=False)
class Segmentation:
    """The class of every pixel of an image.

    Attributes:
        labels: (H, W) numbers of classes, uint8, or uint16 for more than 256 classes, at the size
            of the image as it was given, upright.
        names: Of the classes.
        palette: Their colours.
        confidence: Mean probability of the classes that were chosen, from 0 to 1.
        seconds: What segmenting took, reading aside.
        image: The image, upright.
        seen: (width, height) that the model saw.
    """

    labels: Array
    names: list[str]
    palette: list[Colour]
    confidence: float
    seconds: float = 0.0
    image: Image.Image | None = field(default=None, repr=False)
    seen: tuple[int, int] | None = None

    def shares(self) -> dict[str, float]:
        """The share of the image that each class has, largest first; those that have none out."""
        counts = np.bincount(self.labels.ravel(), minlength=len(self.names))
        order = np.argsort(-counts, kind="stable")
        return {self.names[i]: float(counts[i]) / self.labels.size for i in order if counts[i]}

    def draw(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        image: ImageLike | None = None,
        title: str | None = None,
    ) -> Image.Image:
        """The image in the colours of its classes, with a legend; see `draw.draw`.

        Args:
            path: File to write as well, all or nothing; its suffix tells the format.
            image: The image, where this has none.
            title: What to write above it; None counts the classes.
        """
        from quadtree_attention.tasks.segment.draw import draw

        shown = self.image if image is None else image
        if shown is None:
            raise OptionError("these labels have no image; pass image=...")
        facts = [f"mean confidence {self.confidence:.2f}"]
        if self.seconds:
            facts.append(f"{self.seconds:.2f} s")
        labels = self.labels.astype(np.int64)
        picture = draw(shown, labels, self.names, self.palette, title=title, facts=facts)
        if path is not None:
            save_picture(picture, path)
        return picture

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the label map as PNG, all or nothing: numbers of classes, shown in their colours.

        Raises:
            OptionError: The name is none of a PNG, or cannot be written.
        """
        write_whole(check_label_path(path), label_png(self.labels, self.palette))


class Segmenter:
    """Tells for every pixel of images what it shows.

    Args:
        path: Weights with their card, as `quadtree train segment` writes them (`best.safetensors`).
            Without names of classes in the card, names are numbers.
        device: Where to run; None takes a GPU if there is one.
        size: Pixels of the shorter side that images are scaled to for the model; None takes that of
            the card. Labels have the size of the image in any case.
        sliding: Pixels of a window that slides over images, or window and stride; None looks at
            whole images. For images that are too large for memory.

    Raises:
        CheckpointError: The weights cannot be read, or are none of a segmenter.
        OptionError: An option has a value that is not accepted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        size: int | None = None,
        sliding: Sliding = None,
    ) -> None:
        if size is not None and size < 1:
            raise OptionError(f"size must be at least 1 pixel, got {size}; pass a larger one")
        self.sliding = _checked(sliding)
        self.path = Path(path)
        self.device = usable_device(device)
        self.card, model = load_segmenter(self.path)
        self.model = model.to(self.device).eval()
        self.names = _names(self.card, model.num_classes, self.path)
        self.palette = _palette(self.card, model.num_classes, self.path)
        self.size = size or _base_size(self.card, self.path)

    def __call__(self, image: ImageLike) -> Segmentation:
        """The class of every pixel.

        Args:
            image: A path, the bytes of a file, a PIL image, an array (H, W[, 3 or 4]) or a tensor
                (3, H, W); photos are turned as their EXIF tag says.

        Raises:
            DataError: A file cannot be read as an image.
            OptionError: There is too little memory.
        """
        given = to_image(image)
        began = time.perf_counter()
        seen = at_base(given, self.size)
        try:
            with torch.inference_mode():
                labels, confidence = best_classes(self.logits(seen), given.size[::-1])
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise OptionError(
                f"an image of {seen.width}x{seen.height} pixels does not fit into the memory of "
                f"{self.device}; let a window slide over it (--window 512), pass a smaller --size, "
                "or another device"
            ) from error
        kind = np.uint8 if len(self.names) <= BYTE else np.uint16
        return Segmentation(
            labels.cpu().numpy().astype(kind),
            self.names,
            self.palette,
            confidence,
            time.perf_counter() - began,
            given,
            seen.size,
        )

    def logits(self, image: Image.Image) -> Tensor:
        """Scores of all classes for every pixel: (classes, H, W), float32."""
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        images = normalised(pixels.to(self.device))
        with torch.inference_mode():
            if self.sliding is None:
                found = self.model(images).float()
            else:
                window, stride = self.sliding
                found = sliding_window(self.model, images, window=window, stride=stride)
        if found.isnan().any():
            raise CheckpointError(
                f"the model of {self.path} answers nan; its weights are damaged, or training "
                "diverged; take other weights"
            )
        return found[0]


def load_segmenter(path: str | os.PathLike[str]) -> tuple[dict[str, Any], SemanticFPN]:
    """The card and the segmenter of a file of weights."""
    card, model = load_with_card(path, task="segment")
    return card, cast(SemanticFPN, model)


def best_classes(logits: Tensor, size: tuple[int, int]) -> tuple[Tensor, float]:
    """The best class of every pixel (H, W) at a size, and its mean probability.

    A few classes are enlarged at a time: all of them would take 150 numbers for every pixel of a
    photo.

    Args:
        logits: (classes, h, w).
        size: (H, W).
    """
    step = max(1, _NUMBERS_AT_ONCE // (size[0] * size[1]))
    best = logits.new_full(size, -torch.inf)
    total = best.clone()  # logarithm of the sum of all exponentials
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


def label_png(labels: Array, colours: Sequence[Colour]) -> bytes:
    """A label map as PNG: 8 bits with a palette, or 16 bits for more classes."""
    if labels.dtype == np.uint8:
        picture = Image.fromarray(labels)
        picture.putpalette([channel for colour in colours for channel in colour])
    else:
        picture = Image.fromarray(labels.astype(np.uint16))
    content = io.BytesIO()
    picture.save(content, format="PNG")
    return content.getvalue()


def check_label_path(path: str | os.PathLike[str]) -> Path:
    """The path, where it is the name of a PNG; else raises `OptionError`."""
    if Path(path).suffix.lower() != ".png":
        raise OptionError(f"label maps are written as .png, got {str(path)!r}; name it so")
    return Path(path)


def _checked(sliding: Sliding) -> tuple[int, int] | None:
    if sliding is None:
        return None
    window, stride = (
        (sliding, max(1, sliding * 2 // 3)) if isinstance(sliding, int) else tuple(sliding)
    )
    if window < 1 or not 1 <= stride <= window:
        raise OptionError(
            f"a window must be at least 1 pixel, its stride from 1 to the window, got {window} and "
            f"{stride}; pass such"
        )
    return window, stride


def _names(card: dict[str, Any], count: int, path: Path) -> list[str]:
    names = card.get("classes", [str(label) for label in range(count)])
    if not isinstance(names, list) or len(names) != count:
        got = f"{len(names)} names" if isinstance(names, list) else "no list"
        raise CheckpointError(
            f"the card of {path} must name the {count} classes of the model, got {got}; restore "
            "the card, or delete it to go on with numbers"
        )
    return [str(name) for name in names]


def _palette(card: dict[str, Any], count: int, path: Path) -> list[Colour]:
    colours = card.get("palette") or palette(count)
    try:
        array = np.asarray(colours)
        usable = array.shape == (count, 3) and array.dtype.kind == "i"
        usable = usable and bool(((array >= 0) & (array <= 255)).all())
    except ValueError:  # lists of different lengths
        usable = False
    if not usable:
        raise CheckpointError(
            f"the palette in the card of {path} must have a colour of three bytes for each of "
            f"{count} classes, got {str(colours)[:80]}; restore the card, or delete it"
        )
    return [(int(red), int(green), int(blue)) for red, green, blue in colours]


def _base_size(card: dict[str, Any], path: Path) -> int | None:
    size = card.get("base_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise CheckpointError(
            f"base_size in the card of {path} must be pixels or null, got {size!r}; restore the "
            "card, or delete it"
        )
    return size
