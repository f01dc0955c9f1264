# SPDX-License-Identifier: Apache-2.0
"""Image matching: LoFTR (Sun et al. 2021) with configurable attention.

A convolutional network computes a coarse map (1/8) and a fine map (1/2) of either image. A
transformer applies self and cross attention to the coarse maps; mutual nearest neighbours become
matches. A window of the fine maps around every match refines its point in image 1 to sub-pixel
accuracy.

Positions are (x, y) pixels; the centre of the first pixel is (0, 0). The coarse map has
ceil(H / 8) x ceil(W / 8) cells, and cell (row, column) is at the pixel (8 * column, 8 * row).

Example:
    >>> import torch
    >>> from quadtree_attention import models
    >>> model = models.create("loftr_quadtree_small").eval()
    >>> with torch.no_grad():
    ...     found = model({"image0": torch.rand(1, 1, 97, 131), "image1": torch.rand(1, 1, 64, 80)})
    >>> sorted(found)
    ['batch_indexes', 'confidence', 'keypoints0', 'keypoints1']
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quadtree_attention.models.parts.coarse_matching import CoarseMatches, CoarseMatching, Method
from quadtree_attention.models.parts.context_attention import build_context_attention
from quadtree_attention.models.parts.fine_matching import FineWindows, expected_offset
from quadtree_attention.models.parts.inputs import check_image, check_same, pair_of
from quadtree_attention.models.parts.masks import masks_of_maps, stack_masks
from quadtree_attention.models.parts.match_transformer import BlockKind, MatchTransformer
from quadtree_attention.models.parts.position import Frequencies, check_position, sine_table
from quadtree_attention.models.parts.resnet_fpn import ResNetFPN
from quadtree_attention.ops.attention.problem import check_mask
from quadtree_attention.ops.attention.tree import is_exporting

COARSE_STRIDE, FINE_STRIDE = 8, 2
# Without gradients, the CNN processes larger images one by one, and the fine stage processes more
# matches in chunks of at most 1 GB. The peak memory of a pair is then that of the CNN for one
# image: at 2048x2048, in full width, 3.4 GB besides the maps of the other image. A CPU does not
# benefit from larger batches, so images are processed one by one, in chunks that fit its caches.
_PIXELS_AT_ONCE, _PIXELS_AT_ONCE_ON_CPU = 2**20, 2**16
_MATCHES_AT_ONCE, _MATCHES_AT_ONCE_ON_CPU = 2**12, 2**9


@dataclass(frozen=True)
class Maps:
    """CNN feature maps of a batch of images.

    Args:
        coarse: Coarse map (B, C, H, W).
        fine: Fine map (B, c, h, w).
        mask: Visible cells of the coarse map (B, H, W); None: all.
        attended: Coarse map (B, H, W, C) after the first self block of the transformer, which does
            not depend on the other image; None: not computed yet. See `LoFTR.attend`.
    """

    coarse: Tensor
    fine: Tensor
    mask: Tensor | None
    attended: Tensor | None = None


@dataclass(frozen=True)
class Features:
    """Features of a batch of image pairs.

    Args:
        coarse0: Coarse map (B, H0, W0, C) of image 0, after the transformer.
        coarse1: Coarse map (B, H1, W1, C) of image 1.
        fine0: Fine map (B, c, h0, w0) of image 0.
        fine1: Fine map (B, c, h1, w1) of image 1.
        mask0: Visible cells of the coarse map (B, H0, W0); None: all.
        mask1: The same for image 1 (B, H1, W1).
    """

    coarse0: Tensor
    coarse1: Tensor
    fine0: Tensor
    fine1: Tensor
    mask0: Tensor | None
    mask1: Tensor | None

    def swapped(self) -> "Features":
        """Return the features with the images swapped."""
        return Features(self.coarse1, self.coarse0, self.fine1, self.fine0, self.mask1, self.mask0)


@dataclass(frozen=True)
class FineMatches:
    """Refined matches with the uncertainty of the fine stage.

    Args:
        keypoints0: Points of image 0 (M, 2), at coarse cells.
        keypoints1: Points of image 1 (M, 2).
        offset: keypoints1 minus the centre of the coarse cell (M, 2), in units of
            `LoFTR.window_radius` pixels; input of the fine loss.
        std: Sum of the standard deviations of the offset along x and y (M,), same units.
    """

    keypoints0: Tensor
    keypoints1: Tensor
    offset: Tensor
    std: Tensor


class LoFTR(nn.Module):
    """LoFTR for images of any size, pairs of different sizes and padded batches.

    In evaluation an image padded at the bottom and right gives the same matches as without padding
    if it has a mask. Hidden cells of any mask are neither attended to nor matched.

    Training runs the steps of `forward` separately, to share intermediate results::

        features = model.encode(batch)
        confidence = model.confidence(features)             # (B, L0, L1), for the coarse loss
        predicted = model.select(features, confidence)
        matches = matches_for_training(predicted, truth, count=...)
        fine = model.fine(features, matches)                # offset and std, for the fine loss

    Args:
        dims: Channels of the CNN at 1/2 (fine map), 1/4 and 1/8 (coarse map).
        num_pairs: Number of pairs of a self and a cross block in the coarse transformer.
        num_heads: Heads of the coarse transformer.
        fine_heads: Heads of the fine transformer.
        attention: Attention of the coarse transformer: "linear", "full", "spatial_reduction" (keys
            and values averaged to 8x8), "quadtree_a" or "quadtree_b".
        block: "loftr" (post-norm; map 1 attends to the updated map 0) or "vit" (pre-norm,
            convolution in the MLP; both maps are updated at once, symmetric in the images).
        num_levels: Levels of quadtree attention; None means 3.
        topk: Cells kept per query cell in quadtree attention; None means 8 at the finest level
            with a selection, doubled at every coarser level.
        pool_size: Keys per side of the map in spatial reduction; None means 8.
        backend: Backend of quadtree attention; None means "auto".
        position: Frequencies of the position encoding: "fixed", or "legacy" for some old weights.
        matching: "dual_softmax" or "optimal_transport".
        temperature: Divisor of similarities; dual softmax only.
        threshold: Minimum confidence of matches (exclusive).
        border: Width of the border without matches, in coarse cells.
        sinkhorn_iterations: Iterations of optimal transport.
        window_size: Fine cells per side of a window.
        max_entries: Entries of the similarity matrix that `forward` computes at a time.
        symmetric: If True, `forward` also refines points of image 0 and averages both results, so
            that with block "vit" swapped images give the same points, swapped. If False, as in the
            original, points of image 0 stay at their cells and points of image 1 are refined.
        masks_in_attention: If True, masks also apply in CNN and transformer. If False, as in the
            official quadtree matcher, they apply in coarse matching only.
    """

    def __init__(
        self,
        *,
        dims: Sequence[int] = (128, 196, 256),
        num_pairs: int = 4,
        num_heads: int = 8,
        fine_heads: int = 8,
        attention: str = "quadtree_b",
        block: BlockKind = "vit",
        num_levels: int | None = None,
        topk: int | Sequence[int] | None = None,
        pool_size: int | None = None,
        backend: str | None = None,
        position: Frequencies = "fixed",
        matching: Method = "dual_softmax",
        temperature: float = 0.1,
        threshold: float = 0.2,
        border: int = 2,
        sinkhorn_iterations: int = 3,
        window_size: int = 5,
        max_entries: int = 2**26,
        symmetric: bool = False,
        masks_in_attention: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.backbone = ResNetFPN(dims, **dd)
        coarse_dim, fine_dim = dims[2], dims[0]
        check_position(coarse_dim, position)
        given = {"num_levels": num_levels, "topk": topk, "pool_size": pool_size, "backend": backend}
        options = {option: value for option, value in given.items() if value is not None}
        self.position: Frequencies = position
        self.symmetric = symmetric
        self.masks_in_attention = masks_in_attention
        self.coarse_transformer = MatchTransformer(
            coarse_dim,
            num_pairs,
            lambda: build_context_attention(attention, coarse_dim, num_heads, options, **dd),
            block,
            **dd,
        )
        self.coarse_matching = CoarseMatching(
            matching,
            temperature=temperature,
            threshold=threshold,
            border=border,
            iterations=sinkhorn_iterations,
            max_entries=max_entries,
            **dd,
        )
        self.fine_windows = FineWindows(coarse_dim, fine_dim, window_size, **dd)
        self.fine_transformer = MatchTransformer(
            fine_dim,
            1,
            lambda: build_context_attention("linear", fine_dim, fine_heads, {}, **dd),
            "loftr",
            **dd,
        )

    @property
    def window_radius(self) -> float:
        """Distance in pixels from the centre of a fine window to its outermost cell centre."""
        return float(FINE_STRIDE * (self.fine_windows.size // 2))

    def forward(
        self, data: Mapping[str, Tensor], *, threshold: float | None = None
    ) -> dict[str, Tensor]:
        """Match two images, or a batch of pairs.

        Args:
            data: `image0` (B, 1, H0, W0) and `image1` (B, 1, H1, W1), grey in [0, 1]; for padded
                images, `mask0` (B, H0, W0) and `mask1` (B, H1, W1), True = visible.
            threshold: Minimum confidence of matches (exclusive); None: as in the constructor.

        Returns:
            `keypoints0` and `keypoints1` (M, 2), (x, y) in pixels of the input images;
            `confidence` (M,), and `batch_indexes` (M,), the sample of each match. Sorted by sample,
            then by the row and column of the coarse cell in image 0.
        """
        return self.match(self.encode(data), threshold)

    def encode(self, data: Mapping[str, Tensor]) -> Features:
        """Return the features of both images; `data` as in `forward`."""
        image0, image1 = pair_of(data, channels=1)
        mask0, mask1 = data.get("mask0"), data.get("mask1")
        check_same("batch size", image0.shape[0], image1.shape[0])
        for i, (image, mask) in enumerate(((image0, mask0), (image1, mask1))):
            _check_mask(f"mask{i}", mask, f"image{i}", image)
        if is_exporting():  # symbolic sizes of an export: no data-dependent branch
            return self._transformed(self.maps(image0, mask0), self.maps(image1, mask1))
        # One batch for the norms in training, and for speed if it is small.
        most = _PIXELS_AT_ONCE_ON_CPU if image0.is_cpu else _PIXELS_AT_ONCE
        together = self.training or image0[:, 0].numel() <= most
        if image0.shape != image1.shape or not together:
            return self._transformed(self.maps(image0, mask0), self.maps(image1, mask1))
        both = self.maps(torch.cat([image0, image1]), stack_masks(mask0, mask1))
        coarse, fine = both.coarse.chunk(2), both.fine.chunk(2)
        seen = (None, None) if both.mask is None else both.mask.chunk(2)
        return self._transformed(
            Maps(coarse[0], fine[0], None if mask0 is None else seen[0]),
            Maps(coarse[1], fine[1], None if mask1 is None else seen[1]),
        )

    def maps(self, image: Tensor, mask: Tensor | None = None) -> Maps:
        """Return the maps of one image or a batch, the input of `pair`.

        Args:
            image: (B, 1, H, W), grey in [0, 1].
            mask: (B, H, W), True = visible; for padded images.
        """
        check_image("image", image, channels=1)
        _check_mask("mask", mask, "image", image)
        pyramid = masks_of_maps(mask, 4)
        acting = pyramid if self.masks_in_attention else masks_of_maps(None, 4)
        coarse, fine = self.backbone(image, acting)
        return Maps(coarse, fine, pyramid[3])

    def attend(self, maps: Maps) -> Maps:
        """Return maps with `attended`, for images that are matched with many others."""
        mask = maps.mask if self.masks_in_attention else None
        coarse = self.coarse_transformer.begin(self._with_position(maps.coarse), mask)
        return replace(maps, attended=coarse)

    def pair(
        self, maps0: Maps, maps1: Maps, *, threshold: float | None = None
    ) -> dict[str, Tensor]:
        """Return the result of `forward` (up to rounding) from maps computed by `maps`."""
        check_same("batch size", len(maps0.coarse), len(maps1.coarse))
        return self.match(self._transformed(maps0, maps1), threshold)

    def anchored(
        self, maps0: Maps, maps1: Maps, *, threshold: float | None = None
    ) -> dict[str, Tensor]:
        """Return the matches of `pair`, refined from the centre of the coarse cell in either image.

        The cells of an image are the same in all of its pairs, so that matches form tracks.

        Returns:
            `cells0` (M, 2), pixels of image 0, and `points1` (M, 2), refined from them;
            `cells1` and `points0` likewise; `confidence` and `batch_indexes` as in `forward`.
        """
        check_same("batch size", len(maps0.coarse), len(maps1.coarse))
        features = self._transformed(maps0, maps1)
        matches = self.coarse_matching(
            features.coarse0, features.coarse1, features.mask0, features.mask1, threshold
        )
        parts = []
        step = _MATCHES_AT_ONCE_ON_CPU if features.fine0.is_cpu else _MATCHES_AT_ONCE
        for start in range(0, max(1, len(matches)), step):
            there, back = self.fine_both_ways(features, matches[start : start + step])
            parts.append((there.keypoints0, there.keypoints1, back.keypoints0, back.keypoints1))
        names = ("cells0", "points1", "cells1", "points0")
        found = {
            name: torch.cat(x) for name, x in zip(names, zip(*parts, strict=False), strict=True)
        }
        return found | {
            "confidence": matches.confidence,
            "batch_indexes": matches.batch_indexes,
        }

    def match(self, features: Features, threshold: float | None = None) -> dict[str, Tensor]:
        """Return the result of `forward` from features."""
        matches = self.coarse_matching(
            features.coarse0, features.coarse1, features.mask0, features.mask1, threshold
        )
        if is_exporting():  # the number of matches is unknown
            parts = [self._points(features, matches)]
        else:
            step = _MATCHES_AT_ONCE_ON_CPU if features.fine0.is_cpu else _MATCHES_AT_ONCE
            parts = [
                self._points(features, matches[start : start + step])
                for start in range(0, max(1, len(matches)), step)
            ]
        points0, points1 = zip(*parts, strict=True)
        return {
            "keypoints0": torch.cat(points0),
            "keypoints1": torch.cat(points1),
            "confidence": matches.confidence,
            "batch_indexes": matches.batch_indexes,
        }

    def confidence(self, features: Features) -> Tensor:
        """Return the confidence of all pairs of coarse cells (B, H0*W0, H1*W1), with gradients."""
        return self.coarse_matching.confidence(
            features.coarse0, features.coarse1, features.mask0, features.mask1
        )

    def select(self, features: Features, confidence: Tensor) -> CoarseMatches:
        """Return the coarse matches in a matrix of `confidence`."""
        (_, *grid0, _), (_, *grid1, _) = features.coarse0.shape, features.coarse1.shape
        return self.coarse_matching.select(
            confidence, (grid0[0], grid0[1]), (grid1[0], grid1[1]), features.mask0, features.mask1
        )

    def fine(self, features: Features, matches: CoarseMatches) -> FineMatches:
        """Refine coarse matches, either predicted or ground truth."""
        windows = self.fine_transformer(*self._windows(features, matches))
        return self._refined(features, matches, *windows)

    def fine_both_ways(
        self, features: Features, matches: CoarseMatches
    ) -> tuple[FineMatches, FineMatches]:
        """Return `fine` of the matches and of the swapped matches, sharing common computations."""
        there, back = self.fine_transformer.both_ways(*self._windows(features, matches))
        return (
            self._refined(features, matches, *there),
            self._refined(features.swapped(), matches.swapped(), *back),
        )

    def _windows(self, features: Features, matches: CoarseMatches) -> tuple[Tensor, Tensor]:
        batch, cells0, cells1 = matches.batch_indexes, matches.cells0, matches.cells1
        return (
            self.fine_windows(features.fine0, features.coarse0, batch, cells0),
            self.fine_windows(features.fine1, features.coarse1, batch, cells1),
        )

    def _refined(
        self, features: Features, matches: CoarseMatches, windows0: Tensor, windows1: Tensor
    ) -> FineMatches:
        """Refine the points of image 1 by transformed windows."""
        offset, std = expected_offset(windows0, windows1)
        points0 = _cell_points(matches.cells0, features.coarse0.shape[2], offset.dtype)
        points1 = _cell_points(matches.cells1, features.coarse1.shape[2], offset.dtype)
        return FineMatches(points0, points1 + offset * self.window_radius, offset, std)

    def _points(self, features: Features, matches: CoarseMatches) -> tuple[Tensor, Tensor]:
        """Return the points of coarse matches in image 0 and in image 1."""
        if not self.symmetric:
            there = self.fine(features, matches)
            return there.keypoints0, there.keypoints1
        # If both are correct, so is their midpoint, provided that one image is locally an
        # affine map of the other; independent errors are averaged.
        there, back = self.fine_both_ways(features, matches)
        points0, points1 = there.keypoints0 + back.keypoints1, there.keypoints1 + back.keypoints0
        return points0 / 2, points1 / 2

    def _transformed(self, maps0: Maps, maps1: Maps) -> Features:
        """Apply the transformer to the coarse maps; return them with the fine maps."""
        acting = (maps0.mask, maps1.mask) if self.masks_in_attention else (None, None)
        if maps0.attended is not None and maps1.attended is not None:
            coarse0, coarse1 = self.coarse_transformer.go_on(
                maps0.attended, maps1.attended, *acting
            )
        else:
            coarse0, coarse1 = self.coarse_transformer(
                self._with_position(maps0.coarse), self._with_position(maps1.coarse), *acting
            )
        return Features(coarse0, coarse1, maps0.fine, maps1.fine, maps0.mask, maps1.mask)

    def _with_position(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, H, W, C) with the position encoding added."""
        _, dim, height, width = x.shape
        table = sine_table(height, width, dim, self.position, device=x.device)
        return (x.movedim(1, -1) + table.to(x.dtype)).contiguous()


def _check_mask(name: str, mask: Tensor | None, image_name: str, image: Tensor) -> None:
    check_mask(name, mask, image_name, (image.shape[0], *image.shape[2:]), image.device)


def _cell_points(cells: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Pixels (M, 2), x before y, of coarse cells (M,)."""
    rows = cells // columns  # no remainder operator: ONNX exports lack it for symbolic sizes
    return torch.stack([cells - rows * columns, rows], dim=1).to(dtype) * COARSE_STRIDE
