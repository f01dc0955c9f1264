# SPDX-License-Identifier: Apache-2.0
"""PVTv2 of timm, loaded by name, gives timm's numbers."""

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm", reason="the backbones need timm (extra 'models')")
pytest.importorskip("quadtree_attention.models.backbone")  # registers them
pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR = {"attention": "linear_spatial_reduction"}
REDUCTION = {"attention": "spatial_reduction"}


@torch.no_grad()
def theirs(name: str, **options) -> nn.Module:
    """With weights large enough that every part of the model shows in the result."""
    model = timm.create_model(name, **options).eval()
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.normal_(mean=1.0 if "norm" in key and "weight" in key else 0.0, std=0.1)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "ours", "sizes"),
    [
        ("pvt_v2_b0", ("quadtree_b_b0", REDUCTION), [(224, 224), (160, 256), (197, 271)]),
        ("pvt_v2_b2_li", ("quadtree_b_b2", LINEAR), [(224, 224), (109, 160)]),
    ],
)
def test_whole_model_equals_timm(name, ours, sizes):
    reference = theirs(name, num_classes=10, dtype=torch.float64)
    options = {"num_classes": 10, "lepe": False, "dtype": torch.float64}
    model = timm.create_model(ours[0], **options, **ours[1]).eval()
    model.load_state_dict(reference.state_dict())
    for size in sizes:
        x = torch.randn(1, 3, *size, dtype=torch.float64)
        features, expected = model.forward_features(x), reference.forward_features(x)
        torch.testing.assert_close(features, expected, rtol=0, atol=1e-9)
        logits, expected = model.forward_head(features), reference.forward_head(expected)
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


def test_timm_loads_it_by_itself(tmp_path):
    reference = theirs("pvt_v2_b0", num_classes=10)
    torch.save(reference.state_dict(), tmp_path / "pvt.pth")
    overlay = {"file": str(tmp_path / "pvt.pth"), "num_classes": 10}
    options = {"pretrained": True, "pretrained_cfg_overlay": overlay, "num_classes": 10}
    model = timm.create_model("quadtree_b_b0", **options, **REDUCTION)
    expected = reference.state_dict()
    assert expected.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


def test_warm_start_of_quadtree_attention():
    state = theirs("pvt_v2_b0").state_dict()
    model = timm.create_model("quadtree_b_b0")
    left = model.load_state_dict(state, strict=False)
    assert all(".attn." in name for name in left.missing_keys + left.unexpected_keys)
    name = "stages.2.blocks.1.mlp.dwconv.weight"
    assert torch.equal(model.get_parameter(name), state[name])
