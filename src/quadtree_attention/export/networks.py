# SPDX-License-Identifier: Apache-2.0
"""Networks as functions of tensors, the form in which they are exported.

Inputs are images in [0, 1]: float32, (B, 3, H, W) in RGB, or (B, 1, H, W) in grey for a matcher.
Normalisation by mean and standard deviation is part of the network. Networks with a score
threshold have it as their last input.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.models.backbone import PyramidTransformer
from quadtree_attention.models.matcher import LoFTR
from quadtree_attention.models.segmentation import SemanticFPN
from quadtree_attention.models.stereo import STTR

with checks.needs("models", "exporting"):
    import torchvision

Sizes = tuple[tuple[int, int], ...]


class Exportable(nn.Module):
    """A network with named tensors as inputs and outputs.

    Args:
        network: The network.
        threshold: Default of the score threshold; None: no such input.

    Attributes:
        task: The task of the network.
        images: Names of the images.
        channels: Channels of the images.
        dynamic_batch: Whether the batch size may vary; otherwise it is 1.
        outputs: Names of the outputs with their shapes and contents.
        example: (height, width) of the images of the example.
        checked: The same, of the images of three checks.
    """

    task: ClassVar[str]
    images: ClassVar[tuple[str, ...]] = ("image",)
    channels: ClassVar[int] = 3
    dynamic_batch: bool = True
    outputs: ClassVar[Mapping[str, str]]
    example: ClassVar[Sizes] = ((128, 160),)
    checked: ClassVar[tuple[Sizes, ...]] = (((100, 160),), ((101, 77),), ((192, 256),))

    def __init__(self, network: nn.Module, threshold: float | None = None) -> None:
        super().__init__()
        self.network = network
        self.threshold = threshold


class ExportableMatcher(Exportable):
    """Points, confidence and sample of all matches of a batch of pairs."""

    task = "match"
    images = ("image0", "image1")
    channels = 1
    outputs: ClassVar = {
        "keypoints0": "(M, 2), x and y in pixels of image0",
        "keypoints1": "(M, 2), x and y in pixels of image1",
        "confidence": "(M,), 0 to 1",
        "batch_indexes": "(M,), the pair of each match",
    }
    example = ((128, 160), (136, 168))
    checked = (
        ((120, 160), (120, 160)),
        ((101, 77), (90, 131)),
        ((192, 256), (256, 192)),
    )
    network: LoFTR

    def __init__(self, network: LoFTR, threshold: float | None) -> None:
        least = network.coarse_matching.threshold if threshold is None else threshold
        super().__init__(network, least)

    def forward(self, image0: Tensor, image1: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
        found = self.network({"image0": image0, "image1": image1}, threshold=threshold)
        return tuple(found[name] for name in self.outputs)


class ExportableStereo(Exportable):
    """Disparity and probability of occlusion of the left views."""

    task = "stereo"
    images = ("left", "right")
    outputs: ClassVar = {
        "disparity": "(B, H, W), pixels",
        "occlusion": "(B, H, W), probability that the right view does not show a pixel",
    }
    example = ((544, 576), (544, 576))  # no map of a pooling has a single cell
    checked = (((100, 160),) * 2, ((101, 77),) * 2, ((120, 176),) * 2)
    network: STTR

    def __init__(self, network: STTR) -> None:
        super().__init__(network)
        self.dynamic_batch = network.layout == "hourglass"  # others have statistics of one pair

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        found = self.network({"image0": left, "image1": right})
        return found.disparity, found.occlusion


class Normalised(Exportable):
    """Base class of networks on the backbones."""

    def __init__(
        self,
        network: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        threshold: float | None = None,
    ) -> None:
        super().__init__(network, threshold)
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def normalised(self, images: Tensor) -> Tensor:
        mean, std = cast(Tensor, self.mean), cast(Tensor, self.std)
        return (images - mean) / std


class ExportableClassifier(Normalised):
    """Logits of the classes; features of a network without classifier."""

    task = "classify"
    outputs: ClassVar = {"logits": "(B, classes); their softmax are probabilities"}

    def __init__(self, network: PyramidTransformer) -> None:
        config = cast(Any, network).pretrained_cfg
        super().__init__(network, config["mean"], config["std"])

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return (self.network(self.normalised(image)),)


class ExportableSegmenter(Normalised):
    """Logits of the classes of every pixel."""

    task = "segment"
    outputs: ClassVar = {"logits": "(B, classes, H, W); the largest is the class of a pixel"}

    def __init__(self, network: SemanticFPN) -> None:
        config = cast(Any, network.backbone).pretrained_cfg
        super().__init__(network, config["mean"], config["std"])

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return (self.network(self.normalised(image)),)


class ExportableDetector(Normalised):
    """Base class of detectors. The selection of detections is that of torchvision, with ties.

    Candidates are selected by a top K of fixed size before scores are compared with the threshold,
    so that sizes are known except those of the final results.
    """

    task = "detect"
    dynamic_batch = False
    example = ((288, 320),)  # no map of the pyramid has a single cell
    outputs: ClassVar = {
        "boxes": "(M, 4), x0, y0, x1, y1 in pixels of the input",
        "scores": "(M,), 0 to 1, descending",
        "labels": "(M,), classes counted from 1",
    }
    network: Any

    def __init__(self, network: Any, threshold: float) -> None:
        transform = network.transform
        super().__init__(network, transform.image_mean, transform.image_std, threshold)

    def maps(self, image: Tensor) -> list[Tensor]:
        """Maps of the feature pyramid, finest first."""
        backbone = self.network.backbone
        maps = backbone.body.forward_intermediates(
            self.normalised(image), backbone.stages, intermediates_only=True
        )
        named = {str(i): x for i, x in enumerate(maps)}
        return list(backbone.fpn(named, [None] * (1 + len(backbone.strides))).values())


class ExportableRetinaNet(ExportableDetector):
    """RetinaNet."""

    def __init__(self, network: Any, threshold: float | None) -> None:
        super().__init__(network, network.score_thresh if threshold is None else threshold)

    def forward(self, image: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
        network = self.network
        maps = self.maps(image)
        found = network.head(maps)
        anchors = network.anchor_generator.by_level(maps)
        boxes, scores, labels = [], [], []
        for logits, deltas, own in zip(
            found["cls_logits"], found["bbox_regression"], anchors, strict=True
        ):
            classes = logits.shape[-1]
            best, place = topk(logits.sigmoid().flatten(), network.topk_candidates)
            anchor = place // classes
            regression = deltas.reshape(-1, 4)[anchor]
            decoded = network.box_coder.decode_single(regression, own.reshape(-1, 4)[anchor])
            boxes.append(clipped(decoded, image))
            scores.append(best)
            labels.append(place % classes)
        together = torch.cat(boxes), torch.cat(scores), torch.cat(labels)
        chosen = (together[1] > threshold).nonzero()[:, 0]
        together = tuple(x[chosen] for x in together)  # type: ignore[assignment]
        kept = batched_nms(*together, network.nms_thresh)[: network.detections_per_img]
        return together[0][kept], together[1][kept], together[2][kept] + 1


class ExportableMaskRCNN(ExportableDetector):
    """Mask R-CNN; masks are those of boxes, not yet pasted into the image."""

    outputs: ClassVar = {
        **ExportableDetector.outputs,
        "masks": "(M, 28, 28), probability that a cell of the box belongs to the object",
    }

    def __init__(self, network: Any, threshold: float | None) -> None:
        least = network.roi_heads.score_thresh if threshold is None else threshold
        super().__init__(network, least)

    def forward(self, image: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
        heads, maps = self.network.roi_heads, self.maps(image)
        proposals = self.proposals(maps, image)
        pooled = heads.box_head(self.pooled(heads.box_roi_pool, maps, proposals))
        logits, deltas = heads.box_predictor(pooled)
        classes = logits.shape[-1]
        boxes = heads.box_coder.decode_single(deltas, proposals)
        boxes = clipped(boxes.reshape(-1, classes, 4)[:, 1:], image).reshape(-1, 4)
        scores = F.softmax(logits, dim=-1)[:, 1:].reshape(-1)
        labels = torch.arange(1, classes, device=image.device)
        labels = labels.expand(proposals.shape[0], -1).reshape(-1)
        chosen = ((scores > threshold) & is_large(boxes, 1e-2)).nonzero()[:, 0]
        boxes, scores, labels = boxes[chosen], scores[chosen], labels[chosen]
        kept = batched_nms(boxes, scores, labels, heads.nms_thresh)[: heads.detections_per_img]
        boxes, scores, labels = boxes[kept], scores[kept], labels[kept]
        masks = heads.mask_head(self.pooled(heads.mask_roi_pool, maps, boxes))
        masks = heads.mask_predictor(masks).sigmoid()  # (M, classes, 28, 28)
        index = labels[:, None, None, None].expand(-1, 1, *masks.shape[2:])
        return boxes, scores, labels, masks.gather(1, index)[:, 0]

    def proposals(self, maps: list[Tensor], image: Tensor) -> Tensor:
        """Boxes (N, 4) of the region proposal network."""
        rpn = self.network.rpn
        logits, deltas = rpn.head(maps)
        anchors = rpn.anchor_generator.by_level(maps)
        boxes, scores, levels = [], [], []
        for i, (own, anchor) in enumerate(zip(deltas, anchors, strict=True)):
            best, place = topk(logits[i].flatten(), rpn.pre_nms_top_n())
            found = rpn.box_coder.decode_single(
                own.reshape(-1, 4)[place], anchor.reshape(-1, 4)[place]
            )
            boxes.append(clipped(found, image))
            scores.append(best.sigmoid())
            levels.append(torch.full_like(place, i))
        together, score, level = torch.cat(boxes), torch.cat(scores), torch.cat(levels)
        chosen = (is_large(together, rpn.min_size) & (score > 0)).nonzero()[:, 0]
        together, score, level = together[chosen], score[chosen], level[chosen]
        return together[batched_nms(together, score, level, rpn.nms_thresh)[: rpn.post_nms_top_n()]]

    def pooled(self, pool: Any, maps: list[Tensor], boxes: Tensor) -> Tensor:
        """RoIAlign of every box on the map of its size: (N, C, size, size)."""
        rois = F.pad(boxes, (1, 0))  # of sample 0
        level = pool.map_levels([boxes])[:, None, None, None]
        total: Tensor | None = None
        for i, scale in enumerate(pool.scales):
            found = torchvision.ops.roi_align(
                maps[i], rois, pool.output_size, scale, pool.sampling_ratio
            )
            found = torch.where(level == i, found, 0)
            total = found if total is None else total + found
        assert total is not None
        return total


def exportable(network: nn.Module, threshold: float | None = None) -> Exportable:
    """Returns a network of this package in the form in which it is exported.

    Args:
        network: The network.
        threshold: Default score threshold of a matcher or detector; None: as the network has it.

    Raises:
        OptionError: It is not a network of this package, or has no threshold.
    """
    from quadtree_attention.models.detection import MaskRCNN, RetinaNet

    classes: dict[type, Any] = {
        LoFTR: ExportableMatcher,
        RetinaNet: ExportableRetinaNet,
        MaskRCNN: ExportableMaskRCNN,
        STTR: ExportableStereo,
        PyramidTransformer: ExportableClassifier,
        SemanticFPN: ExportableSegmenter,
    }
    for known, wrapper in classes.items():
        if isinstance(network, known):
            if issubclass(wrapper, ExportableMatcher | ExportableDetector):
                return cast(Exportable, wrapper(network, threshold)).eval()
            if threshold is not None:
                raise OptionError(
                    f"a threshold is for matchers and detectors, got {threshold} for "
                    f"{known.__name__}; leave it out"
                )
            return cast(Exportable, wrapper(network)).eval()
    raise OptionError(
        f"only networks of quadtree_attention.models can be exported, got {type(network).__name__};"
        " export other modules by torch.onnx.export(..., dynamo=True)"
    )


def topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of (N,), or of fewer with a filling of -1 at the place 0."""
    best, place = F.pad(values, (0, count), value=-torch.inf).topk(count)
    missing = place >= values.shape[0]
    return torch.where(missing, -1, best), torch.where(missing, 0, place)


def clipped(boxes: Tensor, image: Tensor) -> Tensor:
    """Boxes (..., 4) with corners inside of an image (B, C, H, W)."""
    x, y = boxes[..., 0::2], boxes[..., 1::2]
    both = x.clamp(0, image.shape[3]), y.clamp(0, image.shape[2])
    return torch.stack(both, dim=-1).flatten(-2)


def is_large(boxes: Tensor, side: float) -> Tensor:
    """Whether both sides of boxes (N, 4) have a minimum length: (N,)."""
    return ((boxes[:, 2:] - boxes[:, :2]) >= side).all(dim=1)


def batched_nms(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression within groups; places of the remaining boxes, best first."""
    offset = groups.to(boxes) * (F.pad(boxes, (0, 0, 0, 1)).max() + 1)
    return torch.ops.torchvision.nms(boxes + offset[:, None], scores, threshold)
