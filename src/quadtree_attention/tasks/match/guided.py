# SPDX-License-Identifier: Apache-2.0
"""Guided matching: pairs with a large relative rotation or scale, with the same network.

The network is trained for relative rotations of less than about 40 degrees and about equal scales.
A search at low resolution over rotations and scales estimates an affine map between the images.
Then image 1 is aligned with image 0, and both are cropped to their overlap and matched again.

Matrices act on (x, y, 1); the corner of the first pixel is (0, 0), as in PIL.
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

SEED, TRIALS, SAMPLE = 0, 512, 1024  # of RANSAC: seed, iterations, points whose inliers are counted
STAGES = (  # of the search: rotations, longer sides of both images; it stops at enough inliers
    (4, ((240, 240),)),
    (4, ((320, 160), (160, 320))),
    (8, ((320, 320), (480, 160), (160, 480))),
)
ENOUGH, FEWEST = 60, 20  # inliers that end the search; minimum number for a second pass
TOLERANCE = 8.0  # maximum residual of a match to an affine map, in pixels of views
WEAK = 80  # inliers of an affine map: with fewer, the first pass is replaced
MOST_TURN, MOST_ZOOM = 40.0, 1.5  # limits of rotation (degrees) and scale without alignment
PROBE_SIDE, PROBE_FEATURES = 320, 600  # longer side, and SIFT features of either image
PROBE_BINS, PROBE_SHARE = 36, 0.5  # of orientations: minimum weight in three bins
VERIFIED = 40  # minimum inliers of a result that replaces the first pass
PLANE = 0.5  # share of inliers of a homography that leads to a third pass, aligned by it
ENLARGE = 2.0  # maximum scale of views relative to the finer image
MARGIN = 0.06  # margin of crops, relative to the overlap
CELL = 32  # sides of views are multiples of it

Guided = Literal["auto", "always", "never"]
GUIDED: tuple[Guided, ...] = get_args(Guided)
Found = tuple[Array, Array, Array]  # points 0, points 1, confidence
Turns = tuple[Array, Array]  # orientations (N,) in degrees and descriptors (N, 128) of features


@dataclass(frozen=True)
class View:
    """A part of an image, resampled as input of the network."""

    pixels: Tensor  # (1, H, W), grey in [0, 1]
    mask: Tensor | None  # (H, W), True inside the image
    matrix: Array  # (3, 3), from the original image to the view


def scaling(x: float, y: float) -> Array:
    return np.diag([x, y, 1.0])


def apply(matrix: Array, points: Array) -> Array:
    """Map points (N, 2) by a matrix (3, 3)."""
    mapped = points @ matrix[:, :2].T + matrix[:, 2]
    return mapped[:, :2] / mapped[:, 2:]


def corners_of(size: tuple[int, int]) -> Array:
    width, height = size
    return np.array([[0, 0], [width, 0], [width, height], [0, height]], float)


def density(matrix: Array, point: Array) -> float:
    """Return the local scale of a homography at a point."""
    x, y, w = matrix @ np.append(point, 1)
    J = np.array([matrix[0, :2] * w - x * matrix[2, :2], matrix[1, :2] * w - y * matrix[2, :2]])
    return float(math.sqrt(abs(np.linalg.det(J / w**2))))


def render(image: Image.Image, matrix: Array, size: tuple[int, int]) -> View:
    """Resample a grey image by a matrix to a view of `size`."""
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
    """Rotate a whole image by an angle in degrees, with a longer side of at most `longer` pixels.

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
    """Estimate an affine map of points 0 to points 1; return it with its inliers.

    RANSAC over similarities is followed by least-squares affine maps of their inliers.
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
    """Return the rotation of image 1 in degrees, clockwise, by a vote of SIFT features.

    None if most matching features of the two grey images do not agree on an angle. The vote costs a
    fiftieth of matching. It distinguishes rotated or scaled pairs from pairs of different scenes or
    distant viewpoints, for which a search would not help.
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
    """Return `common_turn` of two images from the results of `oriented`."""
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
    """Return both images as views of their overlap, in the frame of image 0.

    Args:
        images: Original images, grey.
        matrix: Map of image 0 to image 1.
        size: Maximum longer side of the views in pixels.

    Returns:
        The views; None if the images do not overlap under the map.
    """
    if abs(np.linalg.det(matrix)) < 1e-9:
        return None
    back = np.linalg.inv(matrix)
    whole = corners_of(images[1].size)
    depth = np.concatenate([whole, np.ones((4, 1))], axis=1) @ back[2]
    if depth.min() * depth.max() <= 0:  # the horizon of the map crosses the image
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
    """Matching of pairs with a large relative rotation or scale.

    Args:
        match: Function that matches a view of image 0 with several views of image 1, in pixels of
            the views.
        size: Longer side in pixels of views matched at full resolution.
        always: Align also pairs that the first pass matched well.
    """

    def __init__(
        self, match: Callable[[View, Sequence[View]], list[Found]], size: int, *, always: bool
    ) -> None:
        self.match, self.size, self.always = match, size, always

    def __call__(
        self, images: Sequence[Image.Image], first: Found
    ) -> tuple[Found, tuple[tuple[int, int], ...]] | None:
        """Return matches that replace those of the first pass, and the sizes of the views; or None.

        Args:
            images: Original images.
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
        """The map of image 0 to image 1 with most inliers at low resolution, and their number."""
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
        """Match the images aligned by a map, then aligned by the homography of these matches."""
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
        """Return matches in the original images, relative to the corner of the first pixel."""
        back0 = np.linalg.inv(view0.matrix)
        return [
            (apply(back0, p0 + 0.5), apply(np.linalg.inv(view1.matrix), p1 + 0.5), confidence)
            for view1, (p0, p1, confidence) in zip(views1, self.match(view0, views1), strict=True)
        ]


def _is_hard(matrix: Array, images: Sequence[Image.Image]) -> bool:
    """Return True if a map has more rotation or scale than `MOST_TURN` or `MOST_ZOOM`."""
    turn = math.degrees(math.atan2(matrix[1, 0] - matrix[0, 1], matrix[0, 0] + matrix[1, 1]))
    sides = [max(image.size) for image in images]
    zoom = math.sqrt(abs(np.linalg.det(matrix[:2, :2]))) * sides[0] / sides[1]
    return abs(turn) > MOST_TURN or not 1 / MOST_ZOOM <= zoom <= MOST_ZOOM


def stacked(views: Sequence[View]) -> tuple[Tensor, Tensor | None]:
    """Stack views to a batch (B, 1, H, W), and their masks (B, H, W); None: all visible."""
    height = max(view.pixels.shape[1] for view in views)
    width = max(view.pixels.shape[2] for view in views)
    pixels = torch.zeros(len(views), 1, height, width)
    mask = torch.zeros(len(views), height, width, dtype=torch.bool)
    for i, view in enumerate(views):
        _, h, w = view.pixels.shape
        pixels[i, :, :h, :w] = view.pixels
        mask[i, :h, :w] = True if view.mask is None else view.mask
    return pixels, None if bool(mask.all()) else mask
