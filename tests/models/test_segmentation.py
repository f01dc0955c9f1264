# SPDX-License-Identifier: Apache-2.0
"""Semantic FPN: names, sizes of images, what the official one computes, windows that slide."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("timm", reason="the backbones need timm (extra 'models')")
pytest.importorskip("torchvision", reason="the feature pyramid needs torchvision (extra 'models')")

from quadtree_attention.errors import OptionError, ShapeError
from quadtree_attention.models.registry import create
from quadtree_attention.models.segmentation import SemanticFPN, sliding_window
from tests.support import raises

pytestmark = pytest.mark.usefixtures("only_reference")
SMALL = {"channels": 16, "head_channels": 8}
# Million parameters: PVT's table for its own attention, and what ours come to
PARAMETERS = {
    ("b0", "spatial_reduction"): 7.6,
    ("b2", "spatial_reduction"): 29.1,
    ("b0", "quadtree"): 7.5,
    ("b2", "quadtree"): 28.8,
}


def tiny(num_classes=5, **options):
    return create("semfpn_test_quadtree", num_classes=num_classes, **{**SMALL, **options})


def attentions(model):
    return [block.attn for stage in model.backbone.stages for block in stage.blocks]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    found = tiny().eval()
    for module in found.modules():  # as after training: statistics that do something
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    nn.init.normal_(found.classifier.weight)
    return found


# ---- what can be built


@pytest.mark.parametrize(("size", "attention"), PARAMETERS)
def test_parameters(size, attention):
    with torch.device("meta"):
        model = create(f"semfpn_quadtree_b_{size}", num_classes=150, attention=attention)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(PARAMETERS[size, attention], abs=0.06)


def test_official_options_are_the_default():
    for attention in attentions(tiny())[:-1]:
        assert set(attention.topk) == {32}
        assert all(branch.activation == "relu" for branch in attention.value_branches)
    other = attentions(tiny(topk=4, value_act="gelu"))[0]
    assert set(other.topk) == {4} and other.value_branches[0].activation == "gelu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wings": 2}, "must be one of num_classes, .*, got 'wings'"),
        ({"global_pool": "avg"}, "got 'global_pool'"),
        ({"norm": "layer"}, "norm must be one of batch, group"),
        ({"norm": "group", "head_channels": 8}, "a multiple of 32"),
        ({"dropout": 1.0}, "dropout must be in .0, 1.,"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_built(options, message):
    raises(OptionError, message, tiny, **options)


# ---- what it computes


@pytest.mark.parametrize("size", [(70, 45), (33, 31), (64, 96), (1, 1), (5, 130)])
def test_output_has_the_size_of_the_image(model, size):
    with torch.no_grad():
        assert model(torch.randn(1, 3, *size)).shape == (1, 5, *size)


@pytest.mark.parametrize("shape", [(3, 64, 96), (1, 3, 0, 96), (1, 1, 3, 8, 8)])
def test_what_is_no_image(model, shape):
    raises(ShapeError, r"x must be \(batch, 3, y, x\)", model, torch.zeros(shape))


def test_is_the_head_of_panoptic_fpn(model):
    """Against the formula, for a size that divides: maps twice as large after each convolution."""
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        maps = model.backbone.forward_intermediates(x, intermediates_only=True)
        inner = [model.pyramid.inner_blocks[i](level) for i, level in enumerate(maps)]
        for i in (2, 1, 0):
            inner[i] = inner[i] + inner[i + 1].repeat_interleave(2, 2).repeat_interleave(2, 3)
        total = 0
        for i, level in enumerate(inner):
            y = model.pyramid.layer_blocks[i](level)
            for conv, norm, _ in model.levels[i]:
                scale = norm.weight / (norm.running_var + norm.eps).sqrt()
                y = F.conv2d(y, conv.weight, padding=1)
                y = (y - norm.running_mean[:, None, None]) * scale[:, None, None]
                y = (y + norm.bias[:, None, None]).relu()
                if i:
                    size = [2 * side for side in y.shape[2:]]
                    y = F.interpolate(y, size, mode="bilinear", align_corners=False)
            total = total + y
        logits = F.conv2d(total, model.classifier.weight, model.classifier.bias)
        expected = F.interpolate(logits, (64, 96), mode="bilinear", align_corners=False)
        torch.testing.assert_close(model(x), expected)


class SameMaps(nn.Module):
    """A backbone that sees the same in every image."""

    def __init__(self):
        super().__init__()
        dims = tuple(enumerate((8, 16, 24, 32)))
        self.maps = [torch.randn(1, dim, 16 >> i, 24 >> i) for i, dim in dims]
        self.feature_info = [{"num_chs": dim, "reduction": 4 << i} for i, dim in dims]

    def forward_intermediates(self, x, *, intermediates_only):
        return self.maps


def test_maps_of_odd_sizes_are_cut_and_not_stretched():
    """A cell lies over the same pixels in an image of 61 x 93 as in one of 64 x 96, whose maps have
    as many cells: the logits of the first are the corner of those of the second.
    """
    model = SemanticFPN(SameMaps(), 5, **SMALL).eval()
    with torch.no_grad():
        whole = model(torch.zeros(1, 3, 64, 96))
        assert torch.equal(model(torch.zeros(1, 3, 61, 93)), whole[..., :61, :93])
    assert whole.std() > 0


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_every_parameter_learns(norm):
    model = tiny(norm=norm, head_channels=32)
    model(torch.randn(2, 3, 72, 40)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert model.backbone.patch_embed.proj.weight.grad.any()


def test_checkpointing_is_the_backbones():
    model = tiny()
    model.set_grad_checkpointing()
    assert all(stage.grad_checkpointing for stage in model.backbone.stages)


def test_level_weights_do_not_decay():
    names = dict(tiny().named_parameters())
    skipped = tiny().no_weight_decay()
    assert skipped == {name for name in names if name.endswith("level_logits")} and skipped


# ---- windows that slide


class Pixelwise(nn.Module):
    """Three classes that depend on nothing but their pixel."""

    def forward(self, x):
        return torch.stack([x[:, 0], x[:, 1] * 2, x[:, 2] - x[:, 0]], dim=1)


class Spread(nn.Module):
    """Logits that depend on the window: the mean of it, and a count of calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x[:, :2] + x.mean(dim=(1, 2, 3), keepdim=True)


def test_a_window_that_covers_the_image_is_the_model(model):
    x = torch.randn(1, 3, 37, 52)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(sliding_window(model, x, window=64), expected)
        assert torch.equal(sliding_window(model, x, window=(37, 52), stride=(1, 1)), expected)
        assert not torch.allclose(sliding_window(model, x, window=32), expected)


@pytest.mark.parametrize(("window", "stride"), [(16, None), (16, 16), ((7, 50), (3, 50)), (1, 1)])
def test_windows_cover_every_pixel(window, stride):
    x = torch.randn(2, 3, 37, 52)
    found = sliding_window(Pixelwise(), x, window=window, stride=stride)
    torch.testing.assert_close(found, Pixelwise()(x))


def test_windows_are_averaged_where_they_overlap():
    x, model = torch.randn(1, 3, 10, 14), Spread()
    found = sliding_window(model, x, window=(8, 6), stride=(5, 4))
    total, count = torch.zeros(1, 2, 10, 14), torch.zeros(10, 14)
    for top, left in itertools.product((0, 2), (0, 4, 8)):  # the last ones end with the image
        part = x[:, :, top : top + 8, left : left + 6]
        total[:, :, top : top + 8, left : left + 6] += part[:, :2] + part.mean()
        count[top : top + 8, left : left + 6] += 1
    assert model.calls == 6
    torch.testing.assert_close(found, total / count)


@pytest.mark.parametrize(
    ("window", "stride", "message"),
    [
        (0, None, "window must be pixels"),
        (8, 0, "stride must be pixels"),
        (8, 9, "windows must touch"),
        ((8, 16), (9, 9), "windows must touch"),
    ],
)
def test_windows_that_do_not_do(window, stride, message):
    call = sliding_window, Pixelwise(), torch.zeros(1, 3, 20, 20)
    raises(OptionError, message, *call, window=window, stride=stride)
