# SPDX-License-Identifier: Apache-2.0
"""Stereo matching of rectified pairs: STTR (Li et al. 2021) with configurable attention.

A convolutional network computes a feature map of either view. A transformer applies self and cross
attention along rows. Optimal transport then assigns cells of the left row to cells of the right
row or to a dustbin; the assigned position gives the disparity, the dustbin occlusion. Finally,
convolutions refine both at full resolution, with the left image as input.

View 0 is left. A left pixel (x, y) corresponds to (x - d, y) on the right, with a disparity
d >= 0. With a feature stride s, cell (i, j) of a map is at the pixel (s * i, s * j); in the
layout "sttr", the published network, s // 2 is added to both.

Example:
    >>> import torch
    >>> from quadtree_attention import models
    >>> model = models.create("sttr_quadtree_small").eval()
    >>> with torch.no_grad():
    ...     found = model({"image0": torch.rand(1, 3, 45, 70), "image1": torch.rand(1, 3, 45, 70)})
    >>> found.disparity.shape
    torch.Size([1, 45, 70])
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.models.parts.assignment import Read, RowAssignment
from quadtree_attention.models.parts.inputs import check_same, pair_of
from quadtree_attention.models.parts.row_attention import RowAttentionKind, RowTransformer
from quadtree_attention.models.parts.stereo_features import ContextAdjustment, Hourglass, resampled
from quadtree_attention.models.parts.sttr_attention import RelativeTransformer
from quadtree_attention.models.parts.sttr_features import STTRAdjustment, STTRFeatures, as_adjusted

Layout = Literal["hourglass", "sttr", "sttr_half"]
Position = Literal["rotation", "sine"]
LEAST_SIDE, STRIDES = 16, (2, 3, 4)
CNN_STRIDES: dict[Layout, int] = {"hourglass": 2, "sttr": 1, "sttr_half": 2}
DIMS = {"hourglass": (64, 96, 128, 160), "sttr": (32, 64, 128, 128)}
MEAN, DEVIATION = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # statistics of images, in STTR's layouts


@dataclass(frozen=True)
class StereoOutput:
    """Output for the left views of a batch of pairs; disparities are in pixels.

    Args:
        disparity: (B, H, W).
        occlusion_logits: (B, H, W); positive if occluded.
        raw_disparity: (B, h, w), per cell, before refinement.
        raw_occlusion: Probability (B, h, w), per cell, before refinement.
        log_true: Log-probability of the true match (B, h, w), if ground truth was given.
        log_none: Log-probability of the dustbin (B, h, w).
    """

    disparity: Tensor
    occlusion_logits: Tensor
    raw_disparity: Tensor
    raw_occlusion: Tensor
    log_true: Tensor
    log_none: Tensor

    @property
    def occlusion(self) -> Tensor:
        """Probability (B, H, W) of being occluded in, or outside of, the right view."""
        return self.occlusion_logits.sigmoid()


class STTR(nn.Module):
    """Disparity and occlusion of the left view of rectified pairs of any size.

    Cross attention is masked as in STTR: only the assignment, the last cross attention, is
    restricted to disparities from 0 to `max_disparity`.

    Args:
        layout: The convolutional parts. "hourglass": a dense decoder that ends at 1/2, group norms,
            and a refinement of dilated convolutions. "sttr": as published, with a decoder that ends
            at full resolution, subsampled by `stride`, batch norms, and a
            refinement with four times the inner width. "sttr_half": the same with a decoder that
            ends at 1/2.
        position: "rotation": rotary encoding of queries and keys. "sine": two additive terms of the
            scores of full attention, as published; the assignment then uses the scores of the last
            cross attention.
        dims: Channels of the CNN at 1/2, 1/4, 1/8 and 1/16; None means (64, 96, 128, 160), or
            (32, 64, 128, 128) in STTR's layouts.
        dim: Channels of the transformer.
        num_layers: Layers of the transformer, each a self and a cross attention.
        num_heads: Heads.
        attention: "full", "quadtree_a" or "quadtree_b".
        num_levels: Levels of quadtree attention along a row; None means 4.
        topk: Cells kept per query cell; None means 6.
        backend: Backend of quadtree attention; None means "auto".
        mlp_ratio: Hidden channels per channel of the MLPs; 0 omits them, as in STTR.
        stride: Pixels per cell of the transformer: 2, 3 (as in STTR) or 4.
        iterations: Sinkhorn iterations.
        max_disparity: Default of `forward`, in pixels; None: the width.
        refine_dim: Channels of the refinement at full resolution.
        context: Channels at 1/4, 1/8, 1/16 and 1/32 of an hourglass with global context before the
            refinement; empty omits it, as in STTR.
        max_entries: Entries of the score matrices that are computed at a time;
            None means 2**25, or 2**20 on a CPU.
    """

    def __init__(
        self,
        *,
        layout: Layout = "hourglass",
        position: Position = "rotation",
        dims: Sequence[int] | None = None,
        dim: int = 128,
        num_layers: int = 6,
        num_heads: int = 8,
        attention: RowAttentionKind = "quadtree_b",
        num_levels: int | None = None,
        topk: int | Sequence[int] | None = None,
        backend: str | None = None,
        mlp_ratio: float = 0.0,
        stride: int = 2,
        iterations: int = 10,
        max_disparity: float | None = None,
        refine_dim: int = 16,
        context: Sequence[int] = (),
        max_entries: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        checks.one_of(STRIDES, stride=stride)
        checks.one_of(get_args(Layout), layout=layout)
        checks.one_of(get_args(Position), position=position)
        given = {"num_levels": num_levels, "topk": topk, "backend": backend}
        options = {name: value for name, value in given.items() if value is not None}
        if attention == "full" and options:
            raise OptionError(
                f"attention 'full' accepts no options of quadtree attention, got "
                f"{', '.join(options)}; leave them out"
            )
        if position == "sine" and (attention != "full" or mlp_ratio):
            raise OptionError(
                f"position 'sine' is for attention 'full' without MLPs, got {attention=}, "
                f"{mlp_ratio=}; pass position='rotation', or leave them out"
            )
        dd = {"device": device, "dtype": dtype}
        self.layout: Layout = layout
        self.stride = stride
        self.offset = stride // 2 if layout == "sttr" else 0
        self.max_disparity = max_disparity
        self.features: nn.Module
        self.refinement: nn.Module
        self.transformer: RowTransformer | RelativeTransformer
        if layout == "hourglass":
            dims = DIMS["hourglass"] if dims is None else dims
            self.features = Hourglass(3, dims, dim, stride=CNN_STRIDES[layout], **dd)
        else:
            dims = DIMS["sttr"] if dims is None else dims
            self.features = STTRFeatures(dims, dim, stride=CNN_STRIDES[layout], **dd)
        if position == "sine":
            self.transformer = RelativeTransformer(dim, num_layers, num_heads, step=stride, **dd)
        else:
            self.transformer = RowTransformer(
                dim,
                num_layers,
                num_heads,
                mlp_ratio=mlp_ratio,
                options={"attention": attention, **options},
                **dd,
            )
        self.assignment = RowAssignment(
            dim,
            iterations=iterations,
            max_entries=max_entries,
            project=layout == "hourglass" and position == "rotation",
            **dd,
        )
        adjustment = ContextAdjustment if layout == "hourglass" else STTRAdjustment
        self.refinement = adjustment(refine_dim, context, **dd)
        for module in (self.features, self.refinement):
            module.to(memory_format=torch.channels_last)

    def forward(
        self,
        data: Mapping[str, Tensor],
        *,
        true_disparity: Tensor | None = None,
        max_disparity: float | None = None,
    ) -> StereoOutput:
        """Estimate disparity and occlusion of the left view.

        Args:
            data: `image0` and `image1` (B, 3, H, W) in [0, 1], left and right.
            true_disparity: (B, H, W) pixels, for `log_true` (in training).
            max_disparity: Largest disparity in pixels; None: as in the constructor.
        """
        image0, image1 = pair_of(data, channels=3, least=LEAST_SIDE)
        check_same("shape", tuple(image0.shape), tuple(image1.shape))
        size = (image0.shape[2], image0.shape[3])
        truth = None if true_disparity is None else self.at_cells(true_disparity) / self.stride
        limit = self.max_disparity if max_disparity is None else max_disparity
        most = None if limit is None else limit / self.stride
        left, right = self._normalised(image0), self._normalised(image1)
        read = self._assigned(left, right, truth, most)
        raw_disparity, raw_occlusion = read.disparity * self.stride, 1 - read.matched
        seen = (raw_disparity, raw_occlusion)
        if self.layout != "hourglass":
            seen = as_adjusted(raw_disparity, read.matched)
        # No gradient from the refinement to the assignment, which has its own targets
        coarse = torch.stack(seen, dim=1).detach()
        if self.offset:  # cells are at the centre of their pixels
            upsampled = F.interpolate(coarse, size, mode="nearest")
        else:
            upsampled = resampled(coarse, size, 1 / self.stride)
        disparity, logits = self.refinement(left, *upsampled.unbind(dim=1))
        return StereoOutput(
            disparity, logits, raw_disparity, raw_occlusion, read.log_true, read.log_none
        )

    def at_cells(self, of_pixels: Tensor) -> Tensor:
        """(B, H, W) -> (B, h, w): values at the pixels of cells."""
        return of_pixels[:, self.offset :: self.stride, self.offset :: self.stride]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable gradient checkpointing of the transformer."""
        self.transformer.grad_checkpointing = enable

    def _assigned(
        self, left: Tensor, right: Tensor, truth: Tensor | None, most: float | None
    ) -> Read:
        """Return the assignment of normalised views; truth and limit are in cells."""
        x = self._cells(left, right).movedim(1, -1).contiguous()
        if isinstance(self.transformer, RelativeTransformer):
            return self.assignment.of_scores(self.transformer(x), truth, most)
        both = self.transformer(x)
        return self.assignment(*both.unflatten(0, (2, -1)).unbind(), truth, most)

    def _cells(self, left: Tensor, right: Tensor) -> Tensor:
        """Return features (2B, C, h, w) of both views, left first."""
        if self.layout == "hourglass" or self.training or left.shape[0] == 1:
            x = self.features(torch.cat([left, right]))
        else:  # batch norms use the statistics of one pair, as in STTR's evaluation
            pairs = zip(left.split(1), right.split(1), strict=True)
            maps = [self.features(torch.cat(pair)) for pair in pairs]
            x = torch.stack(maps, dim=1).flatten(0, 1)
        stride = CNN_STRIDES[self.layout]
        if stride == 1:
            return x[:, :, self.offset :: self.stride, self.offset :: self.stride]
        if self.stride != stride:
            cells = [-(-side // self.stride) for side in left.shape[2:]]
            x = resampled(x, (cells[0], cells[1]), self.stride / stride)
        return x

    def _normalised(self, images: Tensor) -> Tensor:
        """Normalise images in [0, 1] to zero mean and unit variance, approximately."""
        if self.layout == "hourglass":
            images = (images - 0.45) / 0.25
        else:
            mean, deviation = (images.new_tensor(x)[:, None, None] for x in (MEAN, DEVIATION))
            images = (images - mean) / deviation
        return images.contiguous(memory_format=torch.channels_last)
