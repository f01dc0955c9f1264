# SPDX-License-Identifier: Apache-2.0
"""Pictures of labels: the image in the colours of its classes, and a legend beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from quadtree_attention.errors import OptionError, ShapeError
from quadtree_attention.images import Array, ImageLike, to_image
from quadtree_attention.tasks.segment.result import Segmentation
from quadtree_attention.viz.canvas import BACKGROUND, FAINT, TEXT
from quadtree_attention.viz.palette import Colour

ROOM = (1120, 840)  # for the image; small ones are enlarged a little
LARGEST_SCALE = 3.0
LEAST_HEIGHT = 240  # so that there is room for a legend
HEADER, LEGEND, MARGIN = 44, 250, 14
ROW, SWATCH = 26, 16
OPACITY = 0.55  # of colours over the image
GREYED = 0.55  # of an image's own colours is taken out, so that those of the classes tell
OUTLINE, OUTLINE_OPACITY = (255, 255, 255), 0.85  # between classes
SMOOTHED = 64  # classes up to which outlines are; each takes its time
UNLABELLED = "unlabelled"


@dataclass(frozen=True)
class Entry:
    """A line of the legend; no colour for pixels that have no class."""

    name: str
    share: float
    colour: Colour | None


def draw(
    result: Segmentation, *, title: str | None = None, image: ImageLike | None = None
) -> Image.Image:
    """The image under the colours of its classes, with the share that each has of it.

    Args:
        result: Labels; negative ones are of pixels without a class.
        title: Text above the picture; None: the number of classes.
        image: The image, for a result without one.

    Raises:
        OptionError: There is no image.
        ShapeError: Labels and image have different sizes.
    """
    if image is None and not result.images:
        raise OptionError("these labels have no image; pass image=...")
    picture = to_image(result.images[0] if image is None else image)
    labels = result.labels.astype(np.int64)
    if labels.shape != picture.size[::-1]:
        raise ShapeError(
            f"labels must be (y, x) = {picture.size[::-1]} like the image, got {labels.shape}; "
            "resize one of them"
        )
    entries = legend(labels, result.names, result.palette)
    overlay = colour_in(picture, labels, result.palette)
    canvas = Image.new("RGB", _canvas_size(overlay), BACKGROUND)
    canvas.paste(overlay, (0, HEADER + max(0, (canvas.height - HEADER - overlay.height) // 2)))
    pen = ImageDraw.Draw(canvas)
    classes = sum(entry.colour is not None for entry in entries)
    counted = "1 class" if classes == 1 else f"{classes} classes"
    facts = result.facts()
    heading, told = (counted, facts) if title is None else (title, [counted, *facts])
    _write_header(pen, heading, told)
    _write_legend(pen, entries, overlay.width, canvas.height)
    return canvas


def legend(labels: Array, names: Sequence[str], palette: Sequence[Colour]) -> list[Entry]:
    """What is in the labels, largest share first; what has no class comes last."""
    counts = np.bincount(labels[labels >= 0].ravel(), minlength=len(names))
    shares = counts / max(1, labels.size)
    order = np.argsort(-shares, kind="stable")
    found = [Entry(names[i], float(shares[i]), palette[i]) for i in order if counts[i]]
    if none := int((labels < 0).sum()):
        found.append(Entry(UNLABELLED, none / labels.size, None))
    return found


def colour_in(image: Image.Image, labels: Array, palette: Sequence[Colour]) -> Image.Image:
    """The image in the colours of its classes, outlined, at the size that is shown."""
    scale = min(ROOM[0] / image.width, ROOM[1] / image.height, LARGEST_SCALE)
    width, height = (max(1, round(side * scale)) for side in image.size)
    shown = image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    grey = shown.convert("L").convert("RGB")
    pixels = np.asarray(Image.blend(shown, grey, GREYED), np.float32)
    classes = _resized(labels, width, height)
    tones = np.asarray([*palette, (0, 0, 0)], np.float32)[classes]  # -1 is the last
    opacity = np.where(classes < 0, 0.0, OPACITY)[..., None]
    pixels = pixels * (1 - opacity) + tones * opacity
    edge = outlines(classes)[..., None] * OUTLINE_OPACITY
    pixels = pixels * (1 - edge) + np.asarray(OUTLINE, np.float32) * edge
    return Image.fromarray(pixels.round().astype(np.uint8))


def outlines(classes: Array) -> Array:
    """(H, W), True for pixels whose right or lower neighbour has another class."""
    edge = np.zeros(classes.shape, bool)
    edge[:, :-1] |= classes[:, :-1] != classes[:, 1:]
    edge[:-1] |= classes[:-1] != classes[1:]
    return edge


def _resized(labels: Array, width: int, height: int) -> Array:
    """Labels at another size; where they are enlarged, outlines get smooth and not jagged."""
    rows = ((np.arange(height) + 0.5) * labels.shape[0] / height).astype(np.int64)
    columns = ((np.arange(width) + 0.5) * labels.shape[1] / width).astype(np.int64)
    classes = labels[rows[:, None], columns].astype(np.int64)  # of the pixel at the centre
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


def _canvas_size(overlay: Image.Image) -> tuple[int, int]:
    return overlay.width + LEGEND, HEADER + max(LEAST_HEIGHT, overlay.height)


def _write_header(pen: ImageDraw.ImageDraw, heading: str, facts: Sequence[str]) -> None:
    large, small = ImageFont.load_default(20), ImageFont.load_default(14)
    middle = HEADER / 2
    pen.text((MARGIN, middle), heading, fill=TEXT, font=large, anchor="lm")
    after = MARGIN + pen.textlength(heading, font=large) + 16
    pen.text((after, middle + 2), "   ".join(facts), fill=FAINT, font=small, anchor="lm")


def _write_legend(pen: ImageDraw.ImageDraw, entries: Sequence[Entry], x: int, height: int) -> None:
    font = ImageFont.load_default(15)
    left, right = x + MARGIN, x + LEGEND - MARGIN
    rows = max(1, (height - HEADER - MARGIN) // ROW)
    shown = entries if len(entries) <= rows else entries[: rows - 1]
    for i, entry in enumerate(shown):
        middle = HEADER + MARGIN / 2 + (i + 0.5) * ROW
        box = (left, middle - SWATCH / 2, left + SWATCH, middle + SWATCH / 2)
        pen.rectangle(box, fill=entry.colour, outline=None if entry.colour else FAINT)
        share = _percent(entry.share)
        pen.text((right, middle), share, fill=FAINT, font=font, anchor="rm")
        room = right - left - SWATCH - 18 - pen.textlength(share, font=font)
        name = _shortened(pen, entry.name, room, font)
        tone = TEXT if entry.colour else FAINT
        pen.text((left + SWATCH + 10, middle), name, fill=tone, font=font, anchor="lm")
    if len(shown) < len(entries):
        rest = sum(entry.share for entry in entries[len(shown) :])
        middle = HEADER + MARGIN / 2 + (len(shown) + 0.5) * ROW
        said = f"{len(entries) - len(shown)} more, {_percent(rest)}"
        pen.text((left + SWATCH + 10, middle), said, fill=FAINT, font=font, anchor="lm")


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share >= 0.0005 else "< 0.1 %"


def _shortened(
    pen: ImageDraw.ImageDraw,
    text: str,
    room: float,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> str:
    if pen.textlength(text, font=font) <= room:
        return text
    while text and pen.textlength(text + "...", font=font) > room:
        text = text[:-1]
    return text.rstrip() + "..."
