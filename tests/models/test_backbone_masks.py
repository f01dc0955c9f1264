# SPDX-License-Identifier: Apache-2.0
"""Masks in the backbones: what is hidden influences nothing, and padding least of all."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention import DTypeError, OptionError, ShapeError
from quadtree_attention.models.parts.masks import masks_of_maps, rectangles
from quadtree_attention.nn import BASELINES, make_attention
from quadtree_attention.nn.block import Block
from tests.support import raises

timm = pytest.importorskip("timm", reason="the backbones need timm (extra 'models')")
import quadtree_attention.models.backbone  # noqa: E402, F401  registers the names

pytestmark = pytest.mark.usefixtures("only_reference", "one_thread")

SIZES = [(70, 45), (33, 91)]
CANVAS = (101, 107)
SMALL = {"depths": (2, 1, 1, 1), "dtype": torch.float64, "num_classes": 0}
KINDS = {
    "quadtree_b": {},
    "quadtree_b_mean": {"value_pyramid": "mean"},
    "quadtree_a": {"variant": "A"},
    **{name: {"attention": name, "lepe": True, "topk": None} for name in BASELINES},
}
KINDS["window"]["attention_options"] = {"window_size": 4}
KINDS["focal"]["attention_options"] = {"window_size": 4, "expand_size": 1, "focal_window": 3}
KINDS["topk"]["attention_options"] = {"topk": 5}


def tiny(kind: str = "quadtree_b", **options) -> nn.Module:
    return timm.create_model("test_quadtree", **SMALL | KINDS[kind] | options).eval()


def images(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(3, *size, dtype=dtype) for size in SIZES]


def padded(parts: list[Tensor], filler: float) -> tuple[Tensor, Tensor]:
    """A batch on one canvas, and its mask."""
    batch = torch.full((len(parts), 3, *CANVAS), filler, dtype=parts[0].dtype)
    for canvas, part in zip(batch, parts, strict=True):
        canvas[:, : part.shape[1], : part.shape[2]] = part
    return batch, rectangles(SIZES, CANVAS, batch.device)


def maps(model: nn.Module, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    return model.forward_intermediates(x, intermediates_only=True, mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["pvt", "swin"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_image_gives_the_maps_it_gives_alone(kind, layout):
    model = tiny(kind, layout=layout)
    parts = images()
    batch, mask = padded(parts, torch.nan)
    together = maps(model, batch, mask)
    for i, part in enumerate(parts):
        for got, alone in zip(together, maps(model, part[None]), strict=True):
            _, _, height, width = alone.shape
            shown = got[i : i + 1, :, :height, :width]
            torch.testing.assert_close(shown, alone, rtol=0, atol=1e-10)
            hidden = got[i].clone()
            hidden[:, :height, :width] = 0
            assert (hidden == 0).all() and hidden.numel() > alone.numel()
    unmasked = maps(model, torch.nan_to_num(batch))
    assert (unmasked[3][0, :, :2, :2] - together[3][0, :, :2, :2]).abs().max() > 1e-3
    assert torch.equal(model.forward_features(batch, mask), together[3])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["quadtree_b", "quadtree_a"])
def test_quadtree_attention_takes_any_mask(kind):
    """A hole in the middle, whatever is in it."""
    model = tiny(kind)
    x = torch.randn(2, 3, 70, 45, dtype=torch.float64)
    mask = torch.rand(2, 70, 45) < 0.5
    mask[:, 16:40, 8:30] = False
    other = torch.where(mask[:, None], x, torch.inf)
    first, second = maps(model, x, mask), maps(model, other, mask)
    for got, wanted in zip(second, first, strict=True):
        assert torch.equal(got, wanted)
    assert not first[0][..., 4:10, 2:7].any() and first[0][..., :4, :11].all()
    assert (first[3] - maps(model, x)[3]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_hides_nothing_changes_nothing(kind):
    model = tiny(kind)
    x = torch.randn(2, 3, 70, 45, dtype=torch.float64)
    everything = torch.ones(2, 70, 45, dtype=torch.bool)
    for got, wanted in zip(maps(model, x, everything), maps(model, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["quadtree_b", "window"])
def test_gradients_pass_masks_and_checkpointing(kind):
    model = tiny(kind, drop_path_rate=0.3).train()
    batch, mask = padded(images(), 7.0)
    batch.requires_grad_()
    calls = []
    for stage in model.stages:
        for block in stage.blocks:
            block.norm1.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        batch.grad = None
        calls.clear()
        model.forward_features(batch, mask).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()] + [batch.grad.clone()]

    plain = gradients()
    assert len(calls) == 5
    assert all(gradient.isfinite().all() for gradient in plain)
    names = [*dict(model.named_parameters()), "image"]
    without = {name for name, gradient in zip(names, plain, strict=True) if not gradient.any()}
    assert without <= {"stages.3.blocks.0.attn.level_logits"}  # one level needs no choice
    assert not plain[-1].movedim(1, -1)[~mask].any()
    model.set_grad_checkpointing()
    for got, wanted in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    assert len(calls) == 10
    model.set_grad_checkpointing(False)
    gradients()
    assert len(calls) == 5


def test_cells_are_visible_if_a_pixel_is():
    mask = rectangles([(9, 4), (0, 0)], (20, 35), torch.device("cpu"))
    levels = masks_of_maps(mask, 6)[2:]
    assert [tuple(level.shape[1:]) for level in levels] == [(5, 9), (3, 5), (2, 3), (1, 2)]
    first = F.pad(torch.ones(3, 1, dtype=torch.bool), (0, 8, 0, 2))
    assert torch.equal(levels[0][0], first) and levels[3][0].tolist() == [[True, False]]
    assert not any(level[1].any() for level in levels)


@pytest.mark.parametrize("name", BASELINES)
def test_a_sample_that_is_hidden_as_a_whole(name):
    attention = make_attention(name, 16, 2)
    mask = rectangles([(0, 0), (3, 4)], (5, 6), torch.device("cpu"))
    out = attention(torch.randn(2, 5, 6, 16), mask=mask)
    assert out.isfinite().all() and not out[0].any() and out[1, :3, :4].any()


def test_masks_that_are_refused():
    x = torch.randn(1, 3, 70, 45, dtype=torch.float64)
    hole = torch.ones(1, 70, 45, dtype=torch.bool)
    hole[:, :16] = False
    reduction, window = tiny("spatial_reduction"), make_attention("window", 16, 2)
    raises(OptionError, "below and columns to the right only, .* other", maps, reduction, x, hole)
    raises(ShapeError, r"that is \(1, 70, 45\), got mask\.shape", maps, tiny(), x, hole[:, 1:])
    raises(DTypeError, "bool tensor with True = visible, got tor", maps, tiny(), x, hole.float())
    raises(ShapeError, r"mask must be .* \(1, 5, 6\)", window, torch.randn(1, 5, 6, 16), mask=hole)


def test_a_block_hands_masks_to_both_of_its_parts():
    """Also around an MLP that knows no masks, because it mixes no cells."""
    block = Block(8, make_attention("full", 8, 2), nn.Linear(8, 8))
    x = torch.randn(1, 5, 6, 8)
    mask = rectangles([(3, 4)], (5, 6), x.device)
    torch.testing.assert_close(block(x, mask=mask)[:, :3, :4], block(x[:, :3, :4]))
