# SPDX-License-Identifier: Apache-2.0
"""Recipes of segmenters: as published, alike but for the attention, and one that trains here."""

import pytest
import torch

import quadtree_attention.nn.baselines as baselines
from quadtree_attention import models
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.tasks.training.recipe import read_recipe
from tests.conftest import ROOT
from tests.support.training import train

FOLDER = ROOT / "recipes" / "segment"
PUBLISHED = {"b0": 39.9, "b1": 44.7, "b2": 48.7, "b3": 50.0, "b4": 50.6}
ATTENTIONS = {  # of every camvid11 recipe: class, and whether it has LePE
    "sr": (baselines.SpatialReductionAttention, False),
    "sr-lepe": (baselines.SpatialReductionAttention, True),
    "window": (baselines.WindowAttention, False),
    "window-lepe": (baselines.WindowAttention, True),
    "quadtree-a": (QuadtreeAttention, False),
    "quadtree-b": (QuadtreeAttention, True),
    "quadtree-b-no-lepe": (QuadtreeAttention, False),
}


def load(name, variant):
    return read_recipe(FOLDER / f"{name}.yaml", variant).settings


@pytest.mark.parametrize("size", PUBLISHED)
def test_ade20k_recipes(size):
    """As published; they differ in nothing but the model."""
    recipe, other = load("ade20k", size), load("ade20k", "b0")
    results = read_recipe(FOLDER / "ade20k.yaml").results
    assert results[size] == {"miou": {"published": PUBLISHED[size]}}
    assert recipe["model"].pop("model") == f"semfpn_quadtree_b_{size}"
    del other["model"]["model"]
    assert recipe == other
    expected = {"lr": 6e-5, "schedule": "poly", "power": 1.0, "weight_decay": 0.01}
    expected |= {"head_lr": 10.0, "no_decay": "norms", "drop_path": 0.1}
    assert expected.items() <= recipe["model"].items()
    assert recipe["model"]["warmup_epochs"] * (20_210 // 16) == pytest.approx(1500, rel=2e-3)
    assert (recipe["trainer"]["max_steps"], recipe["data"]["batch_size"]) == (160_000, 16)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_camvid_recipe_has_the_attention_of_its_name(name):
    settings = load("camvid11", name)["model"]
    with torch.device("meta"):
        model = models.create(settings["model"], num_classes=11, **settings["options"])
    kind, lepe = ATTENTIONS[name]
    found = [block.attn for stage in model.backbone.stages for block in stage.blocks]
    assert all(type(attention) is kind for attention in found)
    assert any("lepe" in parameter for parameter, _ in found[0].named_parameters()) == lepe
    if kind is QuadtreeAttention:
        assert (found[0].variant, found[0].topk) == (name.split("-")[1].upper(), (32, 32, 32))


def test_debug_recipe_trains(tmp_path):
    smaller = [f"--data.{name}=48" for name in ("generated_size", "height", "width")]
    rows = train("segment", FOLDER / "debug.yaml", tmp_path / "run", *smaller)
    assert max(float(row["val/miou"]) for row in rows) > 45  # of nothing but background: 19
    assert (tmp_path / "run" / "best.safetensors").exists()
