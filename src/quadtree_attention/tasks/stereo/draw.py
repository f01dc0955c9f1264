# SPDX-License-Identifier: Apache-2.0
"""Pictures of disparity: the left image, and a colour map of its disparity."""

import numpy as np
from PIL import Image

from quadtree_attention.images import Array
from quadtree_attention.tasks.stereo.result import OCCLUDED, Disparity, spread
from quadtree_attention.viz.canvas import Canvas, Scale, Size, lay_out, resized
from quadtree_attention.viz.palette import BACKGROUND, LUMA, NEARNESS, TEXT, ramp

PERCENTILES = (1.0, 99.0)  # range of the colours, which excludes outliers
STRIPE = 4  # width of a stripe of the hatching in pixels of the picture
DARK_STRIPES, LIGHT_STRIPES = 0.68, 0.32  # opacity on bright and on dark colours
NOT_KNOWN = (52, 55, 62)


def draw(disparity: Disparity, *, title: str | None = None) -> Image.Image:
    """Draw the left image and a colour map of the disparities, stacked if very wide.

    Near is bright and far is dark. The colours of the bar span the 1st to the 99th percentile of
    non-occluded pixels. Occluded pixels are hatched, values that are not finite are grey. Without
    an image, only the disparities are drawn.

    Args:
        disparity: The result to draw.
        title: Text above the picture; None: the range of all disparities, as in `to_text`.
    """
    values = np.asarray(disparity.disparity, np.float64)
    occlusion = disparity.occlusion
    occluded = np.zeros(values.shape, bool) if occlusion is None else occlusion > OCCLUDED
    low, high = shown_range(values, occluded)
    size = values.shape[1], values.shape[0]
    canvas = Canvas(lay_out([size] * (2 if disparity.images else 1)))
    panel = canvas.panels[-1]
    if disparity.images:
        canvas.paste(0, resized(disparity.images[0], panel.size))
    canvas.paste(len(canvas.panels) - 1, _coloured(values, occluded, panel.size, low, high))
    heading, facts = words(disparity)
    told = facts if title is None else [heading, *facts]
    canvas.header(title or heading, told, Scale(NEARNESS, low, high, "px"))
    return canvas.picture


def words(disparity: Disparity) -> tuple[str, list[str]]:
    """Return the range of all disparities, as in `to_text`, and facts about colours and result."""
    values = disparity.disparity[np.isfinite(disparity.disparity)]
    low, _, high = spread(values)
    facts = ["colours: percentiles {:g} to {:g}".format(*PERCENTILES)]
    height, width = disparity.disparity.shape
    seen = disparity.seen[0] if disparity.seen else (width, height)
    at = "" if seen == (width, height) else f" (at {seen[0]}x{seen[1]})"
    facts.append(f"{width}x{height}{at}")
    if disparity.seconds:
        facts.append(f"{disparity.seconds:.2f} s")
    share = disparity.occluded
    facts.append(f"{100 * share:.1f} % occluded (hatched)" if share else "nothing occluded")
    return f"disparity {low:.1f} to {high:.1f} px", facts


def shown_range(values: Array, occluded: Array) -> tuple[float, float]:
    """Return the disparities of the darkest and of the brightest colour.

    The range is computed from non-occluded pixels, or without any from all finite ones. It is at
    least one pixel, so that noise of a scene at one depth is not amplified.
    """
    finite = np.isfinite(values)
    chosen = values[finite & ~occluded]
    chosen = chosen if chosen.size else values[finite]
    if not chosen.size:
        return 0.0, 1.0
    low, high = np.percentile(chosen, PERCENTILES)
    middle, half = (low + high) / 2, max(high - low, 1.0) / 2
    return float(max(0.0, middle - half)), float(max(0.0, middle - half) + 2 * half)


def _coloured(values: Array, occluded: Array, size: Size, low: float, high: float) -> Image.Image:
    known = np.isfinite(values)
    pixels = ramp(NEARNESS, (np.where(known, values, low) - low) / (high - low))
    pixels[~known] = NOT_KNOWN
    # Colours are resized, not values, which would be averaged at depth edges
    smaller = size[0] < values.shape[1]
    filtering = Image.Resampling.BOX if smaller else Image.Resampling.NEAREST
    shown = Image.fromarray(pixels).resize(size, filtering)
    hidden = Image.fromarray((occluded & known).astype(np.uint8) * 255)
    cover = np.asarray(hidden.resize(size, Image.Resampling.BOX), np.float64) / 255
    # Stripes where `cover` is 1, dark ones on bright colours and light ones on dark
    pixels = np.asarray(shown)
    rows, columns = np.indices(cover.shape)
    stripes = cover * ((rows + columns) // STRIPE % 2 == 0)
    bright = pixels @ LUMA > 96
    weight = (stripes * np.where(bright, DARK_STRIPES, LIGHT_STRIPES))[..., None]
    tone = np.where(bright[..., None], BACKGROUND, TEXT)
    return Image.fromarray((pixels * (1 - weight) + tone * weight).round().astype(np.uint8))
