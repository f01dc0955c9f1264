# SPDX-License-Identifier: Apache-2.0
"""Selection of the pairs of photographs to match."""

from collections.abc import Sequence
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.checks import few
from quadtree_attention.errors import DataError
from quadtree_attention.files import StrPath
from quadtree_attention.sfm.matching import PairMatcher, seen_size
from quadtree_attention.sfm.photos import Photo
from quadtree_attention.tasks.match.readers import read_pairs

EXHAUSTIVE = 40  # maximum photographs for matching all pairs
NEAREST = 20  # neighbours of each photograph, above that
SMALL = 320  # pixels of the longer side for descriptors
WORDS = 32  # visual words of a descriptor
SAMPLED = 200  # cells sampled from each photograph for k-means
ROUNDS = 10  # of k-means

Pair = tuple[int, int]


def exhaustive(count: int) -> list[Pair]:
    """All pairs."""
    return list(combinations(range(count), 2))


def sequential(count: int, ahead: int) -> list[Pair]:
    """Pair every photograph with the next ones by name, and those 2, 4, 8, ... times as far."""
    far = {ahead * 2**i for i in range(1, 31)}
    steps = sorted({*range(1, ahead + 1), *far})
    return sorted((i, i + step) for i in range(count) for step in steps if i + step < count)


def listed(photos: Sequence[Photo], path: StrPath, folder: StrPath) -> list[Pair]:
    """Read pairs from a file.

    Raises:
    DataError: A photograph of the file does not exist.
    """
    numbers = {photo.name: i for i, photo in enumerate(photos)}
    pairs = set[Pair]()
    unknown = dict[str, None]()
    for line in read_pairs(path, folder):
        names = line.image0, line.image1
        unknown.update(dict.fromkeys(name for name in names if name not in numbers))
        if not unknown and names[0] != names[1]:
            first, second = sorted(numbers[name] for name in names)
            pairs.add((first, second))
    if unknown:
        raise DataError(
            f"{path} names {few(unknown)}, not among the usable photographs of {folder}; fix it"
        )
    if not pairs:
        raise DataError(f"{path} lists no pair of two photographs; write one to a line")
    return sorted(pairs)


def nearest(descriptors: Tensor, count: int) -> list[Pair]:
    """Pair every photograph with the `count` photographs with the most similar descriptors."""
    similar = descriptors @ descriptors.T
    similar.fill_diagonal_(-torch.inf)
    best = similar.topk(min(count, len(descriptors) - 1), dim=1).indices.tolist()
    return sorted({(min(i, j), max(i, j)) for i, row in enumerate(best) for j in row})


@torch.inference_mode()
def describe(matcher: PairMatcher, photos: Sequence[Photo]) -> Tensor:
    """Compute normalised descriptors (N, D): summed residuals of coarse features to visual words.

    The words are the centres of k-means over cells of all photographs; seeds are fixed.
    """
    from tqdm import tqdm

    cells = []
    for photo in tqdm(photos, unit="image", leave=False, disable=None):
        maps = matcher.maps(photo.path, seen_size(photo.size, SMALL))
        cells.append(F.normalize(maps.coarse[0].flatten(1).T.float(), dim=1).cpu())
    generator = torch.Generator().manual_seed(0)
    drawn = [x[torch.randperm(len(x), generator=generator)[:SAMPLED]] for x in cells]
    words = _k_means(torch.cat(drawn), WORDS, generator)
    return torch.stack([_residuals(x, words) for x in cells])


def _k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    centres = points[torch.randperm(len(points), generator=generator)[:count]]
    for _ in range(ROUNDS):
        nearest_centre = (points @ centres.T).argmax(dim=1)
        sums = torch.zeros_like(centres).index_add_(0, nearest_centre, points)
        empty = sums.norm(dim=1, keepdim=True) == 0
        centres = F.normalize(torch.where(empty, centres, sums), dim=1)
    return centres


def _residuals(points: Tensor, words: Tensor) -> Tensor:
    nearest_word = (points @ words.T).argmax(dim=1)
    sums = torch.zeros_like(words).index_add_(0, nearest_word, points - words[nearest_word])
    sums = F.normalize(sums, dim=1)  # per word, so that all words have equal weight
    return F.normalize(sums.flatten(), dim=0)
