# SPDX-License-Identifier: Apache-2.0
"""Recipes of the matcher: what they choose, what they share, and what they say without data."""

import sys

import numpy as np
import pytest
import torch
import yaml

from quadtree_attention.errors import MissingDependencyError, OptionError
from quadtree_attention.models.parts.context_attention import (
    FullAttention,
    LinearAttention,
    PooledAttention,
)
from quadtree_attention.models.registry import create
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.tasks.match.megadepth import MegaDepthData
from quadtree_attention.tasks.training.recipe import read_recipe
from quadtree_attention.tasks.training.run import run_command as train
from tests.conftest import ROOT
from tests.support.commands import refusal

FOLDER = ROOT / "recipes" / "match"
LITE = {  # attention, and what is particular about it
    "linear": (LinearAttention, {}),
    "full": (FullAttention, {}),
    "spatial-reduction": (PooledAttention, {"pool_size": 8}),
    "quadtree-a": (QuadtreeAttention, {"variant": "A", "topk": (8, 8)}),
    "quadtree-b": (QuadtreeAttention, {"variant": "B", "topk": (8, 8)}),
    "quadtree-b-k1": (QuadtreeAttention, {"variant": "B", "topk": (1, 1)}),
    "quadtree-b-k4": (QuadtreeAttention, {"variant": "B", "topk": (4, 4)}),
}
POSED = ("scannet", "megadepth")


def load(name, variant=None):
    return read_recipe(FOLDER / f"{name}.yaml", variant).settings


def attentions(name, variant=None):
    settings = load(name, variant)["model"]
    with torch.device("meta"):
        model = create(settings["model"], **settings["options"])
    return [layer.attn for layer in model.coarse_transformer.layers]


def refused(*args):
    return refusal(OptionError, train, "match", list(args))


def config(name):
    return "--config", str(FOLDER / f"{name}.yaml")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", LITE)
def test_lite_recipe_has_the_attention_of_its_name(name):
    kind, particulars = LITE[name]
    found = attentions("loftr-lite", name)
    assert len(found) == 8 and all(type(attention) is kind for attention in found)
    assert {key: getattr(found[0], key) for key in particulars} == particulars


@pytest.mark.parametrize(
    ("name", "variant", "kind", "topk"),
    [
        ("scannet", "quadtree-b", "B", (16, 8)),
        ("scannet", "quadtree-a,lite", "A", (16, 8)),
        ("scannet", "quadtree-b-vit", "B", (32, 16)),
        ("scannet", "quadtree-b,lite,k1", "B", (2, 1)),
        ("scannet", "quadtree-b,lite,k4", "B", (8, 4)),
        ("scannet", "quadtree-b,lite,k16", "B", (32, 16)),
        ("megadepth", "quadtree-b", "B", (16, 8)),
        ("megadepth", "quadtree-b-k16", "B", (32, 16)),
    ],
)
def test_published_quadtrees(name, variant, kind, topk):
    found = attentions(name, variant)
    assert len(found) == 8
    assert all((a.topk, a.variant, a.num_levels) == (topk, kind, 3) for a in found)


def test_published_baselines():
    assert all(type(a) is LinearAttention for a in attentions("scannet", "linear,lite"))
    pooled = attentions("scannet", "sr,lite")
    assert all(type(a) is PooledAttention and a.pool_size == 8 for a in pooled)
    blocks = [load("scannet", v)["model"]["model"] for v in ("quadtree-b", "quadtree-b-vit")]
    assert blocks == ["loftr", "loftr_quadtree_indoor"]


@pytest.mark.parametrize(
    ("name", "batch", "rate", "steps"),
    [("scannet", 8, 7.5e-4, 38_400), ("megadepth", 4, 5e-4, 30_000)],
)
def test_published_settings(name, batch, rate, steps):
    """Rates in effect, and steps of warm-up, at the batch of all GPUs."""
    recipe = load(name)
    model, data, trainer = (recipe[group] for group in ("model", "data", "trainer"))
    assert (trainer["max_epochs"], trainer["gradient_clip_val"], data["batch_size"]) == (30, 0.5, 1)
    assert model["lr"] * batch / 16 == pytest.approx(rate)
    scenes = {"scannet": 1513, "megadepth": 368}[name]
    per_epoch = scenes * data["pairs_per_scene"] / batch
    assert model["warmup_epochs"] * per_epoch == pytest.approx(steps, rel=2e-3)
    assert (model["schedule"], model["decay"], model["no_decay"]) == ("step", 0.5, "nothing")


def test_lite_has_half_of_the_channels_and_453_scans():
    recipe, whole = load("scannet", "quadtree-b,lite"), load("scannet")
    assert recipe["data"].pop("scenes") == 453 and recipe["data"] == whole["data"]
    with torch.device("meta"):
        lite, loftr = create("loftr_lite"), create("loftr")
    widths = [m.backbone.stem.weight.shape[0] for m in (lite, loftr)]
    assert 2 * widths[0] == widths[1] and recipe["model"]["model"] == "loftr_lite"
    steps = recipe["model"]["warmup_epochs"] * 453 * 200 / 8
    assert steps == pytest.approx(38_400, rel=2e-3)


def test_without_h5py_the_extra_that_brings_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)  # as if it were not installed
    folder = tmp_path / "index" / "scene_info_0.1_0.7"
    folder.mkdir(parents=True)
    np.savez(folder / "0000.npz", pair_infos=np.zeros(0))
    with pytest.raises(MissingDependencyError, match=r"needs h5py.*quadtree-attention\[train\]"):
        MegaDepthData(root=str(tmp_path)).setup()


def test_source_decides_which_options_there_are():
    ending = "did you mean data.min_overlap?"
    assert refused("--data.source", "scannet", "--data.min_overlp", "0.3").endswith(ending)
    told = refused("--data.source=scanet")
    assert told == (
        "data.source must be one of synthetic, scannet, megadepth, got 'scanet'; did you mean "
        "scannet?"
    )


@pytest.mark.parametrize(
    ("args", "option"),
    [
        ([], "textures"),
        (["--data.source", "megadepth"], "size"),
        (["--data.source=scannet"], "pairs_per_scene"),
        ([*config(POSED[1])], "size"),
        (["--config", "other.yaml", *config(POSED[1])], "size"),
        ([*config(POSED[1]), "--config", "other.yaml", "--data.root", "x"], "min_overlap"),
    ],
)
def test_the_last_source_given_is_taken(args, option, tmp_path, capsys):
    (tmp_path / "other.yaml").write_text("data: {source: megadepth}\n")
    with pytest.raises(SystemExit):
        train("match", [*args, "--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)["data"]
    assert option in shown and "source" in shown
