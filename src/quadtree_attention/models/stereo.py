# SPDX-License-Identifier: Apache-2.0
"""A rectified pair in, disparity out: STTR (Li et al. 2021) with the attention as a parameter.

A convolutional network makes a map of features of either view. A transformer lets every row look at
itself and at the same row of the other view. Optimal transport then assigns cells of the left row
to cells of the right one, or to none; the place of the partner is the disparity, and having none is
occlusion. Last, convolutions refine both at full resolution, knowing the left image.

View 0 is left. A left pixel (x, y) is seen at (x - d, y) on the right, its disparity d is never
negative. With a feature stride s, cell (i, j) of a map is at the pixel (s * i, s * j).

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
from typing import Any

import torch
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.models.parts.assignment import RowAssignment
from quadtree_attention.models.parts.inputs import check_same, pair_of
from quadtree_attention.models.parts.row_attention import RowAttentionKind, RowTransformer
from quadtree_attention.models.parts.stereo_features import ContextAdjustment, Hourglass, resampled

LEAST_SIDE, CNN_STRIDE, STRIDES = 16, 2, (2, 3, 4)


@dataclass(frozen=True)
class StereoOutput:
    """What is known of the left view of a batch of pairs; disparities are in pixels.

    Args:
        disparity: (B, H, W).
        occlusion_logits: (B, H, W); above 0, more likely occluded than not.
        raw_disparity: (B, h, w), of the cells, before refinement.
        raw_occlusion: Probability (B, h, w), likewise.
        log_true: Logarithm of the probability of the true partner (B, h, w), if a truth was given.
        log_none: Logarithm of the probability of having no partner (B, h, w).
    """

    disparity: Tensor
    occlusion_logits: Tensor
    raw_disparity: Tensor
    raw_occlusion: Tensor
    log_true: Tensor
    log_none: Tensor

    @property
    def occlusion(self) -> Tensor:
        """Probability (B, H, W) of being hidden in, or outside of, the right view."""
        return self.occlusion_logits.sigmoid()


class STTR(nn.Module):
    """Disparity and occlusion of the left view of rectified pairs of any size.

    Masks of cross attention are where STTR has them: the assignment, its last cross attention, sees
    non-negative disparities up to `max_disparity` only.

    Args:
        dims: Channels of the CNN at 1/2, 1/4, 1/8 and 1/16.
        dim: Channels of the transformer.
        num_layers: Layers of the transformer, each a self and a cross attention.
        num_heads: Heads.
        attention: "full", "quadtree_a" or "quadtree_b".
        num_levels: Levels of quadtree attention along a row; None means 4.
        topk: Cells kept per query cell; None means 6.
        backend: Of quadtree attention; None means "auto".
        mlp_ratio: Hidden channels per channel of the MLPs; 0 leaves them out, as STTR does.
        stride: Pixels per cell of the transformer: 2, 3 (as in STTR) or 4.
        iterations: Of Sinkhorn.
        max_disparity: Largest disparity in pixels, unless `forward` gets another; None: the width.
        refine_dim: Channels of the refinement at full resolution.
        context: Channels at 1/4, 1/8, 1/16 and 1/32 of what refines before it, knowing all of the
            image; empty leaves it out, as STTR does.
        max_entries: Entries of matrices of a row's cells times cells that are made at a time;
            None means 2**25, or 2**20 on a CPU.
    """

    def __init__(
        self,
        *,
        dims: Sequence[int] = (64, 96, 128, 160),
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
        given = {"num_levels": num_levels, "topk": topk, "backend": backend}
        options = {name: value for name, value in given.items() if value is not None}
        if attention == "full" and options:
            raise OptionError(
                f"attention 'full' accepts no options of quadtree attention, got "
                f"{', '.join(options)}; leave them out"
            )
        dd = {"device": device, "dtype": dtype}
        self.stride = stride
        self.max_disparity = max_disparity
        self.features = Hourglass(3, dims, dim, stride=CNN_STRIDE, **dd)
        self.transformer = RowTransformer(
            dim,
            num_layers,
            num_heads,
            mlp_ratio=mlp_ratio,
            options={"attention": attention, **options},
            **dd,
        )
        self.assignment = RowAssignment(dim, iterations=iterations, max_entries=max_entries, **dd)
        self.refinement = ContextAdjustment(refine_dim, context, **dd)
        for module in (self.features, self.refinement):
            module.to(memory_format=torch.channels_last)

    def forward(
        self,
        data: Mapping[str, Tensor],
        *,
        true_disparity: Tensor | None = None,
        max_disparity: float | None = None,
    ) -> StereoOutput:
        """Disparity of the left view.

        Args:
            data: `image0` and `image1` (B, 3, H, W) in [0, 1], left and right.
            true_disparity: (B, H, W) pixels, to be told how probable it is (in training).
            max_disparity: Largest disparity in pixels; None: that of the network.
        """
        image0, image1 = pair_of(data, channels=3, least=LEAST_SIDE)
        check_same("shape", tuple(image0.shape), tuple(image1.shape))
        size = image0.shape[2:]
        features0, features1 = self._encode(image0, image1)
        truth = None if true_disparity is None else self.at_cells(true_disparity) / self.stride
        limit = self.max_disparity if max_disparity is None else max_disparity
        most = None if limit is None else limit / self.stride
        read = self.assignment(features0, features1, truth, most)
        raw_disparity, raw_occlusion = read.disparity * self.stride, 1 - read.matched
        coarse = torch.stack([raw_disparity, raw_occlusion], dim=1)
        # No gradient from the refinement to the assignment, which has its own targets
        upsampled = resampled(coarse.detach(), (size[0], size[1]), 1 / self.stride)
        disparity, logits = self.refinement(_normalised(image0), *upsampled.unbind(dim=1))
        return StereoOutput(
            disparity, logits, raw_disparity, raw_occlusion, read.log_true, read.log_none
        )

    def at_cells(self, of_pixels: Tensor) -> Tensor:
        """(B, H, W) -> (B, h, w): what the pixels have that cells are at."""
        return of_pixels[:, :: self.stride, :: self.stride]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes layers of the transformer in the backward pass instead of keeping them."""
        self.transformer.grad_checkpointing = enable

    def _encode(self, image0: Tensor, image1: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, h, w, C) of both views."""
        x = self.features(_normalised(torch.cat([image0, image1])))
        if self.stride != CNN_STRIDE:
            cells = [-(-side // self.stride) for side in image0.shape[2:]]
            x = resampled(x, (cells[0], cells[1]), self.stride / CNN_STRIDE)
        both = self.transformer(x.movedim(1, -1).contiguous())
        return both[: len(image0)], both[len(image0) :]


def _normalised(images: Tensor) -> Tensor:
    """Images in [0, 1] to a mean of about 0 and a deviation of about 1."""
    return ((images - 0.45) / 0.25).contiguous(memory_format=torch.channels_last)
