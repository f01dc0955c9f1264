# SPDX-License-Identifier: Apache-2.0
"""Extension of tracks by the cameras of a model.

The points of a model are projected to the photographs in which they have no observation, and the
patches of their anchors are aligned there as in `refine`. The affine map of a patch follows from
the projections of the points around it. Observations that the matches miss are found, and those
that the mapper rejects are found again at the right place.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from quadtree_attention.images import Array
from quadtree_attention.sfm.database import CORNER, LEAST_MATCHES
from quadtree_attention.sfm.refine import PHOTOGRAPHS, REACH, SPACING, Pixels, align, local_maps
from quadtree_attention.sfm.tracks import Tracks, assembled

CORRELATION = 0.8  # minimum, of two aligned patches; no match confirms them
CLOSE = 1.0  # maximum distance of an observation from the projection, in input pixels
# Photographs in which the points of one are looked for, those with most points in common. Of 200
# photographs of one place, all pairs of photographs would take longer than matching
MOST_TARGETS = 20


def extend_tracks(
    models: Sequence[Any], tracks: Tracks, paths: Sequence[str], scales: Sequence[float]
) -> Tracks:
    """Add observations to the tracks of points, and remove those that a model rejects.

    Tracks without a point remain as they are, and so do observations in photographs that are in no
    model.

    Args:
        models: Models of the tracks; the ids of their images are indices of photographs plus 1.
        tracks: The tracks.
        paths: Files of the photographs.
        scales: Pixels of each photograph per pixel of the network's input.
    """

    @lru_cache(PHOTOGRAPHS)
    def pixels(image: int) -> Pixels:
        return Pixels.of(paths[image], scales[image])

    point_of, count = np.full(len(tracks.images), -1), 0
    added: list[tuple[Array, Array, Array, Array]] = []
    for model in models:
        points = _Points(model, tracks, point_of)
        point_of[points.rows] = count + points.numbers
        for source, target, chosen in points.candidates():
            found, rows, correlation = points.aligned(source, target, chosen, pixels)
            number = count + chosen[rows]
            added.append((number, np.full(len(rows), target), found, correlation))
        count += len(points.places)
    registered = [number - 1 for model in models for number in model.reg_image_ids()]
    label, rows = _labelled(tracks, point_of, count, registered)
    kept = label, tracks.images[rows], tracks.points[rows], np.ones(len(rows))
    track, images, places, weights = (np.concatenate(x) for x in zip(kept, *added, strict=True))
    return assembled(track, images, places, weights, [SPACING * scale for scale in scales])


class _Points:
    """The points of a model with their observations.

    Attributes:
        places: (N, 3).
        rows: (M,), observations as rows of the tracks, at most one per point and photograph.
        numbers: (M,), the index of the point of each observation.
        anchors: (N,), the observation of each point that the others are aligned with.
        images: Indices of the photographs of the model.
    """

    def __init__(self, model: Any, tracks: Tracks, taken: Array) -> None:
        """Read a model, without the observations that are `taken` (not -1) by another one."""
        self.model, self.tracks = model, tracks
        self.images = sorted(number - 1 for number in model.reg_image_ids())
        rows, ids = [np.zeros(0, int)], [np.zeros(0, int)]
        for image in self.images:
            of_image = np.flatnonzero(tracks.images == image)
            of_image = of_image[np.argsort(tracks.indices[of_image])]
            seen = model.images[image + 1].points2D
            found = [(k, p.point3D_id) for k, p in enumerate(seen) if p.has_point3D()]
            indices, of_points = np.array(found, int).reshape(-1, 2).T
            rows.append(of_image[indices])
            ids.append(of_points)
        all_rows, all_ids = np.concatenate(rows), np.concatenate(ids)
        free = taken[all_rows] < 0
        all_rows, (used, numbers) = all_rows[free], np.unique(all_ids[free], return_inverse=True)
        self.places = np.array([model.points3D[i].xyz for i in used.tolist()]).reshape(-1, 3)
        is_anchor = np.zeros(len(tracks.images), bool)
        is_anchor[tracks.anchors] = True
        order = np.lexsort((all_rows, ~is_anchor[all_rows], numbers))
        all_rows, numbers = all_rows[order], numbers[order]
        self.anchors = all_rows[np.unique(numbers, return_index=True)[1]]
        keys = numbers * (tracks.images.max(initial=0) + 1) + tracks.images[all_rows]
        first = np.sort(np.unique(keys, return_index=True)[1])
        self.rows, self.numbers = all_rows[first], numbers[first]

    def candidates(self) -> Iterator[tuple[int, int, Array]]:
        """Yield two photographs and the points with an anchor in the first, none in the second.

        The photographs have at least `LEAST_MATCHES` points in common, and the second is one of the
        `MOST_TARGETS` that have most in common with the first.
        """
        images = self.tracks.images
        points_of = {i: self.numbers[images[self.rows] == i] for i in self.images}
        for source in self.images:
            mine = np.flatnonzero(images[self.anchors] == source)
            here = np.zeros(len(self.places), bool)
            here[points_of[source]] = True
            others = [target for target in self.images if target != source]
            common = {target: here[points_of[target]].sum() for target in others}
            others.sort(key=lambda target: -common[target])  # stable: equal ones by their order
            for target in sorted(others[:MOST_TARGETS]):
                if common[target] >= LEAST_MATCHES:
                    chosen = np.setdiff1d(mine, points_of[target])
                    chosen = chosen[self._projected(target, chosen)[1]]
                    if len(chosen):
                        yield source, target, chosen

    def aligned(
        self, source: int, target: int, chosen: Array, pixels: Any
    ) -> tuple[Array, Array, Array]:
        """Return observations (K, 2) in the target, the indices of their points, and correlations.

        Args:
            source: The photograph of the anchors.
            target: The other photograph.
            chosen: Points whose projections are inside the target.
            pixels: Function that returns the pixels of a photograph.
        """
        image0, image1 = pixels(source), pixels(target)
        around = self.tracks.images[self.rows] == source
        projected, inside = self._projected(target, self.numbers[around])
        seen = self.tracks.points[self.rows[around]][inside]
        corners = image0.inner(self.tracks.points[self.anchors[chosen]])
        near = (image0.inner(seen), image1.inner(projected[inside]))
        _, maps, good = local_maps(corners, *near, REACH * image0.unit)
        rows = good.nonzero()[:, 0]
        expected = image1.inner(self._projected(target, chosen[rows.numpy()])[0])
        found, correlation = align(image0, image1, corners[rows], expected, maps[rows])
        close = (found - expected).norm(dim=1) <= CLOSE * image1.unit
        close &= correlation >= CORRELATION
        return image1.outer(found[close]), rows[close].numpy(), correlation[close].double().numpy()

    def _projected(self, image: int, points: Array) -> tuple[Array, Array]:
        """Return the pixels (N, 2) of points in a photograph, and True for those inside it."""
        view = self.model.images[image + 1]
        camera = self.model.cameras[view.camera_id]
        motion = view.cam_from_world().matrix()
        local = self.places[points] @ motion[:, :3].T + motion[:, 3]
        inside = local[:, 2] > 0
        pixels = np.full((len(points), 2), -1.0)
        pixels[inside] = np.reshape(camera.img_from_cam(local[inside]), (-1, 2)) - CORNER
        last = np.array([camera.width, camera.height]) - 1
        within: Array = np.all((pixels >= 0) & (pixels <= last), axis=1)
        return pixels, within


def _labelled(
    tracks: Tracks, point_of: Array, count: int, registered: Sequence[int]
) -> tuple[Array, Array]:
    """Return the track of each observation that is kept, anchors first, and its row.

    Args:
        tracks: The tracks.
        point_of: (P,), the point of each observation, or -1.
        count: Number of points; tracks without a point are numbered from here on.
        registered: Photographs of all models.
    """
    track_of = np.repeat(np.arange(len(tracks)), np.diff(tracks.starts))
    label = np.arange(len(tracks)) + count
    label[track_of[point_of >= 0]] = point_of[point_of >= 0]
    rejected = (point_of < 0) & (label[track_of] < count) & np.isin(tracks.images, registered)
    of_row = np.where(point_of >= 0, point_of, label[track_of])
    later = np.ones(len(point_of), bool)
    later[tracks.anchors] = False
    rows = np.lexsort((np.arange(len(later)), later, of_row))
    rows = rows[~rejected[rows]]
    keys = of_row[rows] * (tracks.images.max(initial=0) + 1) + tracks.images[rows]
    rows = rows[np.sort(np.unique(keys, return_index=True)[1])]
    return of_row[rows], rows
