# SPDX-License-Identifier: Apache-2.0
"""Tracks: observations of one scene point in several images, from matches of pairs.

The coarse cells of an image are the same in all of its pairs, and the fine stage estimates the
position of a cell's centre in the other image with sub-pixel accuracy. All matches of one cell
therefore form a track: its first point is exact, and the others are refined from it, without
rounding to a grid or averaging. Cells of all images propose tracks. The longest are kept; a
proposal close to kept tracks in most of its images is dropped.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quadtree_attention.images import Array

_STEPS = 64  # per pixel, to identify the same anchor in several pairs
_BITS = 22  # of a coordinate in such steps


@dataclass(frozen=True, eq=False)
class PairPoints:
    """Verified matches of a pair of images.

    Args:
        image0: Index of image 0.
        image1: Index of image 1.
        points0: (N, 2) pixels of image 0.
        points1: (N, 2) pixels of image 1.
        anchored: (N,), True if the point of image 0 is the centre of a cell and the point of image
            1 was refined from it; False for the opposite.
        confidence: (N,).
    """

    image0: int
    image1: int
    points0: Array
    points1: Array
    anchored: Array
    confidence: Array


@dataclass(frozen=True, eq=False)
class Tracks:
    """Points of images, sorted by track.

    Args:
        starts: (T + 1,), start of the points of each track; the last entry is their number.
        images: (P,), the image of each point.
        points: (P, 2), pixels.
        indices: (P,), the index of each point among the points of its image.
        anchors: (T,), the point of each track that the others were refined from.
    """

    starts: Array
    images: Array
    points: Array
    indices: Array
    anchors: Array

    def __len__(self) -> int:
        return len(self.starts) - 1

    def keypoints(self, image: int) -> Array:
        """Return the points (K, 2) of an image, by index."""
        chosen = np.flatnonzero(self.images == image)
        return self.points[chosen[np.argsort(self.indices[chosen])]]

    def pairs(self) -> Iterator[tuple[int, int, Array]]:
        """Yield pairs of images with the indices (M, 2) of their points that share a track."""
        lengths = np.diff(self.starts)
        rows: list[Array] = []
        for length in np.unique(lengths):
            first, second = np.triu_indices(length, 1)
            begin = self.starts[:-1][lengths == length]
            rows += [
                np.stack([(begin[:, None] + first).ravel(), (begin[:, None] + second).ravel()], 1)
            ]
        both = np.concatenate(rows) if rows else np.zeros((0, 2), int)
        both = both[np.lexsort((self.indices[both[:, 0]], *self.images[both].T[::-1]))]
        numbers = self.images[both]
        ends = np.flatnonzero((np.diff(numbers, axis=0) != 0).any(axis=1)) + 1
        for part in np.split(both, ends) if len(both) else ():
            yield *map(int, self.images[part[0]]), self.indices[part]


def build(pairs: Iterable[PairPoints], spacing: Sequence[float]) -> Tracks:
    """Build tracks from verified matches.

    Args:
        pairs: The matches of every pair, each pair once.
        spacing: Of each image, pixels within which a point counts as there already.
    """
    parts = [part for pair in pairs for part in _proposals(pair)]
    if not parts:
        none = np.zeros(0, int)
        return Tracks(np.zeros(1, int), none, np.zeros((0, 2)), none, none)
    keys, images, points, confidence = (np.concatenate(x) for x in zip(*parts, strict=True))
    order = np.lexsort((images, keys))
    keys, images, points, confidence = (x[order] for x in (keys, images, points, confidence))
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    references, anchors = _unpacked(keys[starts])
    kept = _select(starts, images, points, confidence, references, anchors, spacing)
    return _collected(kept, starts, images, points, references, anchors, len(spacing))


def _proposals(pair: PairPoints) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Yield key of the track, image, point and confidence for both directions of a pair."""
    for there, reference, other, source, target in (
        (pair.anchored, pair.image0, pair.image1, pair.points0, pair.points1),
        (~pair.anchored, pair.image1, pair.image0, pair.points1, pair.points0),
    ):
        count = int(there.sum())
        yield (
            _packed(reference, source[there]),
            np.full(count, other, np.int32),
            target[there].astype(np.float32),
            pair.confidence[there].astype(np.float32),
        )


def _packed(image: int, points: Array) -> Array:
    steps = np.rint(points * _STEPS).astype(np.int64) + _STEPS  # cells begin at -0.5
    return (image << 2 * _BITS) | (steps[:, 0] << _BITS) | steps[:, 1]


def _unpacked(keys: Array) -> tuple[Array, Array]:
    low = (1 << _BITS) - 1
    steps = np.stack([keys >> _BITS & low, keys & low], axis=1) - _STEPS
    return (keys >> 2 * _BITS).astype(np.int32), steps / _STEPS


def _select(
    starts: Array,
    images: Array,
    points: Array,
    confidence: Array,
    references: Array,
    anchors: Array,
    spacing: Sequence[float],
) -> list[int]:
    """Select the proposals to keep, the longest first."""
    ends = np.append(starts[1:], len(images))
    total = np.add.reduceat(confidence, starts)
    order = np.lexsort((-total, starts - ends))
    of_points = _places(images, points, spacing).tolist()
    of_anchors = _places(references, anchors, spacing).tolist()
    ranges = zip(order.tolist(), starts[order].tolist(), ends[order].tolist(), strict=True)
    return _unclaimed((i, [of_anchors[i], *of_points[begin:end]]) for i, begin, end in ranges)


def _places(images: Array, points: Array, spacing: Sequence[float]) -> Array:
    """Return an integer (N,) per image and position of each point, in steps of `spacing`."""
    place = np.rint(points / np.asarray(spacing)[images, None]).astype(np.int64)
    return (images.astype(np.int64) << 2 * _BITS) | (place[:, 0] << _BITS) | place[:, 1]


def _unclaimed(proposals: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """Return proposals, in order, with at least half of their places unoccupied by kept ones."""
    taken: set[int] = set()
    kept = []
    for proposal, places in proposals:
        new = [place for place in places if place not in taken]
        if 2 * len(new) >= len(places):
            taken.update(new)
            kept.append(proposal)
    return kept


def _collected(
    kept: Sequence[int],
    starts: Array,
    images: Array,
    points: Array,
    references: Array,
    anchors: Array,
    count: int,
) -> Tracks:
    ends = np.append(starts[1:], len(images))
    chosen = np.sort(np.asarray(kept, int))
    lengths = ends[chosen] - starts[chosen] + 1
    first = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.repeat(starts[chosen] - first[:-1] - 1, lengths) + np.arange(first[-1])
    is_anchor = np.zeros(first[-1], bool)
    is_anchor[first[:-1]] = True
    found = np.where(is_anchor, 0, rows)
    of = np.where(is_anchor, np.repeat(references[chosen], lengths), images[found])
    at = np.where(is_anchor[:, None], np.repeat(anchors[chosen], lengths, axis=0), points[found])
    # By image within each track, so that pairs have the smaller index first
    track = np.repeat(np.arange(len(chosen)), lengths)
    order = np.lexsort((of, track))
    of, at = of[order], at[order]
    anchored = np.flatnonzero(is_anchor[order])
    return Tracks(first, of.astype(int), at.astype(float), _indices(of, count), anchored)


def _indices(images: Array, count: int) -> Array:
    """Return the index (P,) of each point among the points of its image."""
    by_image = np.argsort(images, kind="stable")
    counts = np.bincount(images, minlength=count)
    indices = np.empty(len(images), int)
    indices[by_image] = np.arange(len(images)) - np.repeat(np.cumsum(counts) - counts, counts)
    return indices


def assembled(
    track: Array, images: Array, points: Array, confidence: Array, spacing: Sequence[float]
) -> Tracks:
    """Assemble tracks from points; of tracks at the same places, the longest are kept.

    Args:
        track: (P,), the index of the track of each point; the first point is the anchor.
        images: (P,), at most one point per image in a track.
        points: (P, 2), pixels.
        confidence: (P,); of two tracks of the same length the one with the larger sum is kept.
        spacing: Of each image, pixels within which a point counts as there already.
    """
    first = np.zeros(len(track), bool)
    first[np.unique(track, return_index=True)[1]] = True
    order = np.lexsort((images, track))
    track, images, points, confidence, first = (
        x[order] for x in (track, images, points, confidence, first)
    )
    starts = np.flatnonzero(np.diff(track, prepend=-1))
    lengths = np.diff(np.append(starts, len(track)))
    total = np.add.reduceat(confidence, starts) if len(starts) else confidence
    longest = np.lexsort((-total, -lengths))
    longest = longest[lengths[longest] > 1]
    places = _places(images, points, spacing).tolist()
    ranges = zip(longest.tolist(), starts[longest].tolist(), lengths[longest].tolist(), strict=True)
    kept = np.sort(_unclaimed((i, places[begin : begin + n]) for i, begin, n in ranges)).astype(int)
    rows = np.flatnonzero(np.isin(np.repeat(np.arange(len(starts)), lengths), kept))
    ends = np.concatenate([[0], np.cumsum(lengths[kept])])
    of = images[rows].astype(int)
    anchored = np.flatnonzero(first[rows])
    return Tracks(ends, of, points[rows].astype(float), _indices(of, len(spacing)), anchored)
