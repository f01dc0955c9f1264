# SPDX-License-Identifier: Apache-2.0
"""STTR as published: its size, its work, its position terms, and its checkpoints."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.speed.stereo import count_of
from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.models.convert import check_fit
from quadtree_attention.models.parts import row_attention, sttr_attention
from quadtree_attention.models.parts.sttr_attention import (
    RelativeAttention,
    RelativeBlock,
    sine_encoding,
)
from quadtree_attention.models.parts.sttr_features import ScaledConv, STTRFeatures, as_adjusted
from quadtree_attention.models.registry import complete, create
from quadtree_attention.models.stereo_convert import convert_stereo, is_official_stereo
from tests.models.test_stereo import pair, tiny
from tests.support import raises
from tests.support.official import recipe_state

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- size and work


def test_parameters_are_the_published_ones():
    model = create("sttr", device="meta")
    children = model.named_children()
    parts = {name: sum(p.numel() for p in part.parameters()) for name, part in children}
    assert parts["features"] == 1_050_800 + 503_728
    assert parts["transformer"] == 797_440
    assert parts["refinement"] + parts["assignment"] == 161_843
    assert sum(parts.values()) == 2_513_811


def test_work_at_960x540(monkeypatch):
    """GMACs as worked out from the published layers, to the last digit that was."""
    monkeypatch.setattr(sttr_attention, "CPU_SCORES", sys.maxsize)  # all rows at once
    monkeypatch.setattr(row_attention, "CPU_NUMBERS", sys.maxsize)
    full, ours = (count_of(name, 960, 540)["macs"] / 1e9 for name in ("sttr", "sttr_quadtree"))
    assert round(full, 1) == 839.0 and round(ours, 1) == 434.2
    assert round(100 * ours / full, 1) == 51.8


def test_work_of_the_parts_by_hand():
    """One row of cells: 192x3 pixels, sampled at column and row 1, 4, ...; 18 attention calls."""
    rows, width, dim = 16 // 3, 64, 128
    model_macs = count_of("sttr", 192, 16)["macs"]
    without = count_of("sttr", 192, 16, position="rotation")["macs"]
    encoding, terms = 18 * 2 * width**2 * dim**2, 24 * 2 * rows * width**2 * dim
    last_scores = rows * width**2 * dim  # by their own products without position terms
    assert model_macs - without == encoding + terms - last_scores


def test_quadtree_is_the_papers():
    options = complete("sttr_quadtree", {})
    assert options["num_heads"] == 8 and options["dim"] == 128 and options["num_layers"] == 6
    attention = create("sttr_quadtree", device="meta").transformer.blocks[0].self_attn
    assert (attention.num_levels, attention.topk, attention.attention) == (4, 6, "quadtree_b")


# ---- attention


def test_scores_have_two_terms_of_position():
    torch.manual_seed(0)
    width, heads, dim = 5, 2, 8
    module = RelativeAttention(dim, heads, dtype=torch.float64)
    rows, others = torch.randn(2, 3, width, dim, dtype=torch.float64)
    message, scores = module(rows, others, sine_encoding(width, dim, 3, rows))

    def heads_of(tokens, layer, head):
        return (tokens @ layer.weight.T + layer.bias)[..., head * 4 : head * 4 + 4]

    expected, total = [], torch.zeros(3, width, width, dtype=torch.float64)
    for head in range(heads):
        of_row = torch.zeros(3, width, width, dtype=torch.float64)
        for i in range(width):
            for j in range(width):
                waves = [3 * (i - j) / 10000 ** (c / dim) for c in range(0, dim, 2)]
                place = torch.tensor([f(x) for x in waves for f in (math.sin, math.cos)]).double()
                q = heads_of(rows[:, i], module.q_proj, head)
                k = heads_of(others[:, j], module.k_proj, head)
                q_place = heads_of(place, module.q_proj, head)
                k_place = heads_of(place, module.k_proj, head)
                products = (q * k).sum(-1) + (q * k_place).sum(-1) + (k * q_place).sum(-1)
                of_row[:, i, j] = products / 2
        expected.append(of_row.softmax(-1) @ heads_of(others, module.v_proj, head))
        total += of_row
    assert torch.allclose(scores, total, atol=1e-6)
    assert torch.allclose(message, module.proj(torch.cat(expected, dim=-1)), atol=1e-6)


def test_right_comes_first_and_left_sees_it():
    torch.manual_seed(0)
    block = RelativeBlock(8, 2, dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    encoding = sine_encoding(6, 8, 3, x)
    normed = block.self_norm(x)
    x1 = x + block.self_attn(normed, normed, encoding)[0]
    seen = block.cross_norm(x1)
    backwards = sine_encoding(6, 8, -3, x)  # left less right columns, as for the left rows
    right = x1[1:] + block.cross_attn(seen[1:], seen[:1], backwards)[0]
    message, scores = block.cross_attn(seen[:1], block.right_norm(right), encoding)
    found, found_scores = block(x, encoding)
    assert torch.allclose(found, torch.cat([x1[:1] + message, right]), atol=1e-12)
    assert torch.allclose(found_scores, scores, atol=1e-12)


def test_a_few_rows_at_a_time_are_all(monkeypatch):
    module = RelativeAttention(8, 2)
    rows = torch.randn(7, 6, 8)
    encoding = sine_encoding(6, 8, 3, rows)
    whole = module(rows, rows, encoding)
    monkeypatch.setattr(sttr_attention, "CPU_SCORES", 3 * 2 * 36)
    with torch.no_grad():
        for few, all_of_them in zip(module(rows, rows, encoding), whole, strict=True):
            assert torch.allclose(few, all_of_them, atol=1e-6)


# ---- the whole network


def test_scores_of_the_last_cross_attention_are_assigned():
    model, data = tiny("sttr", dtype=torch.float64), pair(16, 48, dtype=torch.float64)
    seen = []
    model.transformer.register_forward_hook(lambda *call: seen.append(call[2]))
    with torch.no_grad():
        found = model(data)
    scores = seen[0].masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    plan = torch.zeros(1, 5, 17, 17, dtype=torch.float64)  # with dustbins
    plan[..., :16, :16] = scores
    mass = torch.cat([torch.ones(16), torch.tensor([16.0])]).double().log()
    left = torch.zeros(1, 5, 17, dtype=torch.float64)
    for _ in range(10):
        right = mass - (plan + left[..., None]).logsumexp(2)
        left = mass - (plan + right[:, :, None]).logsumexp(3)
    plan = (plan + left[..., None] + right[:, :, None]).exp()
    assert torch.allclose(found.log_none.exp(), plan[..., :16, 16], atol=1e-6)
    best = plan[..., :16, :16].argmax(-1)
    away = torch.arange(16) - best
    assert ((found.raw_disparity / 3 - away).abs() <= 1).all()


def test_full_attention_without_position_terms_is_an_option():
    with torch.no_grad():
        assert tiny("sttr", position="rotation")(pair(32, 48)).disparity.isfinite().all()
    sine = "position 'sine' is for attention 'full' without MLPs"
    raises(OptionError, sine, tiny, "sttr", attention="quadtree_b")
    raises(OptionError, "layout must be one of hourglass, sttr, ", tiny, "sttr", layout="stttr")
    raises(OptionError, "must be even and a multiple of the heads", tiny, "sttr", num_heads=3)


def test_little_that_matches_is_taken_as_it_is():
    disparity, occlusion = as_adjusted(torch.tensor([6.0, 6.0]), torch.tensor([0.05, 0.5]))
    torch.testing.assert_close(disparity, torch.tensor([0.3, 6.0]))
    torch.testing.assert_close(occlusion, torch.tensor([0.0, 0.5]))


def test_a_scaled_convolution_is_weight_norm():
    ours, plain = ScaledConv(4, 8), nn.Conv2d(4, 8, 3, padding=1)
    x = torch.randn(1, 4, 6, 6)
    assert torch.allclose(ours(x), F.conv2d(x, ours.weight, ours.bias, padding=1), atol=1e-5)
    theirs = nn.utils.parametrizations.weight_norm(plain)
    weight = theirs.parametrizations.weight
    with torch.no_grad():
        weight.original0.uniform_(0.5, 2)
        ours.length.copy_(weight.original0)
        ours.weight.copy_(weight.original1)
        ours.bias.copy_(theirs.bias)
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


def test_pooling_is_over_whole_windows():
    """As published, what is left over at the border is no window of its own."""
    features = STTRFeatures((8, 8, 8, 8), 8, stride=1).eval()
    sizes = []
    for pool in features.pools:
        pool.register_forward_hook(lambda _, inputs, __: sizes.append(tuple(inputs[0].shape[2:])))
    features(torch.rand(2, 3, 136, 280))  # 17 x 35 at 1/8
    assert sizes == [(1, 2), (2, 4), (4, 8), (8, 17)]


# ---- checkpoints


@pytest.mark.parametrize("statistics", [True, False])
def test_a_checkpoint_converts_strictly(statistics):
    unread = ("running_mean", "running_var", "num_batches_tracked")
    named = recipe_state("sttr").items()
    state = {name: x for name, x in named if statistics or not name.endswith(unread)}
    assert is_official_stereo(state)
    tensors, left_out = convert_stereo(state)
    model = create("sttr")
    check_fit(model, tensors)
    model.load_state_dict(tensors)
    assert left_out == [name for name in state if name.endswith(unread)]
    assert bool(left_out) == statistics
    # nothing is lost, and nothing is there twice
    read = sum(x.double().sum() for name, x in state.items() if name not in left_out)
    assert torch.isclose(sum(x.double().sum() for x in tensors.values()), read)
    assert sum(x.numel() for x in tensors.values()) == 2_513_811


def test_tensors_go_where_they_belong():
    state = recipe_state("sttr")
    tensors, _ = convert_stereo({f"module.{name}": x for name, x in state.items()})
    joint = state["transformer.cross_attn_layers.3.cross_attn.in_proj_weight"]
    head = "regression_head.cal"
    expected = {
        "transformer.blocks.3.cross_attn.q_proj.weight": joint[:128],
        "transformer.blocks.3.cross_attn.k_proj.weight": joint[128:256],
        "transformer.blocks.3.cross_attn.v_proj.weight": joint[256:],
        "transformer.blocks.2.right_norm.bias": state["transformer.cross_attn_layers.2.norm2.bias"],
        "transformer.blocks.2.self_norm.bias": state["transformer.self_attn_layers.2.norm1.bias"],
        "features.stem.2.1.bias": state["backbone.in_conv.7.bias"],
        "features.stages.1.2.body.1.0.weight": state["backbone.resblock_2.2.conv2.weight"],
        "features.stages.0.1.body.0.1.bias": state["backbone.resblock_1.1.bn1.bias"],
        "features.pools.3.1.weight": state["backbone.branch4.2.weight"],
        "features.dense.0.3.0.bias": state["tokenizer.bottle_neck.denselayer4.norm1.bias"],
        "features.dense.2.0.5.weight": state["tokenizer.dense_block.1.denselayer1.conv2.weight"],
        "features.last_up.2.bias": state["tokenizer.up.2.convTrans.2.bias"],
        "features.out.1.1.bias": state["tokenizer.dense_block.2.double_conv.4.bias"],
        "refinement.blocks.5.2.length": state[f"{head}.layers.5.module.2.weight_g"],
        "refinement.occlusion.4.weight": state[f"{head}.occ_head.4.weight_v"],
        "assignment.bin_score": state["regression_head.phi"],
    }
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("extra", (1,), "1 tensors are not part .* STTR: extra; pass"),
        ("backbone.other.running_mean", (1,), "an official STTR: backbone.other.running_mean"),
        ("tokenizer.up.1.convTrans.bias", None, "1 missing: features.up.1.bias"),
        (
            "regression_head.cal.in_conv.weight",
            (16, 5, 3, 3),
            r"1 mismatched: refinement.embed.weight is \(16, 5, 3, 3\), must be \(16, 4, 3, 3\)",
        ),
    ],
)
def test_every_tensor_is_accounted_for(name, shape, message):
    state = recipe_state("sttr") | {name: shape and torch.zeros(shape)}
    if shape is None:
        del state[name]
    with pytest.raises(CheckpointError, match=message):
        check_fit(create("sttr", device="meta"), convert_stereo(state)[0])
