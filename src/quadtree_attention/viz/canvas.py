# SPDX-License-Identifier: Apache-2.0
"""Canvas for pictures of results: image panels, header, colour bar, legend."""

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from quadtree_attention.errors import OptionError
from quadtree_attention.files import write_whole
from quadtree_attention.images import Array
from quadtree_attention.viz.palette import BACKGROUND, FAINT, TEXT, Colour, ramp

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
# Size limits: one of two images side by side, one of two stacked, one image, one with a legend
BESIDE, BELOW, ALONE, WITH_LEGEND = (800, 800), (1600, 450), (1600, 800), (1120, 840)
LARGEST_SCALE = 3.0  # small images are enlarged up to this
HEADER, MARGIN, GAP = 60, 14, 6
LEAST_WIDTH, LEAST_HEIGHT = 760, 240  # minimum for the header and for a legend
LEGEND, ROW, SWATCH = 250, 26, 16
BAR_WIDTH, BAR_HEIGHT = 220, 12

Size = tuple[int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class Panel:
    """Part of a picture: corner, size, and scale relative to its image."""

    x: int
    y: int
    width: int
    height: int
    scale: tuple[float, float] = (1.0, 1.0)

    @property
    def size(self) -> Size:
        return self.width, self.height

    def place(self, points: Array) -> Array:
        """Maps (N, 2) pixels of the image to positions in the picture."""
        return (points + 0.5) * self.scale + (self.x, self.y)


@dataclass(frozen=True)
class Entry:
    """A row of a legend; None if the entry has no colour in the picture."""

    name: str
    share: float
    colour: Colour | None


@dataclass(frozen=True)
class Scale:
    """Range and unit of the colours `ramp(colours, ...)`, from `low` to `high`."""

    colours: Array
    low: float
    high: float
    unit: str


def lay_out(sizes: Sequence[Size], *, legend: bool = False) -> list[Panel]:
    """Panels for one or two images: side by side, or stacked if they are larger then."""
    rooms = (BESIDE, BELOW) if len(sizes) > 1 else (WITH_LEGEND if legend else ALONE,) * 2
    beside, below = ([fitted(size, room) for size in sizes] for room in rooms)
    stacked = sum(w * h for w, h in below) > sum(w * h for w, h in beside)
    shown = below if stacked else beside
    across, down = (max(sides) for sides in zip(*shown, strict=True))
    least_width, least_height = (0, LEAST_HEIGHT) if legend else (LEAST_WIDTH, 0)
    down, used, x, y = max(down, least_height), 0, 0, 0
    corners = []
    for width, height in shown:
        corners.append(((across - width) // 2, y) if stacked else (x, (down - height) // 2))
        used = max(used, corners[-1][0] + width)
        x, y = x + width + GAP, y + height + GAP
    indent = max(0, (least_width - used) // 2)
    return [
        Panel(indent + x, HEADER + y, *shape, (shape[0] / size[0], shape[1] / size[1]))
        for (x, y), shape, size in zip(corners, shown, sizes, strict=True)
    ]


def fitted(size: Size, room: Size) -> Size:
    """Size of an image scaled to fit; small images are enlarged up to `LARGEST_SCALE`."""
    scale = min(room[0] / size[0], room[1] / size[1], LARGEST_SCALE)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def resized(image: Image.Image, size: Size) -> Image.Image:
    """Resizes an image to its panel."""
    return image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


class Canvas:
    """A picture with a header and image panels.

    Args:
        panels: Positions of the images.
        legend: Reserve space for a legend on the right.

    Attributes:
        picture: The picture.
    """

    def __init__(self, panels: Sequence[Panel], *, legend: bool = False) -> None:
        self.panels = panels
        self._right = max(panel.x + panel.width for panel in panels)
        width = self._right + LEGEND if legend else max(LEAST_WIDTH, self._right)
        lowest = max(panel.y + panel.height for panel in panels)
        height = max(HEADER + LEAST_HEIGHT, lowest) if legend else lowest
        self.picture = Image.new("RGB", (width, height), BACKGROUND)

    def paste(self, index: int, image: Image.Image) -> None:
        """Fills a panel with an image of its size."""
        self.picture.paste(image, (self.panels[index].x, self.panels[index].y))

    def header(self, heading: str, facts: Sequence[str], scale: Scale | None = None) -> None:
        """Draws a heading, a line of facts below it, both truncated to fit, and a colour bar."""
        pen = ImageDraw.Draw(self.picture)
        pen.rectangle([0, 0, self.picture.width, HEADER - 1], fill=BACKGROUND)
        right: float = self.picture.width - MARGIN
        if scale is not None:
            right = _draw_bar(pen, self.picture.width - BAR_WIDTH - 24, scale) - 2 * MARGIN
        lines = (heading, 21, TEXT, 20), ("   ".join(facts), 45, FAINT, 14)
        for text, y, colour, size in lines:
            font = ImageFont.load_default(size)
            pen.text((MARGIN, y), cut(text, right - MARGIN, font), colour, font, anchor="lm")

    def legend(self, entries: Sequence[Entry]) -> None:
        """Draws a legend of names, colours and shares; sums up the last entries if too many."""
        pen, font = ImageDraw.Draw(self.picture), ImageFont.load_default(15)
        left, right = self._right + MARGIN, self._right + LEGEND - MARGIN
        rows = max(1, (self.picture.height - HEADER - MARGIN) // ROW)
        shown = list(entries) if len(entries) <= rows else list(entries[: rows - 1])
        if rest := entries[len(shown) :]:
            shown.append(Entry(f"{len(rest)} more", sum(entry.share for entry in rest), None))
        for i, entry in enumerate(shown):
            middle = HEADER + MARGIN / 2 + (i + 0.5) * ROW
            summed = rest and i == len(shown) - 1
            box = (left, middle - SWATCH / 2, left + SWATCH, middle + SWATCH / 2)
            if not summed:
                pen.rectangle(box, fill=entry.colour, outline=None if entry.colour else FAINT)
            share = percent(entry.share)
            pen.text((right, middle), share, fill=FAINT, font=font, anchor="rm")
            room = right - left - SWATCH - 18 - pen.textlength(share, font=font)
            tone = TEXT if entry.colour else FAINT
            name = cut(entry.name, room, font)
            pen.text((left + SWATCH + 10, middle), name, fill=tone, font=font, anchor="lm")


def percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share >= 0.0005 else "< 0.1 %"


def cut(text: str, room: float, font: Font) -> str:
    """Truncates a text to a width in pixels."""
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "...") > room:
        text = text[:-1]
    return text.rstrip() + "..."


def ticks(low: float, high: float) -> list[float]:
    """Returns three to eight round numbers between two values."""
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 6) for number in range(first, last + 1)]


def _draw_bar(pen: ImageDraw.ImageDraw, x: int, scale: Scale) -> float:
    """Draws a colour bar with ticks and its unit; returns its left edge."""
    font, bottom = ImageFont.load_default(13), MARGIN + BAR_HEIGHT
    for i, tone in enumerate(ramp(scale.colours, np.linspace(0, 1, BAR_WIDTH)).tolist()):
        pen.line([x + i, MARGIN, x + i, bottom], fill=tuple(tone))
    for value in ticks(scale.low, scale.high):
        at = x + (value - scale.low) / (scale.high - scale.low) * (BAR_WIDTH - 1)
        pen.line([at, bottom + 1, at, bottom + 4], fill=FAINT)
        pen.text((at, bottom + 6), f"{value:g}", fill=FAINT, font=font, anchor="mt")
    pen.text((x - 8, MARGIN + BAR_HEIGHT / 2), scale.unit, fill=FAINT, font=font, anchor="rm")
    return x - 8 - font.getlength(scale.unit)


def save_picture(picture: Image.Image, path: str | os.PathLike[str]) -> None:
    """Writes a picture atomically.

    Raises:
        OptionError: The suffix is unknown, or the file cannot be written.
    """
    content = io.BytesIO()
    # A third of the time of level 6; files of photographs are 8 % larger
    picture.save(content, format=picture_format(path), quality=92, compress_level=3)
    write_whole(path, content.getvalue())


def picture_format(path: str | os.PathLike[str]) -> str:
    """Returns the format of a file by its suffix; raises `OptionError` if it is unknown."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise OptionError(
            f"pictures are written as {', '.join(FORMATS)}, got {str(path)!r}; change the suffix"
        )
    return FORMATS[suffix]
