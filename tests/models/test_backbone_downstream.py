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


class Backbone(nn.Module):
    """Maps of all stages, through torchvision's feature pyramid network."""

    def __init__(self, fpn: Callable[..., nn.Module], width: int = 16) -> None:
        super().__init__()
        options = {"features_only": True, "topk": 32, "value_act": "relu"}
        self.body = timm.create_model("test_quadtree", **options)
        self.fpn = fpn(self.body.feature_info.channels(), width)
        self.out_channels = width

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.fpn({str(i): level for i, level in enumerate(self.body(x))})


def test_retinanet():
    reason = "torchvision comes with the extra 'models'"
    ops = pytest.importorskip("torchvision.ops", reason=reason)
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    anchors = AnchorGenerator(((16,), (32,), (64,), (128,)), ((0.5, 1.0, 2.0),) * 4)
    options = {"min_size": 64, "max_size": 96, "score_thresh": 0.0, "detections_per_img": 5}
    backbone = Backbone(ops.FeaturePyramidNetwork)
    detector = RetinaNet(backbone, 2, anchor_generator=anchors, **options)
    images = [torch.rand(3, 61, 90), torch.rand(3, 61, 90)]
    target = {"boxes": torch.tensor([[5.0, 8.0, 40.0, 50.0]]), "labels": torch.tensor([1])}
    losses = detector.train()(images, [target] * 2)
    assert losses.keys() == {"classification", "bbox_regression"}
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    assert backbone.body.patch_embed.proj.weight.grad.any()
    assert [n for n, p in backbone.body.named_parameters() if p.grad is None] == []
    with torch.no_grad():
        found = detector.eval()(images)
    assert len(found) == 2
    for one in found:
        count = len(one["scores"])
        assert count > 0 and one["boxes"].shape == (count, 4)
        # in pixels of the image that was given
        assert (one["boxes"] >= 0).all() and (one["boxes"] <= torch.tensor([90, 61] * 2)).all()
