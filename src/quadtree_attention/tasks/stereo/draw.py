# SPDX-License-Identifier: Apache-2.0
"""Pictures of disparity: the left image, and beside it how near everything is, in colours."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from quadtree_attention.images import Array
from quadtree_attention.tasks.stereo.result import OCCLUDED, Disparity
from quadtree_attention.viz.canvas import BACKGROUND, FAINT, TEXT

# Room for one panel, side by side and below each other; small images are enlarged a little
BESIDE, BELOW = (800, 800), (1600, 450)
LARGEST_SCALE = 3.0
GAP, HEADER = 6, 60
LEAST_WIDTH = 760  # so that there is room for the words and the bar above
SHOWN = (1.0, 99.0)  # percentiles that the colours span: a few wild values do not wash out the rest
STRIPE = 4  # pixels of the picture that a stripe of the hatching is wide
DARK_STRIPES, LIGHT_STRIPES = 0.68, 0.32  # how much there is of them, on bright and dark colours
TONES = 1024  # colours that are told apart
BAR_WIDTH, BAR_HEIGHT = 220, 12
NOT_KNOWN = (52, 55, 62)
# Far to near, dark to bright: told apart by lightness alone, too
COLOURS = np.array(
    [
        (24, 16, 66),
        (56, 24, 122),
        (104, 28, 140),
        (156, 38, 130),
        (204, 62, 98),
        (236, 104, 58),
        (250, 158, 40),
        (252, 210, 88),
        (255, 248, 196),
    ]
)


@dataclass(frozen=True)
class Panel:
    """Where a part of the picture is."""

    x: int
    y: int
    width: int
    height: int


def draw(disparity: Disparity, *, title: str | None = None) -> Image.Image:
    """The left image, and beside it (very wide ones below it) the disparities in colours.

    Near is bright and far is dark; the bar tells how many pixels each colour is, and leaves out the
    most extreme hundredth at either end. Pixels that the right image does not show are hatched,
    values that are not finite are grey. Without an image there are the disparities alone.

    Args:
        disparity: What to draw.
        title: What to write first; None tells the range of the disparities.
    """
    values = np.asarray(disparity.disparity, np.float64)
    height, width = values.shape
    image = disparity.images[0] if disparity.images else None
    panels = lay_out((width, height), 1 if image is None else 2)
    low, high = shown_range(values, _occlusion(disparity))
    canvas_width = max(LEAST_WIDTH, *(panel.x + panel.width for panel in panels))
    canvas = Image.new(
        "RGB", (canvas_width, max(panel.y + panel.height for panel in panels)), BACKGROUND
    )
    if image is not None:
        size = panels[0].width, panels[0].height
        shown = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
        canvas.paste(shown, (panels[0].x, panels[0].y))
    canvas.paste(_coloured(disparity, panels[-1], low, high), (panels[-1].x, panels[-1].y))
    _write_header(canvas, disparity, (low, high), title)
    return canvas


def _occlusion(disparity: Disparity) -> Array:
    found = disparity.occlusion
    return np.zeros(disparity.disparity.shape, np.float32) if found is None else found


def lay_out(size: tuple[int, int], count: int) -> list[Panel]:
    """Where panels of one size go: beside each other, unless they are larger below each other."""
    beside, below = _fitted(size, BESIDE), _fitted(size, BELOW)
    stacked = count == 1 or below[0] * below[1] > beside[0] * beside[1]
    if count == 1:
        below = _fitted(size, (BELOW[0], BESIDE[1]))
    width, height = below if stacked else beside
    across, down = (0, height + GAP) if stacked else (width + GAP, 0)
    indent = max(0, (LEAST_WIDTH - width - (count - 1) * across) // 2)
    return [Panel(indent + i * across, HEADER + i * down, width, height) for i in range(count)]


def _fitted(size: tuple[int, int], room: tuple[int, int]) -> tuple[int, int]:
    scale = min(room[0] / size[0], room[1] / size[1], LARGEST_SCALE)
    width, height = (max(1, round(side * scale)) for side in size)
    return width, height


def shown_range(values: Array, occlusion: Array) -> tuple[float, float]:
    """The disparities of the darkest and of the brightest colour.

    What both views see decides; where nothing is, whatever is finite does. A scene all at one depth
    gets a range of one pixel, or its noise would look like structure.
    """
    finite = np.isfinite(values)
    chosen = values[finite & (occlusion <= OCCLUDED)]
    chosen = chosen if chosen.size else values[finite]
    if not chosen.size:
        return 0.0, 1.0
    low, high = np.percentile(chosen, SHOWN)
    middle, half = (low + high) / 2, max(high - low, 1.0) / 2
    return float(max(0.0, middle - half)), float(max(0.0, middle - half) + 2 * half)


def colours(share: Array) -> Array:
    """(..., 3) uint8 for values from 0 (far) to 1 (near)."""
    places = np.linspace(0, len(COLOURS) - 1, TONES)
    channels = [np.interp(places, np.arange(len(COLOURS)), channel) for channel in COLOURS.T]
    tones = np.stack(channels, axis=-1).round().astype(np.uint8)
    return tones[(np.clip(share, 0, 1) * (TONES - 1)).round().astype(np.int16)]


def _coloured(disparity: Disparity, panel: Panel, low: float, high: float) -> Image.Image:
    size = panel.width, panel.height
    values = np.asarray(disparity.disparity, np.float64)
    known = np.isfinite(values)
    pixels = colours((np.where(known, values, low) - low) / (high - low))
    pixels[~known] = NOT_KNOWN
    # Colours are shrunk, not values, so that an edge between near and far keeps both
    shown = Image.fromarray(pixels).resize(size, _resampling(panel, values.shape[1]))
    hidden = Image.fromarray(((_occlusion(disparity) > OCCLUDED) & known).astype(np.uint8) * 255)
    cover = np.asarray(hidden.resize(size, Image.Resampling.BOX), np.float64) / 255
    return _hatched(np.asarray(shown), cover)


def _hatched(pixels: Array, cover: Array) -> Image.Image:
    """Stripes where `cover` (H, W) is 1, dark ones on bright colours and light ones on dark."""
    rows, columns = np.indices(cover.shape)
    stripes = cover * ((rows + columns) // STRIPE % 2 == 0)
    bright = pixels @ (0.299, 0.587, 0.114) > 96
    weight = (stripes * np.where(bright, DARK_STRIPES, LIGHT_STRIPES))[..., None]
    tone = np.where(bright[..., None], BACKGROUND, TEXT)
    return Image.fromarray((pixels * (1 - weight) + tone * weight).round().astype(np.uint8))


def _resampling(panel: Panel, width: int) -> Image.Resampling:
    return Image.Resampling.BOX if panel.width < width else Image.Resampling.NEAREST


# ---- the words and the bar on top


def _write_header(
    canvas: Image.Image, disparity: Disparity, span: tuple[float, float], title: str | None
) -> None:
    pen = ImageDraw.Draw(canvas)
    heading = f"disparity {span[0]:.0f} to {span[1]:.0f} px" if title is None else title
    large, small = ImageFont.load_default(20), ImageFont.load_default(14)
    bar = canvas.width - BAR_WIDTH - 24
    room = bar - 30
    pen.text((14, 21), _cut(heading, room, large, pen), fill=TEXT, font=large, anchor="lm")
    facts = _cut("   ".join(_facts(disparity)), room, small, pen)
    pen.text((14, 45), facts, fill=FAINT, font=small, anchor="lm")
    _draw_bar(pen, (bar, 14), span, ImageFont.load_default(13))


def _facts(disparity: Disparity) -> list[str]:
    height, width = disparity.disparity.shape
    facts = [f"{width}x{height}"]
    if disparity.seen and disparity.seen[0] != (width, height):
        facts[0] += " (at {}x{})".format(*disparity.seen[0])
    if disparity.seconds:
        facts.append(f"{disparity.seconds:.2f} s")
    hidden = disparity.occluded
    facts.append(f"{100 * hidden:.1f} % occluded (hatched)" if hidden else "nothing occluded")
    return facts


def _cut(text: str, room: float, font: "Font", pen: ImageDraw.ImageDraw) -> str:
    if pen.textlength(text, font=font) <= room:
        return text
    while text and pen.textlength(text + "...", font=font) > room:
        text = text[:-1]
    return text + "..."


def _draw_bar(
    pen: ImageDraw.ImageDraw, corner: tuple[int, int], span: tuple[float, float], font: "Font"
) -> None:
    x, y = corner
    for i, tone in enumerate(colours(np.linspace(0, 1, BAR_WIDTH)).tolist()):
        pen.line([x + i, y, x + i, y + BAR_HEIGHT], fill=tuple(tone))
    low, high = span
    for value in ticks(low, high):
        at = x + (value - low) / (high - low) * (BAR_WIDTH - 1)
        pen.line([at, y + BAR_HEIGHT + 1, at, y + BAR_HEIGHT + 4], fill=FAINT)
        pen.text((at, y + BAR_HEIGHT + 6), f"{value:g}", fill=FAINT, font=font, anchor="mt")
    pen.text((x - 8, y + BAR_HEIGHT / 2), "px", fill=FAINT, font=font, anchor="rm")


def ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers between two."""
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 6) for number in range(first, last + 1)]


Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
