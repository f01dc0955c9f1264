# SPDX-License-Identifier: Apache-2.0
"""Matching many pairs of few photographs: the CNN runs once per photograph, points are anchored.

Matches of a pair consist of two halves of the same length. Row i of the first half has the centre
of a coarse cell in image 0 and the point in image 1 refined from it; row i of the second half is
the same match, refined from the cell of image 1.

Quarter turns do not change the cells of a photograph, and the network supports rotations of up to
45 degrees. If the inlier share of a pair is below `SURE`, and SIFT features have a common rotation,
the pair is matched again with one photograph rotated back by quarter turns.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from quadtree_attention.images import Array, image_size, to_image
from quadtree_attention.models.matcher import COARSE_STRIDE, LoFTR, Maps
from quadtree_attention.sfm.verify import agreeing
from quadtree_attention.tasks.cluster import Cluster, Outcome
from quadtree_attention.tasks.contract import Prepared, Source
from quadtree_attention.tasks.match.guided import Guided, Turns, oriented, vote
from quadtree_attention.tasks.match.predictor import SIZE, Matcher
from quadtree_attention.tasks.match.result import Matches
from quadtree_attention.tasks.store import Store

Size = tuple[int, int]
SURE = 0.6  # minimum inlier share of a pair that is not matched again
CACHE_BYTES = 2**30  # cache of maps; an image of 640x480 pixels takes 25 MB
MOST_TURNS = 200  # photographs whose SIFT features are cached, 0.3 MB each
SOME = 500  # matches of a pair used to estimate its inlier share


@dataclass(frozen=True)
class PreparedPair(Prepared):
    """A pair whose pixels are read only if the maps of an image are not in the cache."""

    paths: tuple[str, str] = ("", "")
    sizes: tuple[Size, ...] = ()  # width and height of the photographs, upright
    seen: tuple[Size, ...] = ()  # sizes of the network's inputs


@dataclass(frozen=True)
class PreprocessPair:
    """Preprocessing of two photographs: their sizes and the sizes of the network's inputs."""

    size: int

    def __call__(self, path0: Any, path1: Any) -> PreparedPair:
        paths = str(path0), str(path1)
        sizes = tuple(image_size(path) for path in paths)
        seen = tuple(seen_size(size, self.size) for size in sizes)
        return PreparedPair((), (), seen, paths=paths, sizes=sizes, seen=seen)


def seen_size(size: tuple[int, int], longer: int) -> tuple[int, int]:
    """Return width and height of the network's input, with a longer side of at most `longer`.

    They are whole cells plus one pixel, so that the first and last cells are at the edges.
    """
    scale = min(1.0, longer / max(size))
    width, height = (
        max(2, round((side * scale - 1) / COARSE_STRIDE)) * COARSE_STRIDE + 1 for side in size
    )
    return width, height


class PairMatcher(Matcher):
    """Matches pairs of image files and refines every match in both images.

    Args:
        network: The network.
        card: Its card.
        size: Longer side of the network's input in pixels.
        cache: Size of the cache of maps in bytes.
        guided: Matching of photographs with a relative rotation. "auto": if the inlier share is
            low, the pair is matched again, rotated by quarter turns according to SIFT features;
            "always": all pairs; "never".
        **common: Arguments of `Matcher`.
    """

    def __init__(
        self,
        network: nn.Module,
        card: dict[str, Any],
        *,
        size: int | None = None,
        cache: int = CACHE_BYTES,
        guided: Guided = "auto",
        **common: Any,
    ) -> None:
        super().__init__(network, card, size=size, guided=guided, **common)
        self.guided, self.guide = (
            guided,
            None,
        )  # replaced by quarter turns, which keep the cells
        self.options["points"] = "anchored"
        self.preprocess = PreprocessPair(SIZE if size is None else size)
        self.cache = _Cache(cache)
        self.turns: dict[str, Turns | None] = {}
        self.flat = set[str]()  # photographs of one grey value, whose maps only depend on borders

    def forward(self, batch: Sequence[Prepared]) -> list[dict[str, Tensor]]:
        maps = [_stacked([self.maps(*_seen(item)[side]) for item in batch]) for side in range(2)]
        found = self._loftr.anchored(*maps, threshold=self.threshold)
        pair = found.pop("batch_indexes").cpu()
        arrays = {name: values.cpu() for name, values in found.items()}
        return [
            {name: values[pair == i] for name, values in arrays.items()} for i in range(len(batch))
        ]

    def finish(self, raw: dict[str, Tensor], item: Prepared) -> Matches:
        assert isinstance(item, PreparedPair)
        if self.flat.intersection(item.paths):
            return _matches({name: values[:0] for name, values in raw.items()}, item)
        matches = _matches(raw, item)
        if self.guided == "never":
            return matches
        scale = (
            sum(max(size) / max(seen) for size, seen in zip(item.sizes, item.seen, strict=True)) / 2
        )
        if self.guided == "auto" and seems_sure(matches, scale):
            return matches
        angle = vote(*map(self.features, item.paths))
        turn = 0 if angle is None else round(angle / 90) % 4
        if not turn:
            return matches
        agreed = agreeing(matches, scale)
        count = 0 if agreed is None else int(agreed.sum())
        if self.guided == "auto" and 0 < count >= SURE * len(matches):
            return matches
        first, second = _seen(item)
        found = self._loftr.anchored(
            self.maps(*first), self.maps(*second, turn), threshold=self.threshold
        )
        turned = _matches({name: values.cpu() for name, values in found.items()}, item, turn)
        better = agreeing(turned, scale)
        return turned if better is not None and better.sum() > count else matches

    @property
    def _loftr(self) -> LoFTR:
        assert isinstance(self.network, LoFTR)
        return self.network

    def maps(self, path: str, size: tuple[int, int], turn: int = 0) -> Maps:
        """Return the maps of a photograph, cached if available.

        Args:
            path: File of the photograph.
            size: Width and height of the network's input, before rotation.
            turn: Quarter turns, counter-clockwise.
        """
        key = (path, size, turn)
        maps = self.cache.get(key)
        if maps is None:
            pixels = _grey(to_image(path), size)
            if pixels.min() == pixels.max():
                self.flat.add(path)
            pixels = pixels.rot90(turn, (1, 2)).contiguous()
            maps = self._loftr.attend(self._loftr.maps(pixels[None].to(self.device)))
            self.cache.put(key, maps)
        return maps

    def features(self, path: str) -> Turns | None:
        """Return the SIFT features of a photograph with orientations; recent ones are cached."""
        if path not in self.turns:
            self.turns[path] = oriented(to_image(path).convert("L"))
            if len(self.turns) > MOST_TURNS:
                self.turns.pop(next(iter(self.turns)))
        return self.turns[path]


def seems_sure(matches: Matches, scale: float) -> bool:
    """True if the inlier share is at least `SURE`, estimated from at most 2 * `SOME` matches.

    Otherwise, if SIFT features have a common rotation, all matches are used.

    Args:
        matches: Result of `PairMatcher`; both halves are the same matches.
        scale: Pixels of the photographs per pixel of the network's input.
    """
    half = np.arange(len(matches) // 2)
    some = half if len(half) <= SOME else half[:: len(half) // SOME]
    points = matches.keypoints0[some], matches.keypoints1[some]
    agreed = agreeing(Matches(*points, matches.confidence[some]), scale)
    return agreed is not None and bool(agreed.mean() >= SURE)


def _seen(item: Prepared) -> list[tuple[str, Size]]:
    """Return the files of a pair, and the sizes of the network's inputs."""
    assert isinstance(item, PreparedPair)
    return list(zip(item.paths, item.seen, strict=True))


def _matches(raw: dict[str, Tensor], item: PreparedPair, turn: int = 0) -> Matches:
    """Convert matches to pixels of the photographs; the second was rotated by quarter turns."""
    sides = []
    for i, names in enumerate((("cells0", "points0"), ("points1", "cells1"))):
        points = torch.cat([raw[name] for name in names]).double().numpy()
        points = _turned_back(points, turn * i, item.seen[i])
        scale = np.divide(item.sizes[i], item.seen[i])
        sides.append((points + 0.5) * scale - 0.5)
    confidence = np.tile(raw["confidence"].float().numpy(), 2)
    return Matches(sides[0], sides[1], confidence, seen=item.seen)


def _turned_back(points: Array, turn: int, size: Size) -> Array:
    """Map points (N, 2) of an image rotated by quarter turns to the original image of a size."""
    x, y = points.T
    right, bottom = size[0] - 1, size[1] - 1
    there = [(x, y), (right - y, x), (right - x, bottom - y), (y, bottom - x)][turn]
    return np.stack(there, axis=1)


class _Cache:
    """Cache of the most recently used maps, with a limit in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self._held = limit, OrderedDict[Any, Maps]()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Cache, (self.limit,)  # pickled without its maps

    def clear(self) -> None:
        self._held.clear()

    def get(self, key: Any) -> Maps | None:
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def put(self, key: Any, maps: Maps) -> None:
        self._held[key] = maps
        while len(self._held) > 2 and sum(map(_bytes, self._held.values())) > self.limit:
            self._held.popitem(last=False)


def _bytes(maps: Maps) -> int:
    return sum(x.nbytes for x in (maps.coarse, maps.fine, maps.attended) if x is not None)


def _stacked(maps: Sequence[Maps]) -> Maps:
    if len(maps) == 1:
        return maps[0]
    attended = [m.attended for m in maps if m.attended is not None]
    return Maps(
        torch.cat([m.coarse for m in maps]),
        torch.cat([m.fine for m in maps]),
        None,
        torch.cat(attended),
    )


def _grey(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """Resize an image; return (1, H, W) in [0, 1]."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    return torch.from_numpy(np.asarray(image.convert("L"), np.float32) / 255)[None]


def match_pairs(
    matcher: PairMatcher,
    source: Source[Any],
    store: Store,
    *,
    batch: int | None = None,
    progress: bool | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Match the pairs that the store lacks, here or on a cluster.

    A batch contains the same pairs in every run, also in a resumed one, since results depend on the
    batch within rounding.

    Raises:
        DataError: A photograph cannot be read.
    """
    from tqdm import tqdm

    step = batch or matcher.batch
    chunks = [range(i, min(i + step, len(source))) for i in range(0, len(source), step)]
    left = [chunk for chunk in chunks if not all(store.has(source.name(i)) for i in chunk)]
    hidden = None if progress is None else not progress
    matched = _matched if cluster is None else cluster.run
    with tqdm(total=sum(map(len, left)), unit="pair", leave=False, disable=hidden) as bar:
        for found in matched(matcher, source, left):
            results = {}
            for i, result in found:
                if isinstance(result, Exception):
                    raise result
                results[source.name(i)] = result
            store.put(results)
            bar.update(len(found))


def _matched(
    matcher: PairMatcher, source: Source[Any], chunks: Sequence[Sequence[int]]
) -> Iterator[list[Outcome]]:
    for chunk in chunks:
        items = [matcher.preprocess(*source.images(i)) for i in chunk]
        yield list(zip(chunk, matcher.run(items), strict=True))


def anchored(matches: Matches) -> Array:
    """Return True for matches refined from a cell of image 0, (N,)."""
    return np.arange(len(matches)) < len(matches) // 2
