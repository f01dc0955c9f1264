# SPDX-License-Identifier: Apache-2.0
"""Semantic segmentation: Semantic FPN on the backbones.

A feature pyramid (Lin et al. 2017) projects the four maps of a backbone to the same channels.
Convolutions, each followed by upsampling, enlarge every map to a quarter of the image; their sum
is classified per cell (Kirillov et al. 2019, with the sizes of PVT) and upsampled to the
size of the image.

Example:
    >>> import torch
    >>> from quadtree_attention import models
    >>> model = models.create("semfpn_test_quadtree", num_classes=5).eval()
    >>> with torch.no_grad():
    ...     model(torch.randn(1, 3, 70, 45)).shape
    torch.Size([1, 5, 70, 45])
"""

import math
from collections import OrderedDict
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.models.backbone import PyramidTransformer

with checks.needs("models", "a segmenter"):
    from torchvision.ops import FeaturePyramidNetwork

Norm = Literal["batch", "group"]
STRIDE = 4  # stride of the finest map, on which cells are classified
_GROUPS = 32


class SemanticFPN(nn.Module):
    """A backbone, a feature pyramid and the head of Panoptic FPN, for images of any size.

    Args:
        backbone: A model of this package with stages at 1/4, 1/8, 1/16 and 1/32.
        num_classes: Number of classes.
        channels: Channels of the feature pyramid.
        head_channels: Channels of the summed maps.
        dropout: Probability of dropping a channel of the sum in training.
        norm: Norm after the convolutions of the head: "batch", or "group" for small batches.
    """

    def __init__(
        self,
        backbone: PyramidTransformer,
        num_classes: int,
        *,
        channels: int = 256,
        head_channels: int = 128,
        dropout: float = 0.1,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        checks.at_least(1, num_classes=num_classes, channels=channels, head_channels=head_channels)
        checks.one_of(get_args(Norm), norm=norm)
        if not 0 <= dropout < 1:
            raise OptionError(f"dropout must be in [0, 1), got {dropout}; pass 0 for none")
        if norm == "group" and head_channels % _GROUPS:
            raise OptionError(
                f"head_channels must be a multiple of {_GROUPS} with norm='group', got "
                f"{head_channels}; pass a multiple, or norm='batch'"
            )
        info = backbone.feature_info
        self.num_classes = num_classes
        self.backbone = backbone
        self.pyramid = FeaturePyramidNetwork([level["num_chs"] for level in info], channels)
        self.levels = nn.ModuleList(
            _level(level["reduction"], channels, head_channels, norm) for level in info
        )
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(head_channels, num_classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(cast(Tensor, self.classifier.bias))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, num_classes, H, W), logits"""
        logits = self.classifier(self.dropout(self.forward_features(x)))
        return _enlarged(logits, STRIDE, x)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, head_channels, H/4, W/4), sizes rounded up"""
        maps = self.backbone.forward_intermediates(x, intermediates_only=True)
        named = OrderedDict((str(i), level) for i, level in enumerate(maps))
        found = list(self.pyramid(named).values())
        total = self.levels[0](found[0])
        for i, level in enumerate(self.levels[1:], start=1):
            y = found[i]
            # Upsampled by exactly 2 and cropped, so that a cell covers the same pixels even if
            # the next finer map has an odd size
            for step, layer in enumerate(cast(nn.Sequential, level), start=1):
                y = _enlarged(layer(y), 2, found[i - step])
            total = total + y
        return total

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable gradient checkpointing of the backbone."""
        self.backbone.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: the level weights."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def sliding_window(
    model: nn.Module,
    images: Tensor,
    *,
    window: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
) -> Tensor:
    """Logits from overlapping windows, averaged where they overlap.

    Memory depends on the window and not on the size of the image, and every window has the size of
    the training images. If one window covers the image, the result equals `model(images)`.

    Args:
        model: Maps images (B, 3, h, w) to logits (B, classes, h, w).
        images: (B, 3, H, W).
        window: (height, width) of a window, or one number for both.
        stride: Distance of windows in pixels, at most `window`; None: two thirds of it.

    Returns:
        (B, classes, H, W), float32.

    Raises:
        OptionError: `window` or `stride` is not accepted.
    """
    windows = _pair("window", window)
    strides = tuple(max(1, side * 2 // 3) for side in windows)
    if stride is not None:
        strides = _pair("stride", stride)
    if any(step > side for step, side in zip(strides, windows, strict=True)):
        raise OptionError(
            f"windows must touch, so stride may be at most {window=}, got {stride=}; pass a "
            "smaller stride"
        )
    spans = [
        _spans(images.shape[axis + 2], windows[axis], strides[axis]) for axis in range(2)
    ]  # of rows, of columns
    if len(spans[0]) * len(spans[1]) == 1:
        return model(images).float()
    total: Tensor | None = None
    count = images.new_zeros(images.shape[2:], dtype=torch.float32)
    for rows in spans[0]:
        for columns in spans[1]:
            logits = model(images[:, :, rows, columns]).float()
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *images.shape[2:])
            total[:, :, rows, columns] += logits
            count[rows, columns] += 1
    assert total is not None
    return total / count


def _spans(length: int, window: int, stride: int) -> list[slice]:
    """Offsets of windows along an axis; the last window ends at the edge of the image."""
    window = min(window, length)
    count = math.ceil((length - window) / stride) + 1
    starts = [min(i * stride, length - window) for i in range(count)]
    return [slice(start, start + window) for start in starts]


def _pair(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    both = (value, value) if isinstance(value, int) else tuple(value)
    if len(both) != 2 or min(both) < 1:
        raise OptionError(
            f"{name} must be pixels, or a height and a width, at least 1, got {name}={value}"
        )
    return both


def _enlarged(x: Tensor, factor: int, like: Tensor) -> Tensor:
    """Upsamples a map by `factor` and crops it to the size of another."""
    size = factor * x.shape[-2], factor * x.shape[-1]
    x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    return x[..., : like.shape[-2], : like.shape[-1]]


def _level(stride: int, channels: int, head_channels: int, norm: Norm) -> nn.Sequential:
    """Convolutions of one map: one per upsampling to the finest map, at least one."""
    steps = max(1, int(math.log2(stride // STRIDE)))
    widths = [channels] + [head_channels] * steps
    return nn.Sequential(*(_conv(widths[i], widths[i + 1], norm) for i in range(steps)))


def _conv(channels: int, out_channels: int, norm: Norm) -> nn.Sequential:
    conv = nn.Conv2d(channels, out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    batch = norm == "batch"
    after = nn.BatchNorm2d(out_channels) if batch else nn.GroupNorm(_GROUPS, out_channels)
    return nn.Sequential(conv, after, nn.ReLU(inplace=True))
