# SPDX-License-Identifier: Apache-2.0
"""Object detection: torchvision's RetinaNet and Mask R-CNN on the backbones.

Images of different sizes are padded to a common size, and the padding is masked in
backbone, pyramid and heads: in evaluation the detections of an image do not depend on the batch,
and in training padding does not contribute to the loss.

Labels run from 1 to `num_classes` for both detectors; 0 is the background and not counted.
Boxes are (x0, y0, x1, y1) in pixels of the input images; the left and upper edge of the first
pixel is 0.

Example:
    >>> import torch
    >>> from quadtree_attention import models
    >>> model = models.create("retinanet_test_quadtree", num_classes=3, min_size=64).eval()
    >>> with torch.no_grad():
    ...     found = model([torch.rand(3, 70, 45), torch.rand(3, 48, 90)])
    >>> [sorted(one) for one in found]
    [['boxes', 'labels', 'scores'], ['boxes', 'labels', 'scores']]
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadtree_attention import checks
from quadtree_attention.errors import DTypeError, OptionError, ShapeError
from quadtree_attention.models.backbone import PyramidTransformer
from quadtree_attention.models.parts.inputs import check_floating
from quadtree_attention.models.parts.padded_detection import (
    LevelsOfLastMap,
    MaskedRetinaHead,
    MaskedRPNHead,
    MaxPoolLevel,
    PaddedRoIAlign,
    PaddedRPN,
    PyramidAnchors,
    PyramidBackbone,
    ThinTransform,
    WideBoxPredictor,
    WideMaskPredictor,
    anchors_of,
    padding_masks,
)

with checks.needs("models", "a detector"):
    from torchvision.models import detection
    from torchvision.models.detection.faster_rcnn import TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads

IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # statistics of ImageNet
_RATIOS = (0.5, 1.0, 2.0)
Targets = Sequence[Mapping[str, Tensor]]


class _Detector:
    """Base class of both detectors."""

    backbone: PyramidBackbone
    transform: ThinTransform
    num_classes: int
    training: bool

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable gradient checkpointing of the backbone."""
        self.backbone.body.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: the level weights."""
        return {f"backbone.body.{name}" for name in self.backbone.body.no_weight_decay()}

    def _prepared(
        self,
        images: Sequence[Tensor],
        targets: Targets | None,
        sides: tuple[int, int] | None,
        *,
        with_masks: bool = False,
    ) -> tuple[ThinTransform, Any, Any]:
        """Run the transform, with other sizes if given; return it with batch and targets."""
        check_images(images)
        truth = None
        if self.training:
            truth = check_targets(images, targets, self.num_classes, with_masks=with_masks)
        transform = self.transform
        if sides is not None:
            transform = copy.copy(transform)
            transform.min_size, transform.max_size = (sides[0],), sides[1]
        return transform, *transform(list(images), truth)


class RetinaNet(_Detector, detection.RetinaNet):
    """RetinaNet (Lin et al. 2017) on maps at 1/8 to 1/128 of the image.

    The pyramid takes the last three stages of the backbone; the maps at 1/64 and 1/128 are computed
    from the backbone's last map. Every cell has 9 anchors.

    Args:
        body: The backbone.
        num_classes: Number of classes without the background.
        channels: Channels of pyramid and head.
        anchor_scale: Side of the smallest square anchor of a cell, in strides; the others are
            larger by the cube roots of 2 and 4.
        anchor_ratios: Aspect ratios (height / width) of anchors.
        min_size: Length of the shorter side after resizing; a list for a random choice in
            training, of which evaluation uses the last.
        max_size: Limit of the longer side; takes precedence over `min_size`.
        size_divisible: Sides of a padded batch are multiples of it. 1: minimal padding;
            32 gives fewer different sizes, for `torch.compile`.
        image_mean: Channel means of images in [0, 1].
        image_std: Channel standard deviations.
        score_thresh: Minimum score of detections (exclusive).
        nms_thresh: IoU threshold of non-maximum suppression.
        detections_per_img: Maximum number of detections per image.
        topk_candidates: Maximum number of candidates per map before non-maximum suppression.
    """

    def __init__(
        self,
        body: PyramidTransformer,
        num_classes: int,
        *,
        channels: int = 256,
        anchor_scale: float = 4.0,
        anchor_ratios: Sequence[float] = _RATIOS,
        min_size: int | Sequence[int] = 800,
        max_size: int = 1333,
        size_divisible: int = 1,
        image_mean: Sequence[float] = IMAGE_MEAN,
        image_std: Sequence[float] = IMAGE_STD,
        score_thresh: float = 0.05,
        nms_thresh: float = 0.5,
        detections_per_img: int = 100,
        topk_candidates: int = 1000,
    ) -> None:
        _check_sizes(min_size, max_size=max_size, size_divisible=size_divisible)
        checks.at_least(1, num_classes=num_classes, channels=channels)
        _check_anchors(anchor_scale, anchor_ratios)
        extra = LevelsOfLastMap(body.num_features, channels)
        backbone = PyramidBackbone(body, channels, first_stage=1, extra=extra, num_extra=2)
        octave = [anchor_scale * 2 ** (i / 3) for i in range(3)]
        anchors = PyramidAnchors(backbone.strides, octave, anchor_ratios)
        super().__init__(
            backbone,
            num_classes,
            anchor_generator=anchors,
            head=MaskedRetinaHead(channels, len(octave) * len(anchor_ratios), num_classes),
            score_thresh=score_thresh,
            nms_thresh=nms_thresh,
            detections_per_img=detections_per_img,
            topk_candidates=topk_candidates,
        )
        scaling = (min_size, max_size, list(image_mean), list(image_std))
        self.transform = ThinTransform(*scaling, size_divisible=size_divisible)
        self.num_classes = num_classes

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Targets | None = None,
        *,
        score_threshold: float | None = None,
        sides: tuple[int, int] | None = None,
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return detections, or losses in training.

        Args:
            images: (3, H, W) each, in [0, 1].
            targets: In training, for every image: `boxes` (N, 4) and `labels` (N,), int64.
            score_threshold: Minimum score of detections; no effect below `score_thresh`.
            sides: `min_size` and `max_size` of this call; None: as in the constructor.

        Returns:
            In evaluation, for every image: `boxes` (M, 4), `scores` (M,) and `labels` (M,), sorted
            by score. In training: the losses `classification` and `bbox_regression`.
        """
        transform, batch, truth = self._prepared(images, targets, sides)
        maps, strides = list(self.backbone(batch).values()), self.backbone.strides
        outputs = self.head(maps, padding_masks(batch, strides))
        levels = self.anchor_generator.by_level(maps)
        anchors = [anchors_of(levels, 0, size, strides) for size in batch.image_sizes]
        found = {  # by image, then by level, of different lengths
            name: [anchors_of(x, i, size, strides) for i, size in enumerate(batch.image_sizes)]
            for name, x in outputs.items()
        }
        if self.training:
            truth = [{**one, "labels": one["labels"] - 1} for one in truth]  # by logit
            together = {name: [torch.cat(x) for x in by_image] for name, by_image in found.items()}
            return self.compute_loss(truth, together, [torch.cat(x) for x in anchors])
        by_level = {name: list(zip(*by_image, strict=True)) for name, by_image in found.items()}
        network = _selecting(self, score_threshold)
        detections = network.postprocess_detections(by_level, anchors, batch.image_sizes)
        for one in detections:
            one["labels"] = one["labels"] + 1
        return transform.postprocess(detections, batch.image_sizes, [x.shape[1:] for x in images])


class MaskRCNN(_Detector, detection.MaskRCNN):
    """Mask R-CNN (He et al. 2017) on maps at 1/4 to 1/64 of the image.

    The pyramid takes all four stages of the backbone; the map at 1/64 is the map at 1/32,
    subsampled by 2. Every cell has 3 anchors.

    Args:
        body: The backbone.
        num_classes: Number of classes without the background.
        channels: Channels of pyramid and heads; the layers between them have four times as many.
        anchor_scale: Side of the square anchor of a cell, in strides.
        anchor_ratios: Aspect ratios (height / width) of anchors.
        proposals: Number of proposals per map and of all maps for the second stage; twice as
            many in training.
        rois_per_image: Number of boxes that the second stage is trained on.
        min_size: This and the following options as in `RetinaNet`.
    """

    def __init__(
        self,
        body: PyramidTransformer,
        num_classes: int,
        *,
        channels: int = 256,
        anchor_scale: float = 8.0,
        anchor_ratios: Sequence[float] = _RATIOS,
        proposals: int = 1000,
        rois_per_image: int = 512,
        min_size: int | Sequence[int] = 800,
        max_size: int = 1333,
        size_divisible: int = 1,
        image_mean: Sequence[float] = IMAGE_MEAN,
        image_std: Sequence[float] = IMAGE_STD,
        score_thresh: float = 0.05,
        nms_thresh: float = 0.5,
        detections_per_img: int = 100,
    ) -> None:
        _check_sizes(min_size, max_size=max_size, size_divisible=size_divisible)
        checks.at_least(1, num_classes=num_classes, channels=channels)
        checks.at_least(1, proposals=proposals, rois_per_image=rois_per_image)
        _check_anchors(anchor_scale, anchor_ratios)
        backbone = PyramidBackbone(body, channels, first_stage=0, extra=MaxPoolLevel(), num_extra=1)
        anchors = PyramidAnchors(backbone.strides, [anchor_scale], anchor_ratios)
        head = MaskedRPNHead(channels, len(anchor_ratios))
        pooled = backbone.strides[: len(body.feature_info)]
        super().__init__(
            backbone,
            None,  # defined by the predictors
            rpn_anchor_generator=anchors,
            rpn_head=head,
            box_roi_pool=PaddedRoIAlign(pooled, 7),
            box_head=TwoMLPHead(channels * 7**2, 4 * channels),
            box_predictor=WideBoxPredictor(4 * channels, num_classes + 1),
            box_score_thresh=score_thresh,
            box_nms_thresh=nms_thresh,
            box_detections_per_img=detections_per_img,
            box_batch_size_per_image=rois_per_image,
            mask_roi_pool=PaddedRoIAlign(pooled, 14),
            mask_head=MaskRCNNHeads(channels, (channels,) * 4, 1),
            mask_predictor=WideMaskPredictor(channels, channels, num_classes + 1),
        )
        kept = {"training": 2 * proposals, "testing": proposals}
        self.rpn = PaddedRPN(
            anchors,
            head,
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n=kept,
            post_nms_top_n=kept,
            nms_thresh=0.7,
        )
        scaling = (min_size, max_size, list(image_mean), list(image_std))
        self.transform = ThinTransform(*scaling, size_divisible=size_divisible)
        self.num_classes = num_classes

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Targets | None = None,
        *,
        score_threshold: float | None = None,
        sides: tuple[int, int] | None = None,
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return detections, or losses in training.

        Args:
            images: (3, H, W) each, in [0, 1].
            targets: In training, for every image: `boxes` (N, 4), `labels` (N,), int64, and `masks`
                (N, H, W), 0 or 1.
            score_threshold: As in `RetinaNet`; masks are computed only for boxes above it.
            sides: As in `RetinaNet`.

        Returns:
            In evaluation, for every image: `boxes` (M, 4), `scores` (M,), `labels` (M,) and `masks`
            (M, 1, H, W), probabilities, sorted by score. In training: the losses `loss_objectness`,
            `loss_rpn_box_reg`, `loss_classifier`, `loss_box_reg` and `loss_mask`.
        """
        transform, batch, truth = self._prepared(images, targets, sides, with_masks=True)
        maps = self.backbone(batch)
        proposals, proposal_losses = self.rpn(batch, maps, truth)
        heads = _selecting(self.roi_heads, score_threshold)
        found, losses = heads(maps, proposals, batch.image_sizes, truth)
        if self.training:
            return {**proposal_losses, **losses}
        return transform.postprocess(found, batch.image_sizes, [x.shape[1:] for x in images])


def check_images(images: Sequence[Tensor]) -> None:
    """Raise an error for the first invalid image."""
    if isinstance(images, Tensor) or not images:
        got = f"a tensor {tuple(images.shape)}" if isinstance(images, Tensor) else "nothing"
        raise ShapeError(f"images must be a list of (3, y, x), one or more, got {got}; list them")
    for i, image in enumerate(images):
        if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
            raise ShapeError(
                f"every image must be (3, y, x) with at least one pixel, got "
                f"images[{i}].shape={tuple(image.shape)}; move the channels to the front"
            )
        check_floating(f"images[{i}]", image)


def check_targets(
    images: Sequence[Tensor], targets: Targets | None, num_classes: int, *, with_masks: bool = False
) -> list[dict[str, Tensor]]:
    """Return the targets of these images; raise an error for the first invalid one."""
    if targets is None or len(targets) != len(images):
        got = "none" if targets is None else f"{len(targets)}"
        raise ShapeError(
            f"training needs one target for each of the {len(images)} images, got {got}; pass "
            "them, or call eval() to detect"
        )
    needed = ["boxes", "labels", *(["masks"] if with_masks else [])]
    for i, (image, target) in enumerate(zip(images, targets, strict=True)):
        if missing := [name for name in needed if name not in target]:
            raise ShapeError(
                f"targets must have {', '.join(needed)}, got targets[{i}] without "
                f"{', '.join(missing)}; add them, empty for an image without objects"
            )
        count = len(target["boxes"])
        shapes = {"boxes": (count, 4), "labels": (count,), "masks": (count, *image.shape[1:])}
        for name in needed:
            if (shape := tuple(target[name].shape)) != shapes[name]:
                raise ShapeError(
                    f"{name} must be {shapes[name]} here, got targets[{i}] with "
                    f"{name}.shape={shape}; give every object one entry"
                )
        _check_values(f"targets[{i}]", target["boxes"], target["labels"], num_classes)
    return [dict(target) for target in targets]


def _check_values(which: str, boxes: Tensor, labels: Tensor, num_classes: int) -> None:
    if labels.dtype != torch.int64 or not boxes.is_floating_point():
        raise DTypeError(
            f"boxes must be floating point and labels int64, got {which} with {boxes.dtype} and "
            f"{labels.dtype}; convert them"
        )
    unknown = (labels < 1) | (labels > num_classes)
    flat = ~(boxes[:, 2:] > boxes[:, :2]).all(dim=1)
    if not (unknown | flat).any():  # one GPU synchronisation
        return
    if unknown.any():
        raise OptionError(
            f"labels must be in [1, num_classes={num_classes}], 0 is the background, got "
            f"{int(labels[unknown][0])} in {which}; count classes from 1"
        )
    raise OptionError(
        f"boxes must be (x0, y0, x1, y1) with x1 > x0 and y1 > y0, got "
        f"{boxes[flat][0].tolist()} in {which}; remove invalid boxes"
    )


def _selecting(heads: Any, score: float | None) -> Any:
    """Set a higher score threshold of the module for one call."""
    if score is None:
        return heads
    below = float(
        np.nextafter(np.float32(score), np.float32(-1))
    )  # the module's threshold is exclusive
    changed = copy.copy(heads)
    changed.score_thresh = max(heads.score_thresh, below)
    return changed


def _check_sizes(min_size: int | Sequence[int], **others: int) -> None:
    sizes = [min_size] if isinstance(min_size, int) else list(min_size)
    if not sizes:
        raise OptionError("min_size must be one size or several, got none; 800 is usual")
    for size in sizes:
        checks.at_least(1, min_size=size, **others)


def _check_anchors(scale: float, ratios: Sequence[float]) -> None:
    if not scale > 0 or not ratios or not all(ratio > 0 for ratio in ratios):
        raise OptionError(
            f"anchors need an anchor_scale above 0 and one or more anchor_ratios above 0, got "
            f"{scale!r} and {tuple(ratios)}; 0.5, 1 and 2 are usual ratios"
        )
