# SPDX-License-Identifier: Apache-2.0
"""torchvision's feature pyramid and heads with masked padding.

Images of different sizes are padded to a common size at the bottom and right. Cells of a map that
cover no pixel of their image are hidden: convolutions read zeros there, as outside of a map;
their anchors are removed; and RoIAlign reads maps cropped to the image. Padding therefore has no
effect on the results of an image.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.models.backbone import PyramidTransformer
from quadtree_attention.models.parts.masks import rectangles
from quadtree_attention.models.parts.resnet_fpn import hide_map
from quadtree_attention.ops.attention.tree import accumulation_dtype

with checks.needs("models", "a detector"):
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
    from torchvision.models.detection.image_list import ImageList
    from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
    from torchvision.models.detection.retinanet import RetinaNetHead
    from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
    from torchvision.models.detection.transform import GeneralizedRCNNTransform
    from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7
    from torchvision.ops.poolers import initLevelMapper

Size = tuple[int, int]
Masks = Sequence[Tensor | None]


class ThinTransform(GeneralizedRCNNTransform):
    """torchvision's resizing and padding, with sides of at least one pixel.

    torchvision's own transform fails on an image such as 3x8000, whose shorter side becomes 0.
    """

    fixed_size: Size | None  # width, height

    def resize(
        self, image: Tensor, target: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        height, width = image.shape[-2:]
        scale = min(min(self.min_size) / min(height, width), self.max_size / max(height, width))
        if int(min(height, width) * scale) >= 1:
            return super().resize(image, target)
        self.fixed_size = (max(1, int(width * scale)), max(1, int(height * scale)))
        try:
            return super().resize(image, target)
        finally:
            self.fixed_size = None


def cells(size: Size, stride: int) -> Size:
    """Return the size of the map of an image at a stride."""
    return -(-size[0] // stride), -(-size[1] // stride)


def padding_masks(images: ImageList, strides: Iterable[int]) -> list[Tensor | None]:
    """Return visible cells (B, H, W) at every stride; None if no image of the batch is padded."""
    canvas = (int(images.tensors.shape[2]), int(images.tensors.shape[3]))
    if all(tuple(size) == canvas for size in images.image_sizes):
        return [None for _ in strides]
    return [
        rectangles(
            [cells(size, stride) for size in images.image_sizes],
            cells(canvas, stride),
            images.tensors.device,
        )
        for stride in strides
    ]


def by_anchor(x: Tensor, columns: int) -> Tensor:
    """Rearrange (B, A * columns, H, W) to (B, H, W, A, columns), in at least float32.

    Half precision is too coarse for boxes of 1333 pixels.
    """
    return _wide(x).unflatten(1, (-1, columns)).permute(0, 3, 4, 1, 2)


def anchors_of(
    levels: Sequence[Tensor], sample: int, size: Size, strides: Sequence[int]
) -> list[Tensor]:
    """Select the anchors of every image: [(B, H, W, A, ...)] -> [(anchors, ...)]."""
    grids = [cells(size, stride) for stride in strides]
    return [
        level[sample, :height, :width].flatten(0, 2)
        for level, (height, width) in zip(levels, grids, strict=True)
    ]


class PyramidBackbone(nn.Module):
    """A backbone and a feature pyramid on its last maps, with the interface of torchvision.

    Args:
        body: The backbone.
        channels: Channels of all maps of the pyramid.
        first_stage: First stage of the backbone in the pyramid, from 0.
        extra: Module that adds maps above the last.
        num_extra: Number of added maps.
    """

    def __init__(
        self,
        body: PyramidTransformer,
        channels: int,
        *,
        first_stage: int,
        extra: "LevelsOfLastMap | MaxPoolLevel",
        num_extra: int,
    ) -> None:
        super().__init__()
        info = body.feature_info[first_stage:]
        last = info[-1]["reduction"]
        self.body = body
        self.fpn = MaskedPyramid([stage["num_chs"] for stage in info], channels, extra)
        self.out_channels = channels
        self.strides = [stage["reduction"] for stage in info]
        self.strides += [last * 2 ** (i + 1) for i in range(num_extra)]
        self.stages = list(range(first_stage, len(body.feature_info)))

    def forward(self, images: ImageList | Tensor) -> "OrderedDict[str, Tensor]":
        """Return the maps of a batch, finest first; `sizes` are of the images before padding."""
        if isinstance(images, Tensor):
            images = ImageList(images, [tuple(images.shape[2:])] * len(images))
        visible, *masks = padding_masks(images, [1, *self.strides])
        maps = self.body.forward_intermediates(
            images.tensors, self.stages, intermediates_only=True, mask=visible
        )
        return self.fpn(OrderedDict((str(i), x) for i, x in enumerate(maps)), masks)


class MaskedPyramid(FeaturePyramidNetwork):
    """torchvision's feature pyramid with masks."""

    def forward(self, x: dict[str, Tensor], masks: Masks) -> "OrderedDict[str, Tensor]":
        """Return the maps, 0 where hidden, and the masks of all maps."""
        names, maps = list(x), list(x.values())
        results: list[Tensor] = []
        inner: Tensor | None = None
        for i in reversed(range(len(maps))):
            lateral = self.inner_blocks[i](maps[i])
            if inner is not None:  # sizes are halved and rounded up: every cell gets its parent
                lateral = lateral + F.interpolate(inner, size=lateral.shape[-2:], mode="nearest")
            inner = lateral
            results.insert(0, self.layer_blocks[i](hide_map(inner, masks[i])))
        results, names = self.extra_blocks(results, maps, names, masks[len(maps)])
        return OrderedDict(zip(names, results, strict=True))


class LevelsOfLastMap(LastLevelP6P7):
    """Two more maps computed from the backbone's last map.

    torchvision would use the pyramid's last map if both have the same number of channels.
    """

    def forward(
        self, p: list[Tensor], c: list[Tensor], names: list[str], mask: Tensor | None = None
    ) -> tuple[list[Tensor], list[str]]:
        """Add two maps; `mask` is the mask of the first one."""
        p6 = self.p6(c[-1])
        p7 = self.p7(F.relu(hide_map(p6, mask)))
        return [*p, p6, p7], [*names, "p6", "p7"]


class MaxPoolLevel(LastLevelMaxPool):
    """One more map: the last map subsampled by 2. It mixes no cells and needs no mask."""

    def forward(
        self, x: list[Tensor], y: list[Tensor], names: list[str], mask: Tensor | None = None
    ) -> tuple[list[Tensor], list[str]]:
        return super().forward(x, y, names)


class PyramidAnchors(AnchorGenerator):
    """Anchors of maps with fixed strides, not rounded to pixels.

    torchvision divides the sizes of batch and map to get a stride, which need not be an integer,
    and computes in the dtype of the maps, which may have 8 bits of precision.

    Args:
        strides: Strides of the maps.
        scales: Sides of the square anchors, in strides.
        ratios: Aspect ratios (height / width) of anchors.
    """

    def __init__(
        self, strides: Sequence[int], scales: Sequence[float], ratios: Sequence[float]
    ) -> None:
        self.strides = list(strides)
        sizes = tuple(tuple(stride * scale for scale in scales) for stride in strides)
        super().__init__(sizes, (tuple(ratios),) * len(sizes))

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return anchors (A, 4) around 0; ratios in the outer loop."""
        sides = torch.tensor(scales, dtype=dtype, device=device)
        root = torch.tensor(aspect_ratios, dtype=dtype, device=device).sqrt()[:, None]
        width, height = (sides / root).flatten(), (sides * root).flatten()
        return torch.stack([-width, -height, width, height], dim=1) / 2

    def by_level(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return anchors (1, H, W, A, 4) of every map, in at least float32."""
        self.set_cell_anchors(torch.float64, maps[0].device)
        found = []
        for x, stride, shape in zip(maps, self.strides, self.cell_anchors, strict=True):
            options: dict[str, Any] = {"dtype": accumulation_dtype(x.dtype), "device": x.device}
            down, across = (torch.arange(size, **options) * stride for size in x.shape[-2:])
            y, x0 = torch.meshgrid(down, across, indexing="ij")
            centres = torch.stack([x0, y, x0, y], dim=-1)[None, :, :, None]  # (1, H, W, 1, 4)
            found.append(centres + shape.to(**options))
        return found

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Return the anchors of the padded size, for every image: (anchors, 4)."""
        together = torch.cat([level.flatten(0, 3) for level in self.by_level(feature_maps)])
        return [together] * len(image_list.image_sizes)


class MaskedRetinaHead(RetinaNetHead):
    """torchvision's head of RetinaNet with masks."""

    def forward(self, x: Sequence[Tensor], masks: Masks | None = None) -> dict[str, list[Tensor]]:
        """Logits and boxes of every map: (B, H, W, A, classes) and (B, H, W, A, 4)."""
        masks = [None] * len(x) if masks is None else masks
        classes, boxes = self.classification_head, self.regression_head
        class_layers = [*classes.conv, classes.cls_logits]
        box_layers = [*boxes.conv, boxes.bbox_reg]
        levels = list(zip(x, masks, strict=True))
        return {
            "cls_logits": [
                by_anchor(_through(class_layers, *level), classes.num_classes) for level in levels
            ],
            "bbox_regression": [by_anchor(_through(box_layers, *level), 4) for level in levels],
        }


class MaskedRPNHead(RPNHead):
    """torchvision's head of the region proposal network with masks."""

    def forward(
        self, x: Sequence[Tensor], masks: Masks | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Logits and boxes of every map: (B, H, W, A, 1) and (B, H, W, A, 4)."""
        masks = [None] * len(x) if masks is None else masks
        found = [_through(self.conv, *level) for level in zip(x, masks, strict=True)]
        logits = [by_anchor(self.cls_logits(x), 1) for x in found]
        return logits, [by_anchor(self.bbox_pred(x), 4) for x in found]


class PaddedRPN(RegionProposalNetwork):
    """torchvision's region proposal network, without the anchors of hidden cells."""

    def forward(
        self,
        images: ImageList,
        features: dict[str, Tensor],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return boxes (N, 4) of every image, sorted by score, and in training the losses."""
        maps, strides = list(features.values()), self.anchor_generator.strides
        logits, deltas = self.head(maps, padding_masks(images, strides))
        cell_anchors = self.anchor_generator.by_level(maps)
        anchors, all_logits, all_deltas, proposals = [], [], [], []
        for i, size in enumerate(images.image_sizes):
            by_level = anchors_of(logits, i, size, strides)
            own = torch.cat(anchors_of(cell_anchors, 0, size, strides))
            all_logits.append(torch.cat(by_level))
            all_deltas.append(torch.cat(anchors_of(deltas, i, size, strides)))
            boxes = self.box_coder.decode(all_deltas[i].detach(), [own])
            counts = [len(level) for level in by_level]
            found, _ = self.filter_proposals(
                boxes.view(1, -1, 4), all_logits[i][None], [size], counts
            )
            proposals += found
            anchors.append(own)
        if not self.training:
            return proposals, {}
        labels, matched = self.assign_targets_to_anchors(anchors, targets)
        wanted = self.box_coder.encode(matched, anchors)
        losses = self.compute_loss(torch.cat(all_logits), torch.cat(all_deltas), labels, wanted)
        return proposals, {"loss_objectness": losses[0], "loss_rpn_box_reg": losses[1]}


class PaddedRoIAlign(MultiScaleRoIAlign):
    """RoIAlign on maps cropped to their image.

    RoIAlign extends the edge of a map by up to one cell, followed by zeros; masking of hidden cells
    cannot reproduce this. torchvision also infers the strides from the first batch, wrongly
    for small images.

    Args:
        strides: Strides of the maps, which start at 4 and double.
        output_size: Cells per side of the output.
    """

    def __init__(self, strides: Sequence[int], output_size: int) -> None:
        names = [str(i) for i in range(len(strides))]
        super().__init__(names, output_size=output_size, sampling_ratio=2)
        self.strides = list(strides)
        self.scales = [1 / stride for stride in strides]
        self.map_levels = initLevelMapper(2, 1 + len(strides))

    def forward(
        self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[Size]
    ) -> Tensor:
        """Maps, boxes per image and image sizes -> (all boxes, C, size, size)."""
        maps = {name: _wide(x[name]) for name in self.featmap_names}  # the dtype of the boxes
        dtype = x[self.featmap_names[0]].dtype
        strides = dict(zip(self.featmap_names, self.strides, strict=True))
        grids = [{name: cells(size, strides[name]) for name in maps} for size in image_shapes]
        if all(maps[name].shape[-2:] == grid[name] for grid in grids for name in maps):
            return super().forward(maps, boxes, image_shapes).to(dtype)
        found = []
        for i, grid in enumerate(grids):
            own = {
                name: level[i : i + 1, :, : grid[name][0], : grid[name][1]]
                for name, level in maps.items()
            }
            found.append(super().forward(own, boxes[i : i + 1], image_shapes[i : i + 1]))
        return torch.cat(found).to(dtype)


class WideBoxPredictor(FastRCNNPredictor):
    """torchvision's predictor with boxes in at least float32, the dtype of decoded proposals."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, boxes = super().forward(x)
        return _wide(scores), _wide(boxes)


class WideMaskPredictor(MaskRCNNPredictor):
    """torchvision's mask predictor with an output in at least float32, for numpy."""

    def forward(self, x: Tensor) -> Tensor:
        return _wide(super().forward(x))


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _through(layers: Iterable[nn.Module], x: Tensor, mask: Tensor | None) -> Tensor:
    """Run sequential layers with zeros at hidden cells."""
    for layer in layers:
        x = layer(hide_map(x, mask))
    return x
