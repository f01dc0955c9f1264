# SPDX-License-Identifier: Apache-2.0
"""Pictures of matches: two images, and lines between corresponding points."""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from quadtree_attention.checks import at_least
from quadtree_attention.errors import OptionError
from quadtree_attention.images import Array, ImageLike, to_image
from quadtree_attention.tasks.match.result import Matches
from quadtree_attention.viz.canvas import Canvas, Scale, lay_out, resized
from quadtree_attention.viz.palette import BACKGROUND, CONFIDENCE, ramp

MAX_LINES = 200
OVERSAMPLING = 2  # factor of the drawn size; scaling down smooths lines
DIMMED = 0.25  # share of the background colour in the images, for contrast with the lines
LINE_OPACITY, LINE_WIDTH, POINT_RADIUS = 190, 1.0, 2.2
OUTLIER, OUTLIER_OPACITY = (150, 150, 150), 90  # matches that are outliers of the pose


def draw(
    matches: Matches,
    *,
    title: str | None = None,
    images: tuple[ImageLike, ImageLike] | None = None,
    max_lines: int = MAX_LINES,
) -> Image.Image:
    """Draw the two images side by side (very wide ones stacked), with matches as lines.

    Colours show confidence, on the scale from 0 to 1. For matches with poses, inliers are coloured
    and outliers are grey.

    Args:
        matches: The result to draw.
        title: Text above the picture; None: the number of matches.
        images: The images, if `matches` has none.
        max_lines: Maximum number of lines, spread evenly over image 0 for any confidence.

    Raises:
        OptionError: There are no images, or `max_lines` is negative.
    """
    at_least(0, max_lines=max_lines)
    pictures = matches.images if images is None else tuple(map(to_image, images))
    if len(pictures) != 2:
        raise OptionError("these matches have no images; pass images=(image0, image1)")
    canvas = Canvas(lay_out([picture.size for picture in pictures]))
    for i, panel in enumerate(canvas.panels):
        darkness = Image.new("RGB", panel.size, BACKGROUND)
        canvas.paste(i, Image.blend(resized(pictures[i], panel.size), darkness, DIMMED))
    shown = spread(matches.keypoints0, matches.confidence, pictures[0].size, max_lines)
    _draw_lines(canvas, matches, shown)
    heading, facts = words(matches, len(shown))
    told = facts if title is None else [heading, *facts]
    canvas.header(title or heading, told, Scale(CONFIDENCE, 0, 1, "confidence"))
    return canvas.picture


def words(matches: Matches, shown: int) -> tuple[str, list[str]]:
    """Return the number of matches as text, and facts about them."""
    count, facts = len(matches), []
    if count:
        facts.append(f"mean confidence {matches.confidence.mean():.2f}")
    if (inliers := _inliers(matches)) is not None:
        facts.append(f"{inliers.sum():,} inliers of the pose in colour")
    if matches.seconds:
        facts.append(f"{matches.seconds:.2f} s")
    if shown < count:
        facts.append(f"{shown:,} shown")
    return {0: "no matches", 1: "1 match"}.get(count, f"{count:,} matches"), facts


def spread(points: Array, confidence: Array, size: tuple[int, int], count: int) -> Array:
    """Indices of at most `count` matches, least confident first.

    The image is divided into about `count` cells, and each cell contributes one match in turn,
    drawn at random with a fixed seed. The best matches only would not be representative.
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


def _inliers(matches: Matches) -> Array | None:
    """Inlier mask of the first pose; None without a pose."""
    poses = (pose for pose in matches.poses.values() if pose is not None)
    return next((pose.inliers for pose in poses), None)


def _draw_lines(canvas: Canvas, matches: Matches, shown: Array) -> None:
    size = canvas.picture.size
    large = ImageOps.scale(canvas.picture, OVERSAMPLING, Image.Resampling.BOX)
    pen = ImageDraw.Draw(large, "RGBA")  # blends transparent colours
    inliers = _inliers(matches)
    marked = np.ones(len(shown), bool)
    if inliers is not None:
        shown = shown[np.argsort(inliers[shown], kind="stable")]  # inliers on top
        marked = inliers[shown]
    views = zip(canvas.panels, (matches.keypoints0, matches.keypoints1), strict=True)
    ends = [panel.place(points[shown]) * OVERSAMPLING for panel, points in views]
    tones = [tuple(tone) for tone in ramp(CONFIDENCE, matches.confidence[shown]).tolist()]
    radius = POINT_RADIUS * OVERSAMPLING
    for start, end, tone, mark in zip(*ends, tones, marked, strict=True):
        fill = (*tone, LINE_OPACITY) if mark else (*OUTLIER, OUTLIER_OPACITY)
        pen.line([*start, *end], fill=fill, width=round(LINE_WIDTH * OVERSAMPLING))
    for start, end, tone, mark in zip(*ends, tones, marked, strict=True):
        for centre in (start, end):
            pen.circle(centre, radius, fill=tone if mark else OUTLIER)
    canvas.picture = large.resize(size, Image.Resampling.BOX)
