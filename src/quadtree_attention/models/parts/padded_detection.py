# SPDX-License-Identifier: Apache-2.0
"""torchvision's feature pyramid and heads for padded batches: padding influences nothing.

Images of different sizes are put on one canvas, each at its top left. Cells of a map that cover no
pixel of their image are hidden: convolutions read zeros there, as they do past the edge of a map;
anchors there are left out; and boxes are cut out of maps that end where their image does. So an
image gives on a canvas what it gives alone.
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
    """torchvision's resizing and padding, with at least one pixel left of every side.

    Its own leaves none of the shorter side of an image such as 3x8000, and fails.
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
    """Rows and columns of the map of an image, at that stride."""
    return -(-size[0] // stride), -(-size[1] // stride)


def padding_masks(images: ImageList, strides: Iterable[int]) -> list[Tensor | None]:
    """Visible cells (B, H, W) at every stride; None where no image of the batch was padded."""
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
    """(B, A * columns, H, W) -> (B, H, W, A, columns), in float32 at least.

    Boxes of 1333 pixels have no place in half precision.
    """
    return _wide(x).unflatten(1, (-1, columns)).permute(0, 3, 4, 1, 2)


def anchors_of(
    levels: Sequence[Tensor], sample: int, size: Size, strides: Sequence[int]
) -> list[Tensor]:
    """Entries of the anchors that one image has: [(B, H, W, A, ...)] -> [(anchors, ...)]."""
    grids = [cells(size, stride) for stride in strides]
    return [
        level[sample, :height, :width].flatten(0, 2)
        for level, (height, width) in zip(levels, grids, strict=True)
    ]


class PyramidBackbone(nn.Module):
    """A backbone and a feature pyramid on its last maps, as torchvision's detectors want them.

    Args:
        body: The backbone.
        channels: Of all maps of the pyramid.
        first_stage: Stage of the backbone, from 0, that the pyramid starts at.
        extra: What adds maps above the last.
        num_extra: How many.
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
        """A batch, with the sizes of its images if they were padded -> maps, finest first."""
        if isinstance(images, Tensor):
            images = ImageList(images, [tuple(images.shape[2:])] * len(images))
        visible, *masks = padding_masks(images, [1, *self.strides])
        maps = self.body.forward_intermediates(
            images.tensors, self.stages, intermediates_only=True, mask=visible
        )
        return self.fpn(OrderedDict((str(i), x) for i, x in enumerate(maps)), masks)


class MaskedPyramid(FeaturePyramidNetwork):
    """torchvision's feature pyramid, which masks reach."""

    def forward(self, x: dict[str, Tensor], masks: Masks) -> "OrderedDict[str, Tensor]":
        """Maps that are 0 where hidden, and the masks of all maps that come out."""
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
    """Two more maps made from the backbone's last one.

    torchvision would take the pyramid's own last map where both have as many channels.
    """

    def forward(
        self, p: list[Tensor], c: list[Tensor], names: list[str], mask: Tensor | None = None
    ) -> tuple[list[Tensor], list[str]]:
        """Adds two maps; `mask` is that of the first of them."""
        p6 = self.p6(c[-1])
        p7 = self.p7(F.relu(hide_map(p6, mask)))
        return [*p, p6, p7], [*names, "p6", "p7"]


class MaxPoolLevel(LastLevelMaxPool):
    """One more map, of every second cell of the last one: it mixes none and needs no mask."""

    def forward(
        self, x: list[Tensor], y: list[Tensor], names: list[str], mask: Tensor | None = None
    ) -> tuple[list[Tensor], list[str]]:
        return super().forward(x, y, names)


class PyramidAnchors(AnchorGenerator):
    """Anchors of maps with fixed strides, not rounded to pixels.

    torchvision divides the canvas by the map to get a stride, which is no whole number where sizes
    do not divide, and counts in the dtype of the maps, which may have 8 bits.

    Args:
        strides: Of the maps.
        scales: Sides of the square anchors, in strides.
        ratios: Height of an anchor by its width.
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
        """(A, 4), around 0; ratios in the outer loop."""
        sides = torch.tensor(scales, dtype=dtype, device=device)
        root = torch.tensor(aspect_ratios, dtype=dtype, device=device).sqrt()[:, None]
        width, height = (sides / root).flatten(), (sides * root).flatten()
        return torch.stack([-width, -height, width, height], dim=1) / 2

    def by_level(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """(1, H, W, A, 4) for every map, in float32 at least."""
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
        """Those of the whole canvas, for every image: (anchors, 4)."""
        together = torch.cat([level.flatten(0, 3) for level in self.by_level(feature_maps)])
        return [together] * len(image_list.image_sizes)


class MaskedRetinaHead(RetinaNetHead):
    """torchvision's head of RetinaNet, which masks reach."""

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
    """torchvision's head of the region proposal network, which masks reach."""

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
        """Boxes (N, 4) of every image, the most promising first; in training the losses, too."""
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
    """Cuts boxes out of the maps of their image, as if they ended where it does.

    RoIAlign goes on with the edge of a map for up to one cell, and with zeros behind that; no
    values of hidden cells would make it do so. torchvision also guesses the strides from the first
    batch it sees, wrongly if that is small.

    Args:
        strides: Of the maps, which start at 4 and double.
        output_size: Cells per side of what is cut out.
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
        """Maps, boxes of every image and sizes of the images -> (all boxes, C, size, size)."""
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
    """torchvision's predictor; boxes in float32 at least, in whose dtype proposals are decoded."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, boxes = super().forward(x)
        return _wide(scores), _wide(boxes)


class WideMaskPredictor(MaskRCNNPredictor):
    """torchvision's predictor of masks; in float32 at least, which numpy knows."""

    def forward(self, x: Tensor) -> Tensor:
        return _wide(super().forward(x))


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _through(layers: Iterable[nn.Module], x: Tensor, mask: Tensor | None) -> Tensor:
    """Layers that read zeros at hidden cells, one after the other."""
    for layer in layers:
        x = layer(hide_map(x, mask))
    return x
