# SPDX-License-Identifier: Apache-2.0
"""Recipes: every variant is accepted, builds its model, and says what it is; small ones train."""

import csv
import re

import pytest
import torch
import yaml

from quadtree_attention.errors import OptionError
from quadtree_attention.models.registry import create
from tests.conftest import ROOT
from tests.support import raises
from tests.support.commands import command

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

import quadtree_attention.nn.baselines as baselines
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.tasks.training.recipe import read_recipe
from quadtree_attention.tasks.training.run import run_command

RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
TINY20 = ROOT / "recipes" / "classify" / "tiny20.yaml"
PUBLISHED = {"b0": 72.0, "b1": 80.0, "b2": 82.7, "b3": 83.7, "b4": 84.0}
ATTENTIONS = {  # of every variant of tiny20: class, and what is particular about it
    "sr": (baselines.SpatialReductionAttention, {"lepe": False}),
    "sr-lepe": (baselines.SpatialReductionAttention, {"lepe": True}),
    "window": (baselines.WindowAttention, {"lepe": False}),
    "window-lepe": (baselines.WindowAttention, {"lepe": True}),
    "focal": (baselines.FocalAttention, {"lepe": False}),
    "focal-lepe": (baselines.FocalAttention, {"lepe": True}),
    "linear": (baselines.LinearAttention, {"lepe": False}),
    "quadtree-a": (QuadtreeAttention, {"variant": "A", "topk": (8, 8, 8), "lepe": False}),
    "quadtree-b": (QuadtreeAttention, {"variant": "B", "topk": (8, 8, 8), "lepe": True}),
    "quadtree-b-no-lepe": (QuadtreeAttention, {"variant": "B", "topk": (8, 8, 8), "lepe": False}),
    "quadtree-b-k1": (QuadtreeAttention, {"variant": "B", "topk": (1, 1, 1), "lepe": True}),
    "quadtree-b-k4": (QuadtreeAttention, {"variant": "B", "topk": (4, 4, 4), "lepe": True}),
    "quadtree-b-k16": (QuadtreeAttention, {"variant": "B", "topk": (16, 16, 16), "lepe": True}),
}


def name_of(value):
    return value if isinstance(value, str) else f"{value.parent.name}/{value.stem}"


VARIANTS = [(path, variant) for path in RECIPES for variant in read_recipe(path).variants]
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=name_of)
each_variant = pytest.mark.parametrize(("path", "variant"), VARIANTS, ids=name_of)


def model_of(path, variant):
    settings = read_recipe(path, variant).settings["model"]
    classes = {"num_classes": 3} if path.parent.name in ("detect", "segment") else {}
    with torch.device("meta"):
        return create(settings["model"], **classes, **settings.get("options", {}))


def best_top1(folder):
    with (folder / "history.csv").open() as file:
        return max(float(row["val/top1"]) for row in csv.DictReader(file))


@each_recipe
def test_recipe_is_accepted(path, capsys):
    """By the parser that runs it: all names are known, all values have the right type."""
    for variant in read_recipe(path).variants:
        options = ["--config", str(path), "--variant", variant, "--print_config"]
        with pytest.raises(SystemExit) as done:
            run_command(path.parent.name, options)
        assert done.value.code == 0
        shown = yaml.safe_load(capsys.readouterr().out)
        for group, settings in read_recipe(path, variant).settings.items():
            if isinstance(settings, dict):
                assert settings.items() <= shown[group].items()


@each_variant
def test_recipe_builds_its_model(path, variant):
    assert sum(p.numel() for p in model_of(path, variant).parameters()) > 10_000


@each_recipe
def test_recipe_starts_with_what_it_is_and_how_to_run_it(path):
    text = path.read_text()
    comment = text[: re.search(r"^[^#]", text, re.MULTILINE).start()]
    task, place = path.parent.name, path.relative_to(ROOT)
    shown = re.search(rf"\n#   quadtree train {task} --config {place}( --variant (\S+))?", comment)
    recipe = read_recipe(path, shown.group(2))  # the variant exists
    assert recipe.task == task
    read = {"files", "folder", "ade20k", "scannet", "megadepth"}
    if recipe.settings["data"].get("source", "files") in read and path.stem != "debug":
        assert "--data.root" in comment
    assert set(recipe.results) <= set(recipe.variants)
    for scores in recipe.results.values():
        assert all(set(found) <= {"published", "ours"} and found for found in scores.values())


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
    call = run_command, path.parent.name, ["--config", str(copy)]
    raises(OptionError, rf"did you mean {re.escape(full)}\?$", *call)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("classify/imagenet-b2", "imagenet.yaml --variant b2"),
        ("classify/generated-debug", "debug.yaml --variant generated"),
        ("classify/tiny20-debug", "debug.yaml --variant tiny20"),
        ("classify/tiny20-quadtree-b-k16", "tiny20.yaml --variant quadtree-b-k16"),
        ("detect/coco-maskrcnn-b3-3x", "coco-maskrcnn.yaml --variant b3,3x"),
        ("detect/bccd-retinanet-quadtree-b-k8", "bccd.yaml --variant quadtree-b-k8"),
        ("detect/maskrcnn-debug", "debug.yaml --variant maskrcnn"),
        ("match/loftr-lite-spatial-reduction", "loftr-lite.yaml --variant spatial-reduction"),
        ("match/synthetic-debug", "debug.yaml --variant synthetic"),
        ("segment/camvid11-semfpn-sr-lepe", "camvid11.yaml --variant sr-lepe"),
        ("stereo/synthetic-full", "synthetic.yaml --variant full"),
    ],
)
def test_recipe_of_before_variants_answers_with_its_new_name(old, new):
    path = ROOT / "recipes" / f"{old}.yaml"
    message = f"there is no recipe {path}; pass --config {path.parent}/{new}"
    raises(OptionError, f"^{re.escape(message)}$", read_recipe, path)


@pytest.mark.parametrize("size", PUBLISHED)
def test_imagenet_recipes(size):
    """As published; they differ in nothing but the model, its stochastic depth and clipping."""
    path = ROOT / "recipes" / "classify" / "imagenet.yaml"
    recipe, other = read_recipe(path, size), read_recipe(path).settings
    large = size in ("b3", "b4")
    assert recipe.results[size] == {"top1": {"published": PUBLISHED[size]}}
    assert recipe.settings["model"].pop("model") == f"quadtree_b_{size}"
    assert recipe.settings["model"].pop("drop_path") == (0.3 if large else 0.1)
    assert recipe.settings["trainer"].pop("gradient_clip_val", None) == (1.0 if large else None)
    del other["model"]["model"], other["model"]["drop_path"]
    assert recipe.settings == other


def test_coco_recipes():
    """As in the released code: 12 epochs, or 36 at several scales, for every size."""
    path = ROOT / "recipes" / "detect" / "coco-maskrcnn.yaml"
    short, long = read_recipe(path, "b2,1x").settings, read_recipe(path, ["b2", "3x"]).settings
    assert short == read_recipe(path, "b2").settings
    sizes = long["model"]["options"].pop("min_size")
    assert (len(sizes), sizes[-1]) == (11, short["model"]["options"].pop("min_size"))
    keys = ("lr", "weight_decay", "no_decay", "decay_epochs")
    assert [long["model"].pop(key) for key in keys] == [1e-4, 0.05, "norms", [27, 33]]
    assert [short["model"].pop(key) for key in keys] == [2e-4, 1e-4, "nothing", [8, 11]]
    assert (long["data"].pop("crop"), long["trainer"].pop("max_epochs")) == (0.5, 36)
    assert short["trainer"].pop("max_epochs") == 12
    assert long == short and long["model"]["model"] == "mask_rcnn_quadtree_b_b2"
    retina = read_recipe(path.with_stem("coco-retinanet"), "b2").settings
    assert (retina["model"]["lr"], retina["trainer"]["max_epochs"]) == (1e-4, 12)
    assert retina["model"]["model"] == "retinanet_quadtree_b_b2"


def test_stereo_recipe_is_the_paper_s_and_sttr_s():
    path = ROOT / "recipes" / "stereo" / "sceneflow.yaml"
    paper, sttr = (read_recipe(path, v).settings for v in ("quadtree", "full,sttr-schedule"))
    own = {"model": "sttr_quadtree", "lr": 6e-4, "schedule": "onecycle"}
    assert own.items() <= paper["model"].items()
    assert (paper["data"]["batch_size"], paper["trainer"]["max_epochs"]) == (8, 15)
    model, batch = sttr["model"], sttr["data"]["batch_size"]
    assert (model["model"], batch, sttr["trainer"]["max_epochs"]) == ("sttr", 1, 15)
    rate = model["lr"] * batch / 8  # rates are at a batch of 8
    assert (rate, rate * model["head_lr"]) == pytest.approx((1e-4, 2e-4))
    assert (model["decay"], model["decay_epochs"]) == (0.99, list(range(1, 15)))


def test_there_are_few_recipe_files():
    assert len(RECIPES) <= 22


def test_tiny20_recipes_differ_in_the_attention_only():
    assert sorted(read_recipe(TINY20).variants) == sorted(ATTENTIONS)
    shared = []
    for variant in ATTENTIONS:
        recipe = read_recipe(TINY20, variant).settings
        assert recipe["model"].pop("model") in ("quadtree_a_b0", "quadtree_b_b0")
        recipe["model"].pop("options", None)
        shared.append(recipe)
    assert all(recipe == shared[0] for recipe in shared)


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_tiny20_recipe_has_the_attention_of_its_name(variant):
    kind, particulars = ATTENTIONS[variant]
    model = model_of(TINY20, variant)
    first = model.stages[0].blocks[0].attn
    assert all(type(block.attn) is kind for stage in model.stages for block in stage.blocks)
    lepe = any("lepe" in name for name, _ in first.named_parameters())
    found = {"lepe": lepe} | {k: getattr(first, k) for k in particulars if k != "lepe"}
    assert found == particulars


def test_debug_recipe_trains(tmp_path):
    """As a user runs it; under 30 s on an idle core, once the kernels are compiled."""
    recipe = str(ROOT / "recipes" / "classify" / "debug.yaml")
    options = ("--config", recipe, "--run_dir", str(tmp_path / "run"))
    done = command("train", "classify", *options, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "images/s" in done.stdout + done.stderr
    assert best_top1(tmp_path / "run") > 60  # chance is 25


def test_tiny20_variant_of_the_debug_recipe_trains(tmp_path):
    recipe = str(ROOT / "recipes" / "classify" / "debug.yaml")
    options = ["--run_dir", str(tmp_path / "run"), "--trainer.enable_progress_bar", "false"]
    run_command("classify", ["--config", recipe, "--variant", "tiny20", *options])
    assert best_top1(tmp_path / "run") > 80  # chance is 50
