# SPDX-License-Identifier: Apache-2.0
"""Guided matching: pairs that are turned or zoomed against each other, with the same network.

The network is right for views that are turned by less than about 40 degrees and of about the same
scale. A search at low resolution over rotations and scales finds how the images lie to each other;
then image 1 is aligned with image 0, both are cropped to what they share, and are matched again.

Matrices act on (x, y, 1) with the corner of the first pixel at (0, 0), as PIL has it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from quadtree_attention.images import Array
from quadtree_attention.tasks.match import pose

SEED, TRIALS, SAMPLE = 0, 512, 1024  # of RANSAC, and points that it counts inliers among
STAGES = (  # of the search: rotations, longer sides of both images; until inliers are enough
    (4, ((240, 240),)),
    (4, ((320, 160), (160, 320))),
    (8, ((320, 320), (480, 160), (160, 480))),
)
ENOUGH, FEWEST = 60, 20  # inliers that end the search, and that are worth a second pass
TOLERANCE = 8.0  # pixels of views that a match may be off an affine map
WEAK = 80  # inliers of an affine map: with fewer the first pass is not trusted
MOST_TURN, MOST_ZOOM = 40.0, 1.5  # that the network is right for
PROBE_SIDE, PROBE_FEATURES = 320, 600  # longer side, and SIFT features of either image
PROBE_BINS, PROBE_SHARE = 36, 0.5  # of their orientations: share of the weight in three bins
VERIFIED = 40  # inliers of what replaces the first pass
PLANE = 0.5  # share of matches that agree with a homography, for a third pass along it
ENLARGE = 2.0  # how much finer than the finer of the images views may be
MARGIN = 0.06  # of the shared part, that crops have beyond it
CELL = 32  # sides of views are multiples of it

Guided = Literal["auto", "always", "never"]
GUIDED: tuple[Guided, ...] = get_args(Guided)
Found = tuple[Array, Array, Array]  # points 0, points 1, confidence
Turns = tuple[Array, Array]  # orientations (N,) in degrees and descriptors (N, 128) of features


@dataclass(frozen=True)
class View:
    """A part of an image as the network sees it."""

    pixels: Tensor  # (1, H, W), grey in [0, 1]
    mask: Tensor | None  # (H, W), True where there is an image
    matrix: Array  # (3, 3), from the image as given to the view


def scaling(x: float, y: float) -> Array:
    return np.diag([x, y, 1.0])


def apply(matrix: Array, points: Array) -> Array:
    """Points (N, 2) mapped by a matrix (3, 3)."""
    mapped = points @ matrix[:, :2].T + matrix[:, 2]
    return mapped[:, :2] / mapped[:, 2:]


def corners_of(size: tuple[int, int]) -> Array:
    width, height = size
    return np.array([[0, 0], [width, 0], [width, height], [0, height]], float)


def density(matrix: Array, point: Array) -> float:
    """Local scale of a homography at a point."""
    x, y, w = matrix @ np.append(point, 1)
    J = np.array([matrix[0, :2] * w - x * matrix[2, :2], matrix[1, :2] * w - y * matrix[2, :2]])
    return float(math.sqrt(abs(np.linalg.det(J / w**2))))


def render(image: Image.Image, matrix: Array, size: tuple[int, int]) -> View:
    """The view of `size` pixels that a matrix makes of a grey image."""
    back = np.linalg.inv(matrix)
    finer = density(back, np.array(size) / 2)  # pixels of the image per pixel of the view
    source = image
    if finer > 1:
        width, height = (max(1, round(side / finer)) for side in image.size)
        source = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    back = scaling(source.width / image.width, source.height / image.height) @ back
    entries = (back / back[2, 2]).reshape(9)[:8].tolist()
    how = Image.Transform.PERSPECTIVE
    pixels = source.transform(size, how, entries, Image.Resampling.BICUBIC)
    there = Image.new("L", source.size, 255).transform(size, how, entries)
    mask = torch.from_numpy(np.asarray(there) > 0)
    values = torch.from_numpy(np.asarray(pixels, np.float32) / 255)[None]
    return View(values, None if bool(mask.all()) else mask, matrix)


def turned(image: Image.Image, longer: int, angle: float) -> View:
    """A whole image, turned by an angle in degrees, at a longer side of at most `longer` pixels.

    Small images are enlarged by at most `ENLARGE`.
    """
    scale = min(longer / max(image.size), ENLARGE)
    cos, sin = math.cos(math.radians(angle)) * scale, math.sin(math.radians(angle)) * scale
    matrix = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    corners = apply(matrix, corners_of(image.size))
    low = corners.min(axis=0)
    matrix[:2, 2] = -low
    width, height = np.ceil(corners.max(axis=0) - low - 1e-6).astype(int).tolist()
    return render(image, matrix, (width, height))


def similarity(points0: Array, points1: Array, tolerance: float) -> tuple[Array, Array] | None:
    """An affine map of points 0 to points 1 that starts from a similarity, and its inliers.

    RANSAC over similarities, then affine maps of their inliers by least squares.
    """
    count = len(points0)
    if count < 4:
        return None
    generator = np.random.default_rng(SEED)
    z0, z1 = (points[:, 0] + 1j * points[:, 1] for points in (points0, points1))
    first, second = generator.integers(0, count, (2, TRIALS))
    apart = z0[second] - z0[first]
    fine = abs(apart) > 1e-6
    first, second, apart = first[fine], second[fine], apart[fine]
    if not len(apart):
        return None
    factor = (z1[second] - z1[first]) / apart
    shift = z1[first] - factor * z0[first]
    some = generator.permutation(count)[:SAMPLE]
    near = abs(factor[:, None] * z0[some] + shift[:, None] - z1[some]) < tolerance
    best = int(near.sum(axis=1).argmax())
    a, b = factor[best], shift[best]
    matrix = np.array([[a.real, -a.imag, b.real], [a.imag, a.real, b.imag], [0, 0, 1]])
    inliers = np.linalg.norm(apply(matrix, points0) - points1, axis=1) < tolerance
    for _ in range(4):
        if inliers.sum() < 8:
            break
        ones = np.concatenate([points0, np.ones((count, 1))], axis=1)
        solved = np.linalg.lstsq(ones[inliers], points1[inliers], rcond=None)[0]
        refined = np.concatenate([solved.T, [[0, 0, 1]]])
        close = np.linalg.norm(apply(refined, points0) - points1, axis=1) < tolerance
        if close.sum() < inliers.sum():
            break
        matrix, inliers = refined, close
    return matrix, inliers


def common_turn(images: Sequence[Image.Image]) -> float | None:
    """The angle in degrees, clockwise, that image 1 is turned by as most SIFT features have it.

    None if most features of the two grey images that match do not agree on an angle. It costs a
    fiftieth of matching, and tells turned or zoomed images from such that show different things, or
    the same from far apart, which a search would not help.
    """
    return vote(*map(oriented, images))


def oriented(image: Image.Image) -> Turns | None:
    """Orientations and descriptors of the SIFT features of a grey image; None: fewer than 2."""
    cv2, _ = pose.libraries()
    small = image.copy()
    small.thumbnail((PROBE_SIDE, PROBE_SIDE), Image.Resampling.BICUBIC, reducing_gap=2.0)
    detector = cv2.SIFT_create(nfeatures=PROBE_FEATURES)
    points, found = detector.detectAndCompute(np.asarray(small), None)
    if len(points) < 2:
        return None
    angles = np.array([point.angle for point in points])
    return angles, np.sqrt(found / found.sum(axis=1, keepdims=True).clip(1e-9))


def vote(turns0: Turns | None, turns1: Turns | None) -> float | None:
    """`common_turn` of two images from the results of `oriented`."""
    if turns0 is None or turns1 is None:
        return None
    angles, descriptors = zip(turns0, turns1, strict=True)
    alike = descriptors[0] @ descriptors[1].T
    best = alike.argmax(axis=1)
    rows = np.flatnonzero(alike.argmax(axis=0)[best] == np.arange(len(best)))
    second, first = np.partition(alike[rows], -2, axis=1)[:, -2:].T
    ratio = np.sqrt((1 - first).clip(0) / (1 - second).clip(1e-9))
    apart = (angles[1][best[rows]] - angles[0][rows]) % 360
    bins = (apart * PROBE_BINS / 360).astype(int) % PROBE_BINS
    weights = np.bincount(bins, (1 - ratio).clip(0), PROBE_BINS)
    joined = weights + np.roll(weights, 1) + np.roll(weights, -1)
    if not joined.max() > PROBE_SHARE * weights.sum():
        return None
    return float((joined.argmax() + 0.5) * 360 / PROBE_BINS)


def aligned(images: Sequence[Image.Image], matrix: Array, size: int) -> tuple[View, View] | None:
    """Both images as views of the part that they share, in the frame of image 0.

    Args:
        images: Grey, as given.
        matrix: Map of image 0 to image 1.
        size: Pixels of the longer side of the views, at most.

    Returns:
        The views; None if the map shows nothing of image 1 in image 0.
    """
    if abs(np.linalg.det(matrix)) < 1e-9:
        return None
    back = np.linalg.inv(matrix)
    whole = corners_of(images[1].size)
    depth = np.concatenate([whole, np.ones((4, 1))], axis=1) @ back[2]
    if depth.min() * depth.max() <= 0:  # the horizon of the map is in the image
        return None
    there = apply(back, whole)
    low, high = there.min(axis=0), there.max(axis=0)
    margin = MARGIN * (high - low)
    low = np.maximum(low - margin, 0)
    high = np.minimum(high + margin, images[0].size)
    if (high - low < CELL / 2).any():
        return None
    finest = ENLARGE * max(1.0, density(matrix, (low + high) / 2))
    scale = min(finest, size / float((high - low).max()))
    width, height = (CELL * max(2, math.ceil(side * scale / CELL - 0.3)) for side in high - low)
    to_view = scaling(scale, scale) @ np.array([[1, 0, -low[0]], [0, 1, -low[1]], [0, 0, 1]])
    return (
        render(images[0], to_view, (width, height)),
        render(images[1], to_view @ back, (width, height)),
    )


class Guide:
    """Finds matches of pairs that the network is not right for as they are.

    Args:
        match: Matches a view of image 0 with several of image 1; pixels of the views.
        size: Pixels of the longer side of views that are matched at full detail.
        always: Whether also pairs that the first pass matched well are aligned.
    """

    def __init__(
        self, match: Callable[[View, Sequence[View]], list[Found]], size: int, *, always: bool
    ) -> None:
        self.match, self.size, self.always = match, size, always

    def __call__(
        self, images: Sequence[Image.Image], first: Found
    ) -> tuple[Found, tuple[tuple[int, int], ...]] | None:
        """Better matches than those of the first pass, and the sizes of the views; or None.

        Args:
            images: As given.
            first: Matches of the first pass, in pixels of the images.
        """
        grey = [image.convert("L") for image in images]
        points0, points1 = first[0] + 0.5, first[1] + 0.5
        unit = max(images[1].size) / self.size  # pixels of image 1 per pixel of a view
        start = similarity(points0, points1, TOLERANCE * unit)
        matrix, agreed = (np.eye(3), 0) if start is None else (start[0], int(start[1].sum()))
        if agreed >= WEAK:
            if not self.always and not _is_hard(matrix, images):
                return None
        else:
            if not self.always and common_turn(grey) is None:
                return None
            matrix, found = self.search(grey)
            if found < FEWEST or not (self.always or _is_hard(matrix, images)):
                return None
        return self.refine(grey, matrix, agreed)

    def search(self, images: Sequence[Image.Image]) -> tuple[Array, int]:
        """The map of image 0 to image 1 that most matches agree with at low resolution."""
        best, count = np.eye(3), 0
        for turns, sides in STAGES:
            for side0, side1 in sides:
                views = [turned(images[1], side1, 360 / turns * i) for i in range(turns)]
                for points0, points1, _ in self._matched(turned(images[0], side0, 0), views):
                    unit = 1 / density(views[0].matrix, np.zeros(2))
                    found = similarity(points0, points1, TOLERANCE / 2 * unit)
                    if found is not None and found[1].sum() > count:
                        best, count = found[0], int(found[1].sum())
            if count >= ENOUGH:
                break
        return best, count

    def refine(
        self, images: Sequence[Image.Image], matrix: Array, least: int
    ) -> tuple[Found, tuple[tuple[int, int], ...]] | None:
        """Matches of the images aligned by a map, and again by the homography that these give."""
        best, most = None, max(VERIFIED, least + 1)
        unit = max(images[1].size) / self.size
        for _ in range(2):
            views = aligned(images, matrix, self.size)
            if views is None:
                break
            ((points0, points1, confidence),) = self._matched(views[0], [views[1]])
            near = similarity(points0, points1, TOLERANCE * unit)
            plane = pose.homography(points0, points1, threshold=3 * unit)
            flat = 0 if plane is None else int(plane.inliers.sum())
            agreed = max(flat, 0 if near is None else int(near[1].sum()))
            if agreed < most:
                break
            seen = tuple((v.pixels.shape[2], v.pixels.shape[1]) for v in views)
            best, most = ((points0 - 0.5, points1 - 0.5, confidence), seen), agreed // 2
            if plane is None or flat < PLANE * len(points0):
                break
            matrix = plane.matrix
        return best

    def _matched(self, view0: View, views1: Sequence[View]) -> list[Found]:
        """Matches in the images as given, counted from the corner of the first pixel."""
        back0 = np.linalg.inv(view0.matrix)
        return [
            (apply(back0, p0 + 0.5), apply(np.linalg.inv(view1.matrix), p1 + 0.5), confidence)
            for view1, (p0, p1, confidence) in zip(views1, self.match(view0, views1), strict=True)
        ]


def _is_hard(matrix: Array, images: Sequence[Image.Image]) -> bool:
    """Whether a map turns or zooms by more than the network is right for."""
    turn = math.degrees(math.atan2(matrix[1, 0] - matrix[0, 1], matrix[0, 0] + matrix[1, 1]))
    sides = [max(image.size) for image in images]
    zoom = math.sqrt(abs(np.linalg.det(matrix[:2, :2]))) * sides[0] / sides[1]
    return abs(turn) > MOST_TURN or not 1 / MOST_ZOOM <= zoom <= MOST_ZOOM


def stacked(views: Sequence[View]) -> tuple[Tensor, Tensor | None]:
    """Views as one batch (B, 1, H, W), and what is visible (B, H, W); None: all."""
    height = max(view.pixels.shape[1] for view in views)
    width = max(view.pixels.shape[2] for view in views)
    pixels = torch.zeros(len(views), 1, height, width)
    mask = torch.zeros(len(views), height, width, dtype=torch.bool)
    for i, view in enumerate(views):
        _, h, w = view.pixels.shape
        pixels[i, :, :h, :w] = view.pixels
        mask[i, :h, :w] = True if view.mask is None else view.mask
    return pixels, None if bool(mask.all()) else mask
