# SPDX-License-Identifier: Apache-2.0
"""Pictures of detections: masks, boxes, and tags with names and scores."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from quadtree_attention.errors import OptionError
from quadtree_attention.images import Array
from quadtree_attention.tasks.detect.result import Detections
from quadtree_attention.tasks.detect.rle import decode_mask
from quadtree_attention.viz.canvas import HEADER, LARGEST_SCALE, LEAST_WIDTH, Canvas, Panel
from quadtree_attention.viz.palette import BACKGROUND, Colour, text_on, vivid

Corners = tuple[float, float, float, float]
SHOWN_SIDE = 1000  # pixels; shorter images are enlarged to this longer side at most
MASK_OPACITY = 0.45
PADDING = 3  # pixels around the text of a tag


def draw(found: Detections, *, title: str | None = None) -> Image.Image:
    """Draw all detections on the image, which is enlarged if small; the highest scores are on top.

    Colours differ by class, or by object if there is one class only. Each tag is next to its box
    and inside the picture; tags that would cover others are omitted.

    Args:
        found: The result to draw.
        title: Text above the picture; None: no text.

    Raises:
        OptionError: The result has no image.
    """
    if not found.images:
        raise OptionError("detections of a file have no image; draw those that a detector returns")
    image = found.images[0]
    scale = max(1.0, min(LARGEST_SCALE, SHOWN_SIDE / max(image.size)))
    size = (round(image.width * scale), round(image.height * scale))
    canvas = image.resize(size, Image.Resampling.LANCZOS)
    several = len(set(found.labels.tolist())) > 1
    keys = found.labels.tolist() if several else range(1, len(found) + 1)
    colours = [vivid(key) for key in keys]
    if found.segmentations is not None:
        canvas = _with_masks(canvas, found.segmentations, colours)
    boxes = found.boxes * np.tile(np.divide(size, image.size), 2)
    pen = ImageDraw.Draw(canvas)
    width = max(2, round(max(size) / 450))
    for box, colour in zip(boxes[::-1], colours[::-1], strict=True):
        x0, y0, x1, y1 = (round(float(value)) for value in box)
        x1, y1 = max(x0, x1 - 1), max(y0, y1 - 1)  # the last pixels inside the box
        pen.rectangle([x0 - 1, y0 - 1, x1 + 1, y1 + 1], outline=BACKGROUND)  # visible on any image
        pen.rectangle([x0, y0, x1, y1], outline=colour, width=width)
    texts = [f"{n} {s:.2f}" for n, s in zip(found.names, found.scores, strict=True)]
    _draw_tags(pen, boxes, texts, colours, size)
    if title is None:
        return canvas
    below = Canvas([Panel(max(0, (LEAST_WIDTH - size[0]) // 2), HEADER, *size)])
    below.paste(0, canvas)
    below.header(title, [f"{len(found)} found", f"{found.seconds:.2f} s"])
    return below.picture


def _with_masks(
    canvas: Image.Image, masks: Sequence[dict[str, Any]], colours: Sequence[Colour]
) -> Image.Image:
    for mask, colour in zip(masks[::-1], colours[::-1], strict=True):
        values = decode_mask(mask, *mask["size"]).astype(np.uint8) * 255
        shape = Image.fromarray(values).resize(canvas.size, Image.Resampling.BILINEAR)
        shape = shape.point(lambda value: 255 if value > 127 else 0)
        edge = Image.fromarray(np.array(shape) - np.array(shape.filter(ImageFilter.MinFilter(3))))
        faded = shape.point(lambda value: value * MASK_OPACITY)
        canvas.paste(Image.new("RGB", canvas.size, colour), mask=faded)
        canvas.paste(Image.new("RGB", canvas.size, colour), mask=edge)
    return canvas


def _draw_tags(
    pen: ImageDraw.ImageDraw,
    boxes: Array,
    texts: Sequence[str],
    colours: Sequence[Colour],
    size: tuple[int, int],
) -> None:
    font = ImageFont.load_default(max(12, round(max(size) / 65)))
    top, bottom = (font.getbbox("Ag")[i] for i in (1, 3))  # the same height for all tags
    taken: list[Corners] = []
    for box, text, colour in zip(boxes, texts, colours, strict=True):
        extent = (pen.textlength(text, font=font) + 2 * PADDING, bottom - top + 2 * PADDING)
        if (place := place_tag(tuple(box.tolist()), extent, size, taken)) is None:
            continue
        taken.append(place)
        pen.rectangle(place, fill=colour, outline=BACKGROUND)
        at = place[0] + PADDING, place[1] + PADDING - top
        pen.text(at, text, fill=text_on(colour), font=font)


def place_tag(
    box: Sequence[float],
    extent: tuple[float, float],
    size: tuple[int, int],
    taken: Sequence[Corners],
) -> Corners | None:
    """Position of a tag: above its box, else inside, else below.

    The tag is inside the picture of `size`. None: other tags cover all positions.
    """
    width, height = extent
    x0, y0, x1, y1 = box
    for x, y in ((x0, y0 - height), (x0, y0), (x0, y1), (x1 - width, y0), (x0, y1 - height)):
        left = min(max(x, 0), max(size[0] - 1 - width, 0))
        if y < 0 or y + height > size[1] - 1:
            continue
        right, bottom = left + width, y + height
        if not any(
            min(right, other[2]) > max(left, other[0]) and min(bottom, other[3]) > max(y, other[1])
            for other in taken
        ):
            return left, y, right, bottom
    return None
