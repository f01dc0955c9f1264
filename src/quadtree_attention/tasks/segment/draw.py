# SPDX-License-Identifier: Apache-2.0
"""Pictures of labels: the image in the colours of its classes, and a legend beside it."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from quadtree_attention.errors import OptionError, ShapeError
from quadtree_attention.images import Array, ImageLike, to_image
from quadtree_attention.tasks.segment.result import Segmentation
from quadtree_attention.viz.canvas import Canvas, Entry, Size, lay_out, resized
from quadtree_attention.viz.palette import Colour

OPACITY = 0.55  # opacity of colours over the image
GREYED = 0.55  # share by which the image is desaturated below the colours of classes
OUTLINE, OUTLINE_OPACITY = (255, 255, 255), 0.85  # between classes
SMOOTHED = 64  # maximum number of classes with smooth outlines, whose time is linear in it
UNLABELLED = "unlabelled"


def draw(
    result: Segmentation, *, title: str | None = None, image: ImageLike | None = None
) -> Image.Image:
    """Draw the image with the colours of its classes, and a legend with the share of each.

    Args:
        result: Labels; negative ones are of pixels without a class.
        title: Text above the picture; None: the number of classes.
        image: The image, if the result has none.

    Raises:
        OptionError: No image is available.
        ShapeError: Labels and image have different sizes.
    """
    if image is None and not result.images:
        raise OptionError("these labels have no image; pass image=...")
    shown = to_image(result.images[0] if image is None else image)
    labels = result.labels.astype(np.int64)
    if labels.shape != shown.size[::-1]:
        raise ShapeError(
            f"labels must be (y, x) = {shown.size[::-1]} like the image, got {labels.shape}; "
            "resize one of them"
        )
    entries = legend(labels, result.names, result.palette)
    canvas = Canvas(lay_out([shown.size], legend=True), legend=True)
    canvas.paste(0, colour_in(shown, labels, result.palette, canvas.panels[0].size))
    classes = sum(entry.colour is not None for entry in entries)
    counted = "1 class" if classes == 1 else f"{classes} classes"
    facts = result.facts()
    canvas.header(title or counted, facts if title is None else [counted, *facts])
    canvas.legend(entries)
    return canvas.picture


def legend(labels: Array, names: Sequence[str], palette: Sequence[Colour]) -> list[Entry]:
    """Return the classes in the labels, largest share first, pixels without a class last."""
    counts = np.bincount(labels[labels >= 0].ravel(), minlength=len(names))
    shares = counts / max(1, labels.size)
    order = np.argsort(-shares, kind="stable")
    found = [Entry(names[i], float(shares[i]), palette[i]) for i in order if counts[i]]
    if none := int((labels < 0).sum()):
        found.append(Entry(UNLABELLED, none / labels.size, None))
    return found


def colour_in(
    image: Image.Image, labels: Array, palette: Sequence[Colour], size: Size
) -> Image.Image:
    """Return the image at a size, with the colours and outlines of its classes."""
    shown = resized(image, size)
    grey = shown.convert("L").convert("RGB")
    pixels = np.asarray(Image.blend(shown, grey, GREYED), np.float32)
    classes = _resized(labels, *size)
    tones = np.asarray([*palette, (0, 0, 0)], np.float32)[classes]  # -1 selects the last one
    opacity = np.where(classes < 0, 0.0, OPACITY)[..., None]
    pixels = pixels * (1 - opacity) + tones * opacity
    edge = outlines(classes)[..., None] * OUTLINE_OPACITY
    pixels = pixels * (1 - edge) + np.asarray(OUTLINE, np.float32) * edge
    return Image.fromarray(pixels.round().astype(np.uint8))


def outlines(classes: Array) -> Array:
    """Return (H, W), True for pixels whose right or lower neighbour has another class."""
    edge = np.zeros(classes.shape, bool)
    edge[:, :-1] |= classes[:, :-1] != classes[:, 1:]
    edge[:-1] |= classes[:-1] != classes[1:]
    return edge


def _resized(labels: Array, width: int, height: int) -> Array:
    """Resize labels; outlines of enlarged labels are smoothed."""
    rows = ((np.arange(height) + 0.5) * labels.shape[0] / height).astype(np.int64)
    columns = ((np.arange(width) + 0.5) * labels.shape[1] / width).astype(np.int64)
    classes = labels[rows[:, None], columns].astype(np.int64)  # class of the pixel at the centre
    present = np.unique(labels)
    if width <= labels.shape[1] or len(present) > SMOOTHED:
        return classes
    most = np.zeros(classes.shape, np.float32)
    for label in present:
        mask = Image.fromarray((labels == label).astype(np.float32))
        share = np.asarray(mask.resize((width, height), Image.Resampling.BICUBIC))
        classes = np.where(share > most, label, classes)
        most = np.maximum(share, most)
    return classes
