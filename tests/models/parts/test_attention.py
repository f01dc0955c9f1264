# SPDX-License-Identifier: Apache-2.0
"""The attention of a backbone, chosen by name and options."""

import re

import pytest
from torch import nn

import quadtree_attention.models.backbone  # noqa: F401  registers the names
from quadtree_attention import OptionError, QuadtreeAttention
from quadtree_attention.nn import BASELINES
from tests.support import raises

timm = pytest.importorskip("timm", reason="the backbones need timm (extra 'models')")
pytestmark = pytest.mark.usefixtures("only_reference", "one_thread")


def tiny(**options) -> nn.Module:
    return timm.create_model("test_quadtree", **{"num_classes": 5} | options).eval()


def attentions(model: nn.Module) -> list[list[nn.Module]]:
    return [[block.attn for block in stage.blocks] for stage in model.stages]


@pytest.mark.parametrize("name", ["quadtree_a_b0", "quadtree_b_b0", "swin_tiny_quadtree_b"])
def test_names_that_choose_options_of_quadtree_attention_take_baselines(name):
    model = timm.create_model(name, attention="window", device="meta")
    assert attentions(model)[0][0].qkv.bias is not None
    names = {key for key, _ in model.named_parameters()}
    assert not any(".lepe." in key for key in names)
    with_lepe = timm.create_model(name, attention="window", lepe=True, device="meta")
    assert any(".lepe." in key for key, _ in with_lepe.named_parameters())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_levels", (4, 3, 2, 1)),
        ("topk", 4),
        ("variant", "B"),
        ("value_pyramid", "mean"),
        ("value_act", "gelu"),
        ("backend", "auto"),
    ],
)
@pytest.mark.parametrize("name", BASELINES)
def test_baselines_refuse_options_of_quadtree_attention(name, option, value):
    text = f"attention={name!r} does not accept options of quadtree attention, got "
    text += f"{option}={value!r}; leave them out, or set its own options in attention_options: "
    raises(OptionError, re.escape(text), tiny, attention=name, **{option: value})


def test_options_reach_the_baseline():
    stages = attentions(tiny(attention="topk", attention_options={"topk": 3, "qkv_bias": False}))
    assert all(attn.topk == 3 and attn.qkv.bias is None for stage in stages for attn in stage)
    stages = attentions(tiny(attention="focal", attention_options={"focal_window": [7, 5, 3, 1]}))
    assert [attn.focal_window for (attn, *_) in stages] == [7, 5, 3, 1]
    stages = attentions(tiny(attention="focal", proj_drop_rate=0.25))
    assert stages[0][0].proj_drop.p == 0.25


def test_reduction_of_stages():
    stages = attentions(tiny(attention="spatial_reduction"))
    assert [attn.sr_ratio for (attn, *_) in stages] == [8, 4, 2, 1]
    stages = attentions(tiny(attention="spatial_reduction", attention_options={"sr_ratio": 2}))
    assert [attn.sr_ratio for (attn, *_) in stages] == [2, 2, 2, 2]
    options = {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (1, 2), "mlp_ratios": (2, 2)}
    stages = attentions(tiny(attention="spatial_reduction", **options))
    assert [attn.sr_ratio for (attn, *_) in stages] == [2, 1]
    assert [attn.num_levels for (attn, *_) in attentions(tiny(**options))] == [2, 1]


@pytest.mark.parametrize(
    ("options", "window", "shifts"),
    [
        (None, 7, [0, 3, 0]),
        ({"window_size": 4}, 4, [0, 2, 0]),
        ({"window_size": 8, "shift_size": 1}, 8, [0, 1, 0]),
        ({"shift_size": 0}, 7, [0, 0, 0]),
    ],
)
def test_every_second_block_shifts_its_windows(options, window, shifts):
    model = tiny(attention="window", depths=(1, 1, 3, 1), attention_options=options)
    stage = attentions(model)[2]
    assert [(attn.window_size, attn.shift_size) for attn in stage] == [(window, s) for s in shifts]


def test_number_of_levels_for_all_stages():
    stages = attentions(tiny(num_levels=2))
    assert all(isinstance(attn, QuadtreeAttention) for (attn, *_) in stages)
    assert [attn.num_levels for (attn, *_) in stages] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attention": "topk", "topk": 4, "variant": "A"}, "got topk=4, variant='A'; leave them "
         "out, or set its own options in attention_options: topk, qkv_bias, attn_drop"),
        ({"attention": "windows"}, "attention must be one of quadtree, spatial_reduction, "
         "linear_spatial_reduction, window, focal, linear, topk, full, got 'windows'; did you "
         "mean 'window'?"),
        ({"attention": "Quadtree"}, "got 'Quadtree'; did you mean 'quadtree'?"),
        ({"attention": "conv"}, "topk, full, got 'conv'; choose one of them"),
        ({"attention_options": {"topk": 3}}, "attention_options are for baselines, got topk=3 "
         "with attention='quadtree', whose options (num_levels, topk, variant, value_pyramid, "
         "value_act, backend) are keywords of the model; pass them there"),
        ({"attention": "window", "attention_options": {"window": 3}}, "attention 'window' accepts "
         "the options window_size, shift_size, device, dtype, qkv_bias, lepe, attn_drop, "
         "proj_drop, got window; did you mean 'window_size'?"),
        ({"attention": "topk", "attention_options": {"lepe": True}}, "attention_options of 'topk' "
         "are topk, qkv_bias, attn_drop, got lepe, which the model sets; leave it out"),
        ({"attention": "topk", "attention_options": {"topk": [1, 2]}}, "topk must be one value, or "
         "one per stage (4), got topk=(1, 2); match them"),
        ({"attention": "window", "attention_options": {"window_size": "7"}}, "window_size must be "
         "an integer of at least 1, got window_size='7'"),
    ],
)  # fmt: skip
def test_choices_that_are_refused(options, text):
    raises(OptionError, re.escape(text), tiny, **options)
