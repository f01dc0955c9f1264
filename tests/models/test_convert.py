# SPDX-License-Identifier: Apache-2.0
"""Official modules, loaded by name, give the official numbers; what names and shapes tell."""

import re

import pytest
import torch

from quadtree_attention import CheckpointError, QuadtreeAttention, QuadtreeBlock
from quadtree_attention.models import convert
from quadtree_attention.models.convert import check_fit, convert_backbone, convert_block, infer_name
from quadtree_attention.models.registry import create
from tests.conftest import Golden, golden_files
from tests.support import raises
from tests.support.official import manifest, shapes_of

FILES = golden_files("modules/*_attn_*.npz", "modules/*_block_*.npz")


def build(golden: Golden, dtype: torch.dtype) -> torch.nn.Module:
    meta, matching = golden.meta, golden.name.startswith("match")
    levels = meta.get("levels") or meta["sr_ratio"]
    options = {
        "num_levels": levels,
        "topk": meta["topks"][: levels - 1],
        "variant": meta["attn_type"],
        "qkv_bias": not matching,
        "dtype": dtype,
    }
    if meta["attn_type"] == "B" and not matching:
        options |= {"value_pyramid": "conv", "lepe": True}
        options |= {"value_act": "relu" if golden.name.startswith("det") else "gelu"}
    if "block" in golden.name:
        options |= {"mlp_ratio": meta["mlp_ratio"], "extra_relu": matching}
        options |= {"norm_eps": 1e-5 if matching else 1e-6}
        module = QuadtreeBlock(meta["dim"], meta["num_heads"], **options)
    else:
        module = QuadtreeAttention(meta["dim"], meta["num_heads"], **options)
    module.load_state_dict(convert_block(golden.with_prefix("sd:"))[0])
    return module


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("path", FILES)
def test_official_module(path, dtype):
    golden = Golden(path)
    module = build(golden, dtype)
    leaves = {
        name: golden.tensor(f"in:{name}", dtype).unflatten(1, golden.meta["hw"]).requires_grad_()
        for name in ("x", "target")
        if f"in:{name}" in golden.arrays
    }
    out = module(leaves["x"], leaves.get("target")).flatten(1, 2)
    expected = golden.tensor("out", dtype)
    if golden.name == "cls_attn_A_sr1":
        # A single level of variant A: the official code drops the strongest keys, ours is full
        # attention as in the paper (tests/ops/test_reference.py compares it).
        assert (out - expected).abs().max() > 0.1
        return
    atol = 1e-6 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)

    (out * golden.tensor("cotangent:out", dtype)).sum().backward()
    for name, leaf in leaves.items():
        expected = golden.tensor(f"grad:{name}", dtype)
        torch.testing.assert_close(leaf.grad.flatten(1, 2), expected, rtol=0, atol=atol)
    stored = convert_block(golden.with_prefix("gradp:"))[0]
    parameters = dict(module.named_parameters())
    assert stored.keys() <= parameters.keys()
    for name, expected in stored.items():
        # Sums over all tokens: the error grows with the size of the gradient.
        size = max(1.0, expected.abs().max().item())
        got = parameters[name].grad
        torch.testing.assert_close(got, expected.to(dtype), rtol=0, atol=atol * size)


# ---- whole backbones


@pytest.mark.parametrize(
    "path", golden_files(*(f"manifests/{task}_*.json" for task in ("class*", "detec*", "segm*")))
)
def test_every_manifest(path):
    """Name and options follow from the tensors, of which nothing is left over or missing."""
    task, letter, size = path.stem.replace("quadtreeA", "a").replace("quadtree", "b").split("_")
    state, official = convert_backbone(shapes_of(path.stem)), manifest(path.stem)
    assert infer_name(state) == f"quadtree_{letter}_{size}"
    classifies = task == "classification"
    expected = {"num_classes": 1000, "topk": 8} if classifies else {"num_classes": 0, "topk": 32}
    if letter == "b":
        expected["value_act"] = "gelu" if classifies else "relu"
    assert convert.infer_options(state) == expected
    model = create(infer_name(state), device="meta", **expected)
    check_fit(model, state)
    assert len(state) == official["tensors"]
    assert sum(p.numel() for p in model.parameters()) == official["parameters"]


@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize("size", ["b0", "b1", "b2", "b3", "b4"])
def test_name_of_every_registered_model(letter, size):
    pytest.importorskip("timm", reason="the backbones need timm (extra 'models')")
    name = f"quadtree_{letter}_{size}"
    assert infer_name(create(name, device="meta").state_dict()) == name


def test_name_in_spite_of_damage():
    state = convert_backbone(shapes_of("detection_quadtree_b0"))
    del state["stages.0.blocks.0.norm1.weight"], state["patch_embed.proj.weight"]
    state["stages.1.blocks.1.norm2.weight"] = torch.zeros(7)
    assert infer_name(state) == "quadtree_b_b0"


def test_size_that_is_not_official():
    names = [(i, f"stages.{i}.blocks.{j}.norm1.weight") for i in range(3) for j in range(2)]
    message = (
        r"has the blocks \(2, 2, 2\) and channels \(8, 16, 24\) per stage; "
        r"known are b0 \(2, 2, 2, 2\) x \(32, 64, 160, 256\), b1"
    )
    state = {name: torch.zeros(8 * (i + 1)) for i, name in names}
    raises(CheckpointError, message, infer_name, state)
    raises(CheckpointError, r"blocks \(\) and channels \(\) per stage", infer_name, {})


def test_classifier_with_one_tensor_missing_still_counts():
    options = convert.infer_options
    assert options({"head.bias": torch.zeros(7)}) == {"num_classes": 7, "topk": 8}
    assert options({"head.weight": torch.tensor(1.0)})["num_classes"] == 1


def test_backbone_is_taken_out_of_a_detector():
    alone = {"patch_embed1.norm.bias": torch.ones(1)}
    neck = {"neck.a": torch.zeros(1), "ema_backbone_norm": torch.zeros(1)}
    inside = {f"backbone.{name}": x for name, x in alone.items()} | neck
    assert convert.is_official_backbone(inside)
    assert convert.split_backbone(inside) == (alone, ["neck.a", "ema_backbone_norm"])
    assert convert_backbone(inside) == convert_backbone(alone)
    assert convert.split_backbone(alone | neck) == (alone | neck, [])
    message = r"^2 tensors are not part of an official backbone: neck\.a, .*; pass the state dict"
    raises(CheckpointError, message, convert_backbone, alone | neck)
    raises(CheckpointError, r": block1\.0\.attn\.sr;", convert_backbone, {"block1.0.attn.sr": neck})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q_proj.weight", (4,)),
        ("q_proj.weight", (4, 1, 2, 2)),  # the right number of elements
        ("value_branchs.0.2.weight", (4,)),
        ("value_branchs.0.2.weight", (4, 16, 1, 1)),
    ],
)
def test_layers_of_another_shape_are_named(name, shape):
    module = QuadtreeAttention(4, 1, num_levels=2, qkv_bias=True, value_pyramid="conv", lepe=True)
    state = module.state_dict()
    (ours,) = convert_block({name: torch.zeros(shape)})[0].items()
    ours_name = {"q_proj.weight": "q_proj.weight"}.get(name, "value_branches.0.reduce.weight")
    assert ours[0] == ours_name
    message = re.escape(f"1 mismatched: {ours_name} is {shape}, must be ")
    raises(CheckpointError, message, check_fit, module, state | dict([ours]))
