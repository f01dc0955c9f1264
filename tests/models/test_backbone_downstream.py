# SPDX-License-Identifier: Apache-2.0
"""The backbones inside other people's segmenters and detectors."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import quadtree_attention.models.backbone  # noqa: F401  registers the names

timm = pytest.importorskip("timm", reason="the backbones need timm (extra 'models')")
pytestmark = pytest.mark.usefixtures("only_reference", "one_thread")


# ---- segmentation_models_pytorch


@pytest.fixture
def smp():
    return pytest.importorskip(
        "segmentation_models_pytorch", reason="it comes with the extra 'dev'"
    )


@pytest.mark.parametrize("kind", ["Unet", "FPN", "UPerNet", "Segformer", "UnetPlusPlus"])
def test_decoders(smp, kind):
    name = "quadtree_b_b0" if kind == "Unet" else "test_quadtree"
    model = getattr(smp, kind)(f"tu-{name}", encoder_weights=None, classes=3)
    out = model(torch.randn(2, 3, 96, 128))
    assert out.shape == (2, 3, 96, 128)
    out.square().mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
    assert model.encoder.model.patch_embed.proj.weight.grad.any()


def test_encoder_is_taken_like_other_transformers(smp):
    """Strides start at 4: smp puts an empty map in place of stride 2, as it does for PVTv2."""
    ours = smp.encoders.get_encoder("tu-quadtree_b_b0", weights=None).eval()
    theirs = smp.encoders.get_encoder("tu-pvt_v2_b0", weights=None).eval()
    assert ours.out_channels == theirs.out_channels == [3, 0, 32, 64, 160, 256]
    assert ours.output_stride == theirs.output_stride == 32
    x = torch.randn(1, 3, 96, 128)
    with torch.no_grad():
        assert [m.shape for m in ours(x)] == [m.shape for m in theirs(x)]


def test_encoder_of_lower_depth_and_other_options(smp):
    options = {"encoder_depth": 4, "decoder_channels": (32, 16, 16, 8), "in_channels": 1}
    options |= {"encoder_weights": None, "topk": 2, "value_act": "relu"}
    model = smp.Unet("tu-test_quadtree", **options)
    assert model.encoder.out_channels == [1, 0, 8, 16, 24]
    assert model.encoder.model.stages_0.blocks[0].attn.topk == (2, 2, 2)
    assert model(torch.randn(1, 1, 96, 128)).shape == (1, 1, 96, 128)


# ---- torchvision


SIZES = {"min_size": 64, "max_size": 96}


class Backbone(nn.Module):
    """Maps of all stages, through torchvision's feature pyramid network."""

    def __init__(self, fpn: Callable[..., nn.Module], width: int = 16) -> None:
        super().__init__()
        self.body = timm.create_model(
            "test_quadtree", features_only=True, topk=32, value_act="relu"
        )
        self.fpn = fpn(self.body.feature_info.channels(), width)
        self.out_channels = width

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.fpn({str(i): level for i, level in enumerate(self.body(x))})


@pytest.fixture
def backbone() -> Backbone:
    ops = pytest.importorskip("torchvision.ops", reason="torchvision comes with extra 'models'")
    return Backbone(ops.FeaturePyramidNetwork)


def target(*, masks: bool) -> dict[str, torch.Tensor]:
    found = {"boxes": torch.tensor([[5.0, 8.0, 40.0, 50.0]]), "labels": torch.tensor([1])}
    if masks:
        found["masks"] = torch.zeros(1, 61, 90, dtype=torch.uint8)
        found["masks"][:, 8:50, 5:40] = 1
    return found


def check_detector(detector: nn.Module, losses: set[str], results: set[str]) -> None:
    images = [torch.rand(3, 61, 90), torch.rand(3, 61, 90)]
    targets = [target(masks="masks" in results)] * 2
    got = detector.train()(images, targets)
    assert got.keys() == losses and all(loss.isfinite() for loss in got.values())
    sum(got.values()).backward()
    body = detector.backbone.body
    assert body.patch_embed.proj.weight.grad.abs().sum() > 0
    assert [n for n, p in body.named_parameters() if p.grad is None] == []
    with torch.no_grad():
        found = detector.eval()(images)
    assert len(found) == 2
    for one in found:
        assert one.keys() == results
        count = len(one["scores"])
        assert count > 0 and one["boxes"].shape == (count, 4)
        # in pixels of the image that was given
        assert (one["boxes"] >= 0).all() and (one["boxes"] <= torch.tensor([90, 61] * 2)).all()
        if "masks" in results:
            assert one["masks"].shape == (count, 1, 61, 90)


def anchors():
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(((16,), (32,), (64,), (128,)), ((0.5, 1.0, 2.0),) * 4)


def test_retinanet(backbone):
    from torchvision.models.detection import RetinaNet

    detector = RetinaNet(
        backbone, 2, **SIZES, anchor_generator=anchors(), score_thresh=0.0, detections_per_img=5
    )
    check_detector(detector, {"classification", "bbox_regression"}, {"boxes", "scores", "labels"})


def test_mask_rcnn(backbone):
    from torchvision.models.detection import MaskRCNN
    from torchvision.ops import MultiScaleRoIAlign

    pools = (MultiScaleRoIAlign(["0", "1", "2", "3"], size, sampling_ratio=2) for size in (7, 14))
    options = dict(zip(("box_roi_pool", "mask_roi_pool"), pools, strict=True))
    options |= {"rpn_post_nms_top_n_train": 50, "rpn_post_nms_top_n_test": 50}
    options |= {"box_score_thresh": 0.0, "box_detections_per_img": 5}
    detector = MaskRCNN(backbone, 2, **SIZES, rpn_anchor_generator=anchors(), **options)
    losses = {"loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg"}
    check_detector(detector, losses, {"boxes", "scores", "labels", "masks"})
