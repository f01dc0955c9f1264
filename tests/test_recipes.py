# SPDX-License-Identifier: Apache-2.0
"""Recipes: every one is accepted, builds its model, and says what it is; small ones train."""

import csv
import re

import pytest
import torch
import yaml

from quadtree_attention.errors import OptionError
from quadtree_attention.models.registry import create
from tests.cli.test_info import command
from tests.conftest import ROOT

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

import quadtree_attention.nn.baselines as rivals
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.tasks.training.command import train

RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
CLASSIFY = [path for path in RECIPES if path.parent.name == "classify"]
COMPARED = [p for p in CLASSIFY if p.stem.startswith("tiny20-") and p.stem != "tiny20-debug"]
PUBLISHED = {"b0": "72.0", "b1": "80.0", "b2": "82.7", "b3": "83.8", "b4": "84.0"}
ATTENTIONS = {  # of every tiny20 recipe: class, and what is particular about it
    "sr": (rivals.SpatialReductionAttention, {"lepe": False}),
    "sr-lepe": (rivals.SpatialReductionAttention, {"lepe": True}),
    "window": (rivals.WindowAttention, {"lepe": False}),
    "window-lepe": (rivals.WindowAttention, {"lepe": True}),
    "focal": (rivals.FocalAttention, {"lepe": False}),
    "focal-lepe": (rivals.FocalAttention, {"lepe": True}),
    "linear": (rivals.LinearAttention, {"lepe": False}),
    "quadtree-a": (QuadtreeAttention, {"variant": "A", "topk": (8, 8, 8), "lepe": False}),
    "quadtree-b": (QuadtreeAttention, {"variant": "B", "topk": (8, 8, 8), "lepe": True}),
    "quadtree-b-no-lepe": (QuadtreeAttention, {"variant": "B", "topk": (8, 8, 8), "lepe": False}),
    "quadtree-b-k1": (QuadtreeAttention, {"variant": "B", "topk": (1, 1, 1), "lepe": True}),
    "quadtree-b-k4": (QuadtreeAttention, {"variant": "B", "topk": (4, 4, 4), "lepe": True}),
    "quadtree-b-k16": (QuadtreeAttention, {"variant": "B", "topk": (16, 16, 16), "lepe": True}),
}


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


each_recipe = pytest.mark.parametrize("path", RECIPES, ids=name_of)


def load(path):
    return yaml.safe_load(path.read_text())


def model_of(path):
    settings = load(path)["model"]
    classes = {"num_classes": 3} if path.parent.name in ("detect", "segment") else {}
    with torch.device("meta"):
        return create(settings["model"], **classes, **settings.get("options", {}))


def best_top1(folder):
    with (folder / "history.csv").open() as file:
        return max(float(row["val/top1"]) for row in csv.DictReader(file))


@each_recipe
def test_recipe_is_accepted(path, capsys):
    """By the parser that runs it: all names are known, all values have the right type."""
    with pytest.raises(SystemExit) as done:
        train(path.parent.name, ["--config", str(path), "--print_config"])
    assert done.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    for group, settings in load(path).items():
        if isinstance(settings, dict):
            assert settings.items() <= shown[group].items()


@each_recipe
def test_recipe_builds_its_model(path):
    assert sum(p.numel() for p in model_of(path).parameters()) > 10_000


@each_recipe
def test_recipe_starts_with_what_it_is_and_how_to_run_it(path):
    text = path.read_text()
    comment = text[: re.search(r"^[^#]", text, re.MULTILINE).start()]
    place = path.relative_to(ROOT)
    assert f"\n#   quadtree train {path.parent.name} --config {place}" in comment
    if path in CLASSIFY:
        assert "op-1" in comment
        assert "--data.root" in comment or load(path)["data"]["source"] == "generated"


@each_recipe
def test_misspelt_key_is_refused_and_the_right_one_suggested(path, tmp_path):
    misspelt = (
        ("warmup_epochs", "warm_up_epochs", "model.warmup_epochs"),
        ("batch_size", "batchsize", "data.batch_size"),
        ("max_epochs", "max_epoch", "trainer.max_epochs"),
    )
    old, new, full = misspelt[RECIPES.index(path) % len(misspelt)]
    copy = tmp_path / "copy.yaml"
    copy.write_text(path.read_text().replace(f"  {old}:", f"  {new}:"))
    with pytest.raises(OptionError) as caught:
        train(path.parent.name, ["--config", str(copy)])
    assert str(caught.value).endswith(f"did you mean {full}?")


@pytest.mark.parametrize("size", PUBLISHED)
def test_imagenet_recipes(size):
    """As published; they differ in nothing but the model and its stochastic depth."""
    path = ROOT / "recipes" / "classify" / f"imagenet-{size}.yaml"
    assert f"published {PUBLISHED[size]}; ours not yet measured" in path.read_text()
    recipe = load(path)
    assert recipe["model"].pop("model") == f"quadtree_b_{size}"
    assert recipe["model"].pop("drop_path") == (0.3 if size in ("b3", "b4") else 0.1)
    other = load(path.with_stem("imagenet-b0"))
    del other["model"]["model"], other["model"]["drop_path"]
    assert recipe == other


def test_tiny20_recipes_differ_in_the_attention_only():
    assert sorted(path.stem.removeprefix("tiny20-") for path in COMPARED) == sorted(ATTENTIONS)
    shared = []
    for path in COMPARED:
        recipe = load(path)
        assert recipe["model"].pop("model") in ("quadtree_a_b0", "quadtree_b_b0")
        recipe["model"].pop("options", None)
        shared.append(recipe)
    assert all(recipe == shared[0] for recipe in shared)


@pytest.mark.parametrize("path", COMPARED, ids=name_of)
def test_tiny20_recipe_has_the_attention_of_its_name(path):
    kind, particulars = ATTENTIONS[path.stem.removeprefix("tiny20-")]
    model = model_of(path)
    first = model.stages[0].blocks[0].attn
    assert all(type(block.attn) is kind for stage in model.stages for block in stage.blocks)
    lepe = any("lepe" in name for name, _ in first.named_parameters())
    found = {"lepe": lepe} | {k: getattr(first, k) for k in particulars if k != "lepe"}
    assert found == particulars


def test_generated_debug_recipe_trains(tmp_path):
    """As a user runs it; under 30 s on an idle core, once the kernels are compiled."""
    recipe = str(ROOT / "recipes" / "classify" / "generated-debug.yaml")
    options = ("--config", recipe, "--run_dir", str(tmp_path / "run"))
    done = command("train", "classify", *options, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "images/s" in done.stdout + done.stderr
    assert best_top1(tmp_path / "run") > 60  # chance is 25


def test_tiny20_debug_recipe_trains(tmp_path):
    recipe = str(ROOT / "recipes" / "classify" / "tiny20-debug.yaml")
    options = ["--run_dir", str(tmp_path / "run"), "--trainer.enable_progress_bar", "false"]
    train("classify", ["--config", recipe, *options])
    assert best_top1(tmp_path / "run") > 80  # chance is 50
