# SPDX-License-Identifier: Apache-2.0
"""Pictures of matches: two images, and lines between what belongs together."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from quadtree_attention.checks import at_least
from quadtree_attention.errors import OptionError
from quadtree_attention.images import Array, ImageLike, to_image
from quadtree_attention.tasks.match.result import Matches
from quadtree_attention.viz.canvas import BACKGROUND, FAINT, TEXT

MAX_LINES = 200
# Room for one image, side by side and below each other; small images are enlarged a little
BESIDE, BELOW = (800, 800), (1600, 450)
LARGEST_SCALE = 3.0
GAP, HEADER = 6, 44
LEAST_WIDTH = 640  # so that there is room for the words above
OVERSAMPLING = 2  # lines are drawn larger and scaled down, which smooths them
DIMMED = 0.25  # how much darker images are than they were, so that lines stand out
LINE_OPACITY, LINE_WIDTH, POINT_RADIUS = 190, 1.0, 2.2
OUTLIER, OUTLIER_OPACITY = (150, 150, 150), 90  # matches that a pose does not agree with
# Confidence 0 to 1, dark to bright: told apart by lightness alone, too
COLOURS = np.array(
    [(96, 52, 170), (58, 100, 214), (22, 150, 190), (40, 190, 140), (140, 214, 70), (255, 233, 50)]
)


@dataclass(frozen=True)
class Panel:
    """Where an image is in the picture, and how many pixels of the picture one of its own is."""

    x: int
    y: int
    width: int
    height: int
    scale_x: float
    scale_y: float

    def place(self, points: Array) -> Array:
        """(N, 2) pixels of the image to positions in the picture, from its upper left corner."""
        return (points + 0.5) * (self.scale_x, self.scale_y) + (self.x, self.y)


def draw(
    matches: Matches,
    *,
    title: str | None = None,
    images: tuple[ImageLike, ImageLike] | None = None,
    max_lines: int = MAX_LINES,
) -> Image.Image:
    """The two images beside (very wide ones below) each other, matches as lines.

    Lines are coloured by confidence, on a scale from 0 to 1 that is the same in all pictures. Of
    matches with poses, inliers alone are coloured, the others are grey. The bar on top tells how
    many matches there are, how sure they are and what they took.

    Args:
        matches: What to draw.
        title: What to write first; None counts the matches.
        images: The images, where `matches` does not have them.
        max_lines: Matches to show at most, spread evenly over image 0, good ones and bad ones.

    Raises:
        OptionError: There are no images, or `max_lines` is negative.
    """
    at_least(0, max_lines=max_lines)
    pictures = matches.images if images is None else tuple(map(to_image, images))
    if len(pictures) != 2:
        raise OptionError("these matches have no images; pass images=(image0, image1)")
    panels = lay_out(pictures[0].size, pictures[1].size)
    width = max(LEAST_WIDTH, *(p.x + p.width for p in panels))
    height = max(p.y + p.height for p in panels)
    canvas = Image.new("RGB", (width, height), BACKGROUND)
    for picture, panel in zip(pictures, panels, strict=True):
        canvas.paste(_dimmed(picture, panel), (panel.x, panel.y))
    shown = spread(matches.keypoints0, matches.confidence, pictures[0].size, max_lines)
    canvas = _with_lines(canvas, matches, panels, shown)
    _write_header(canvas, matches, len(shown), title)
    return canvas


def lay_out(size0: tuple[int, int], size1: tuple[int, int]) -> tuple[Panel, Panel]:
    """Where the images go: beside each other, unless they are larger below each other."""
    sizes = size0, size1
    beside, below = ([_fitted(size, room) for size in sizes] for room in (BESIDE, BELOW))
    if sum(w * h for w, h in below) > sum(w * h for w, h in beside):
        shown, (room, _) = below, np.max(below, axis=0).tolist()
        corners = [((room - w) // 2, i * (below[0][1] + GAP)) for i, (w, _) in enumerate(below)]
    else:
        shown, (_, room) = beside, np.max(beside, axis=0).tolist()
        corners = [(i * (beside[0][0] + GAP), (room - h) // 2) for i, (_, h) in enumerate(beside)]
    used = max(x + width for (x, _), (width, _) in zip(corners, shown, strict=True))
    indent = max(0, (LEAST_WIDTH - used) // 2)
    first, second = (
        Panel(indent + x, HEADER + y, width, height, width / size[0], height / size[1])
        for (x, y), (width, height), size in zip(corners, shown, sizes, strict=True)
    )
    return first, second


def _fitted(size: tuple[int, int], room: tuple[int, int]) -> tuple[int, int]:
    scale = min(room[0] / size[0], room[1] / size[1], LARGEST_SCALE)
    width, height = (max(1, round(side * scale)) for side in size)
    return width, height


def _dimmed(image: Image.Image, panel: Panel) -> Image.Image:
    shown = image.resize((panel.width, panel.height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return Image.blend(shown, Image.new("RGB", shown.size, BACKGROUND), DIMMED)


def spread(points: Array, confidence: Array, size: tuple[int, int], count: int) -> Array:
    """Numbers of at most `count` matches, least confident first.

    The image is cut into about `count` cells, and every cell gives one in turn. Which is left to
    chance, always the same: the best alone would tell nothing of the others.
    """
    if len(points) <= count:
        chosen = np.arange(len(points))
    else:
        cell_side = math.sqrt(size[0] * size[1] / max(count, 1))
        cells = (points // cell_side).astype(np.int64)
        chance = np.random.default_rng(0).permutation(len(points))
        order = np.lexsort((chance, cells[:, 0], cells[:, 1]))
        ordered = cells[order]
        starts = np.flatnonzero(np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)])
        rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        chosen = order[np.lexsort((chance[order], rank))[:count]]
    return chosen[np.argsort(confidence[chosen], kind="stable")]


def colours(confidence: Array) -> list[tuple[int, int, int]]:
    """One (red, green, blue) for each confidence."""
    position = np.clip(confidence, 0, 1) * (len(COLOURS) - 1)
    channels = [np.interp(position, np.arange(len(COLOURS)), channel) for channel in COLOURS.T]
    return [(int(r), int(g), int(b)) for r, g, b in np.stack(channels, axis=1).round()]


def _inliers(matches: Matches) -> Array | None:
    """Which matches agree with the first of the poses; None without a pose."""
    poses = (pose for pose in matches.poses.values() if pose is not None)
    return next((pose.inliers for pose in poses), None)


def _with_lines(
    canvas: Image.Image, matches: Matches, panels: tuple[Panel, Panel], shown: Array
) -> Image.Image:
    if not len(shown):
        return canvas
    size = canvas.size
    large = canvas.resize((size[0] * OVERSAMPLING, size[1] * OVERSAMPLING), Image.Resampling.BOX)
    pen = ImageDraw.Draw(large, "RGBA")  # blends what is not opaque
    inliers = _inliers(matches)
    marked = np.ones(len(shown), bool)
    if inliers is not None:
        shown = shown[np.argsort(inliers[shown], kind="stable")]  # inliers on top
        marked = inliers[shown]
    ends = [
        panel.place(points[shown]) * OVERSAMPLING
        for panel, points in zip(panels, (matches.keypoints0, matches.keypoints1), strict=True)
    ]
    tones = colours(matches.confidence[shown])
    radius = POINT_RADIUS * OVERSAMPLING
    for start, end, tone, mark in zip(*ends, tones, marked, strict=True):
        fill = (*tone, LINE_OPACITY) if mark else (*OUTLIER, OUTLIER_OPACITY)
        pen.line([*start, *end], fill=fill, width=round(LINE_WIDTH * OVERSAMPLING))
    for start, end, tone, mark in zip(*ends, tones, marked, strict=True):
        for x, y in (start, end):
            box = [x - radius, y - radius, x + radius, y + radius]
            pen.ellipse(box, fill=tone if mark else OUTLIER)
    return large.resize(size, Image.Resampling.BOX)


def _write_header(canvas: Image.Image, matches: Matches, shown: int, title: str | None) -> None:
    pen = ImageDraw.Draw(canvas)
    count = len(matches)
    pen.rectangle([0, 0, canvas.width, HEADER - 1], fill=BACKGROUND)
    counted = {0: "no matches", 1: "1 match"}.get(count, f"{count:,} matches")
    heading, facts = (counted, []) if title is None else (title, [counted])
    if count:
        facts.append(f"mean confidence {matches.confidence.mean():.2f}")
    if (inliers := _inliers(matches)) is not None:
        facts.append(f"{inliers.sum():,} inliers of the pose in colour")
    if matches.seconds:
        facts.append(f"{matches.seconds:.2f} s")
    if shown < count:
        facts.append(f"{shown:,} shown")
    large, small = ImageFont.load_default(20), ImageFont.load_default(14)
    middle = HEADER / 2
    pen.text((14, middle), heading, fill=TEXT, font=large, anchor="lm")
    after = 14 + pen.textlength(heading, font=large) + 16
    pen.text((after, middle + 2), "   ".join(facts), fill=FAINT, font=small, anchor="lm")
    _draw_legend(pen, canvas.width, small)


def _draw_legend(
    pen: ImageDraw.ImageDraw,
    right: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    width, height = 120, 10
    x, y = right - width - 34, (HEADER - height) // 2
    for i, tone in enumerate(colours(np.linspace(0, 1, width))):
        pen.line([x + i, y, x + i, y + height], fill=tone)
    pen.text((x - 8, HEADER / 2), "confidence 0", fill=FAINT, font=font, anchor="rm")
    pen.text((x + width + 8, HEADER / 2), "1", fill=FAINT, font=font, anchor="lm")
