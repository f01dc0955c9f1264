# SPDX-License-Identifier: Apache-2.0
"""Tracks: one scene point in all images that show it, from matches of pairs.

The coarse cells of an image are the same in all of its pairs, and the fine stage says where the
centre of a cell is in the other image, to a fraction of a pixel. So all matches of one cell form a
track whose first point is exact and whose other points are each measured from it: nothing has to be
rounded to a grid or averaged over neighbouring points. Cells of all images propose such tracks. The
longest are kept; a proposal that lies where kept tracks are already, in most of its images, is
dropped.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quadtree_attention.images import Array

_STEPS = 64  # per pixel, to recognise the same anchor in several pairs
_BITS = 22  # of a coordinate in such steps


@dataclass(frozen=True, eq=False)
class PairPoints:
    """Verified matches of a pair of images.

    Args:
        image0: Index of image 0.
        image1: Index of image 1.
        points0: (N, 2) pixels of image 0.
        points1: (N, 2) pixels of image 1.
        anchored: (N,), True where the point of image 0 is a cell's centre and the point of image 1
            was measured from it; else it is the other way round.
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
        starts: (T + 1,), where the points of each track begin; the last is their number.
        images: (P,), the image of each point.
        points: (P, 2), pixels.
        indices: (P,), the index of each point among the points of its image.
    """

    starts: Array
    images: Array
    points: Array
    indices: Array

    def __len__(self) -> int:
        return len(self.starts) - 1

    def keypoints(self, image: int) -> Array:
        """The points (K, 2) of an image, by index."""
        chosen = np.flatnonzero(self.images == image)
        return self.points[chosen[np.argsort(self.indices[chosen])]]

    def pairs(self) -> Iterator[tuple[int, int, Array]]:
        """Pairs of images with the indices (M, 2) of their points that share a track."""
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
    """Tracks of verified matches.

    Args:
        pairs: The matches of every pair, each pair once.
        spacing: Of each image, pixels within which a point counts as there already.
    """
    parts = [part for pair in pairs for part in _proposals(pair)]
    if not parts:
        none = np.zeros(0, int)
        return Tracks(np.zeros(1, int), none, np.zeros((0, 2)), none)
    keys, images, points, confidence = (np.concatenate(x) for x in zip(*parts, strict=True))
    order = np.lexsort((images, keys))
    keys, images, points, confidence = (x[order] for x in (keys, images, points, confidence))
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    references, anchors = _unpacked(keys[starts])
    kept = _select(starts, images, points, confidence, references, anchors, spacing)
    return _collected(kept, starts, images, points, references, anchors, len(spacing))


def _proposals(pair: PairPoints) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Key of the track, image, point and confidence of both directions of a pair."""
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
    """Proposals to keep, the longest first."""
    ends = np.append(starts[1:], len(images))
    total = np.add.reduceat(confidence, starts)
    order = np.lexsort((-total, starts - ends))
    scale = 1 / np.asarray(spacing)
    places = np.rint(points * scale[images, None]).astype(np.int64)
    anchor_places = np.rint(anchors * scale[references, None]).astype(np.int64)

    def packed(image: Array, place: Array) -> Array:
        return (image.astype(np.int64) << 2 * _BITS) | (place[:, 0] << _BITS) | place[:, 1]

    of_points, of_anchors = packed(images, places).tolist(), None
    of_anchors = packed(references, anchor_places).tolist()
    taken: set[int] = set()
    kept = []
    for proposal, begin, end in zip(
        order.tolist(), starts[order].tolist(), ends[order].tolist(), strict=True
    ):
        cells = [of_anchors[proposal], *of_points[begin:end]]
        new = [cell for cell in cells if cell not in taken]
        if 2 * len(new) >= len(cells):
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
    # By image within each track, so that pairs come out with the smaller index first
    track = np.repeat(np.arange(len(chosen)), lengths)
    order = np.lexsort((of, track))
    of, at = of[order], at[order]
    by_image = np.argsort(of, kind="stable")
    counts = np.bincount(of, minlength=count)
    indices = np.empty(len(of), int)
    indices[by_image] = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Tracks(first, of.astype(int), at.astype(float), indices)
