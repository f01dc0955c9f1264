# SPDX-License-Identifier: Apache-2.0
"""Recipes: every variant is accepted, builds its model, and says what it is; small ones train."""

import re

import pytest
import torch
import yaml

from quadtree_attention.errors import OptionError
from quadtree_attention.models.registry import create
from tests.conftest import ROOT
from tests.support import raises

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

import quadtree_attention.nn.baselines as baselines
from quadtree_attention.models.parts import context_attention as context
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.tasks.training.recipe import read_recipe
from quadtree_attention.tasks.training.run import run_command
from tests.support.training import train

FOLDER = ROOT / "recipes"
RECIPES = sorted(FOLDER.glob("*/*.yaml"))
TOP1 = {"b0": 72.0, "b1": 80.0, "b2": 82.7, "b3": 83.7, "b4": 84.0}  # as published
MIOU = {"b0": 39.9, "b1": 44.7, "b2": 48.7, "b3": 50.0, "b4": 50.6}


def quadtree(variant, topk, **more):
    return QuadtreeAttention, {"variant": variant, "topk": topk, **more}


ATTENTIONS = {  # of variants: class, and what is particular about it
    "classify/tiny20": {
        "sr": (baselines.SpatialReductionAttention, {"lepe": False}),
        "sr-lepe": (baselines.SpatialReductionAttention, {"lepe": True}),
        "window": (baselines.WindowAttention, {"lepe": False}),
        "window-lepe": (baselines.WindowAttention, {"lepe": True}),
        "focal": (baselines.FocalAttention, {"lepe": False}),
        "focal-lepe": (baselines.FocalAttention, {"lepe": True}),
        "linear": (baselines.LinearAttention, {"lepe": False}),
        "quadtree-a": quadtree("A", (8, 8, 8), lepe=False),
        "quadtree-b": quadtree("B", (8, 8, 8), lepe=True),
        "quadtree-b-no-lepe": quadtree("B", (8, 8, 8), lepe=False),
        "quadtree-b-k1": quadtree("B", (1, 1, 1), lepe=True),
        "quadtree-b-k4": quadtree("B", (4, 4, 4), lepe=True),
        "quadtree-b-k16": quadtree("B", (16, 16, 16), lepe=True),
    },
    "segment/camvid11": {
        "sr": (baselines.SpatialReductionAttention, {"lepe": False}),
        "sr-lepe": (baselines.SpatialReductionAttention, {"lepe": True}),
        "window": (baselines.WindowAttention, {"lepe": False}),
        "window-lepe": (baselines.WindowAttention, {"lepe": True}),
        "quadtree-a": quadtree("A", (32, 32, 32), lepe=False),
        "quadtree-b": quadtree("B", (32, 32, 32), lepe=True),
        "quadtree-b-no-lepe": quadtree("B", (32, 32, 32), lepe=False),
    },
    "match/loftr-lite": {
        "linear": (context.LinearAttention, {}),
        "full": (context.FullAttention, {}),
        "spatial-reduction": (context.PooledAttention, {"pool_size": 8}),
        "quadtree-a": quadtree("A", (8, 8)),
        "quadtree-b": quadtree("B", (8, 8)),
        "quadtree-b-k1": quadtree("B", (1, 1)),
        "quadtree-b-k4": quadtree("B", (4, 4)),
    },
    "match/scannet": {
        "linear,lite": (context.LinearAttention, {}),
        "sr,lite": (context.PooledAttention, {"pool_size": 8}),
        "quadtree-b": quadtree("B", (16, 8), num_levels=3),
        "quadtree-a,lite": quadtree("A", (16, 8), num_levels=3),
        "quadtree-b-vit": quadtree("B", (32, 16), num_levels=3),
        "quadtree-b,lite,k1": quadtree("B", (2, 1), num_levels=3),
        "quadtree-b,lite,k4": quadtree("B", (8, 4), num_levels=3),
        "quadtree-b,lite,k16": quadtree("B", (32, 16), num_levels=3),
    },
    "match/megadepth": {
        "quadtree-b": quadtree("B", (16, 8), num_levels=3),
        "quadtree-b-k16": quadtree("B", (32, 16), num_levels=3),
    },
}


def name_of(value):
    return value if isinstance(value, str) else f"{value.parent.name}/{value.stem}"


VARIANTS = [(path, variant) for path in RECIPES for variant in read_recipe(path).variants]
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=name_of)
each_variant = pytest.mark.parametrize(("path", "variant"), VARIANTS, ids=name_of)


def model_of(path, variant):
    settings = settings_of(path, variant)["model"]
    classes = {"num_classes": 3} if path.parent.name in ("detect", "segment") else {}
    with torch.device("meta"):
        return create(settings["model"], **classes, **settings.get("options", {}))


def settings_of(path, variant=None):
    return read_recipe(path, variant).settings


@each_recipe
def test_recipe_is_accepted(path, capsys):
    """By the parser that runs it: all names are known, all values have the right type."""
    for variant in read_recipe(path).variants:
        options = ["--config", str(path), "--variant", variant, "--print_config"]
        with pytest.raises(SystemExit) as done:
            run_command(path.parent.name, options)
        assert done.value.code == 0
        shown = yaml.safe_load(capsys.readouterr().out)
        for group, settings in settings_of(path, variant).items():
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
        ("detect/coco-maskrcnn-b3-3x", "coco-maskrcnn.yaml --variant b3,3x"),
        ("detect/bccd-retinanet-quadtree-b-k8", "bccd.yaml --variant quadtree-b-k8"),
        ("segment/camvid11-semfpn-sr-lepe", "camvid11.yaml --variant sr-lepe"),
    ],
)
def test_recipe_of_before_variants_answers_with_its_new_name(old, new):
    path = FOLDER / f"{old}.yaml"
    message = f"there is no recipe {path}; pass --config {path.parent}/{new}"
    raises(OptionError, f"^{re.escape(message)}$", read_recipe, path)


@pytest.mark.parametrize("size", TOP1)
def test_imagenet_recipes(size):
    """As published; they differ in nothing but the model, its stochastic depth and clipping."""
    path = FOLDER / "classify" / "imagenet.yaml"
    recipe, other = settings_of(path, size), settings_of(path)
    large = size in ("b3", "b4")
    assert read_recipe(path).results[size] == {"top1": {"published": TOP1[size]}}
    assert recipe["model"].pop("model") == f"quadtree_b_{size}"
    assert recipe["model"].pop("drop_path") == (0.3 if large else 0.1)
    assert recipe["trainer"].pop("gradient_clip_val", None) == (1.0 if large else None)
    del other["model"]["model"], other["model"]["drop_path"]
    assert recipe == other


@pytest.mark.parametrize("size", MIOU)
def test_ade20k_recipes(size):
    """As published; they differ in nothing but the model."""
    path = FOLDER / "segment" / "ade20k.yaml"
    recipe, other = settings_of(path, size), settings_of(path, "b0")
    assert read_recipe(path).results[size] == {"miou": {"published": MIOU[size]}}
    assert recipe["model"].pop("model") == f"semfpn_quadtree_b_{size}"
    del other["model"]["model"]
    assert recipe == other
    expected = {"lr": 6e-5, "schedule": "poly", "power": 1.0, "weight_decay": 0.01}
    expected |= {"head_lr": 10.0, "no_decay": "norms", "drop_path": 0.1}
    assert expected.items() <= recipe["model"].items()
    assert recipe["model"]["warmup_epochs"] * (20_210 // 16) == pytest.approx(1500, rel=2e-3)
    assert (recipe["trainer"]["max_steps"], recipe["data"]["batch_size"]) == (160_000, 16)


@pytest.mark.parametrize(
    ("name", "batch", "rate", "steps", "scenes"),
    [("scannet", 8, 7.5e-4, 38_400, 1513), ("megadepth", 4, 5e-4, 30_000, 368)],
)
def test_matching_recipes(name, batch, rate, steps, scenes):
    """Rates in effect, and steps of warm-up, at the batch of all GPUs."""
    recipe = settings_of(FOLDER / "match" / f"{name}.yaml")
    model, data, trainer = (recipe[group] for group in ("model", "data", "trainer"))
    assert (trainer["max_epochs"], trainer["gradient_clip_val"], data["batch_size"]) == (30, 0.5, 1)
    assert model["lr"] * batch / 16 == pytest.approx(rate)
    per_epoch = scenes * data["pairs_per_scene"] / batch
    assert model["warmup_epochs"] * per_epoch == pytest.approx(steps, rel=2e-3)
    assert (model["schedule"], model["decay"], model["no_decay"]) == ("step", 0.5, "nothing")


def test_lite_has_half_of_the_channels_and_453_scans():
    path = FOLDER / "match" / "scannet.yaml"
    recipe, whole = settings_of(path, "quadtree-b,lite"), settings_of(path, "quadtree-b")
    assert recipe["data"].pop("scenes") == 453 and recipe["data"] == whole["data"]
    models = [model_of(path, variant) for variant in ("quadtree-b,lite", "quadtree-b")]
    widths = [model.backbone.stem.weight.shape[0] for model in models]
    assert 2 * widths[0] == widths[1]
    steps = recipe["model"]["warmup_epochs"] * 453 * 200 / 8
    assert steps == pytest.approx(38_400, rel=2e-3)
    names = [settings_of(path, v)["model"]["model"] for v in ("quadtree-b", "quadtree-b-vit")]
    assert names == ["loftr", "loftr_quadtree_indoor"]


def test_coco_recipes():
    """As in the released code: 12 epochs, or 36 at several scales, for every size."""
    path = FOLDER / "detect" / "coco-maskrcnn.yaml"
    short, long = settings_of(path, "b2,1x"), settings_of(path, ["b2", "3x"])
    assert short == settings_of(path, "b2")
    sizes = long["model"]["options"].pop("min_size")
    assert (len(sizes), sizes[-1]) == (11, short["model"]["options"].pop("min_size"))
    keys = ("lr", "weight_decay", "no_decay", "decay_epochs")
    assert [long["model"].pop(key) for key in keys] == [1e-4, 0.05, "norms", [27, 33]]
    assert [short["model"].pop(key) for key in keys] == [2e-4, 1e-4, "nothing", [8, 11]]
    assert (long["data"].pop("crop"), long["trainer"].pop("max_epochs")) == (0.5, 36)
    assert short["trainer"].pop("max_epochs") == 12
    assert long == short and long["model"]["model"] == "mask_rcnn_quadtree_b_b2"
    retina = settings_of(path.with_stem("coco-retinanet"), "b2")
    assert (retina["model"]["lr"], retina["trainer"]["max_epochs"]) == (1e-4, 12)
    assert retina["model"]["model"] == "retinanet_quadtree_b_b2"


def test_stereo_recipe_is_the_paper_s_and_sttr_s():
    path = FOLDER / "stereo" / "sceneflow.yaml"
    paper, sttr = (settings_of(path, v) for v in ("quadtree", "full,sttr-schedule"))
    own = {"model": "sttr_quadtree", "lr": 6e-4, "schedule": "onecycle"}
    assert own.items() <= paper["model"].items()
    assert (paper["data"]["batch_size"], paper["trainer"]["max_epochs"]) == (8, 15)
    model, batch = sttr["model"], sttr["data"]["batch_size"]
    assert (model["model"], batch, sttr["trainer"]["max_epochs"]) == ("sttr", 1, 15)
    rate = model["lr"] * batch / 8  # rates are at a batch of 8
    assert (rate, rate * model["head_lr"]) == pytest.approx((1e-4, 2e-4))
    assert (model["decay"], model["decay_epochs"]) == (0.99, list(range(1, 15)))


def test_tiny20_recipes_differ_in_the_attention_only():
    path = FOLDER / "classify" / "tiny20.yaml"
    variants = ATTENTIONS["classify/tiny20"]
    assert sorted(read_recipe(path).variants) == sorted(variants)
    shared = []
    for variant in variants:
        recipe = settings_of(path, variant)
        assert recipe["model"].pop("model") in ("quadtree_a_b0", "quadtree_b_b0")
        recipe["model"].pop("options", None)
        shared.append(recipe)
    assert all(recipe == shared[0] for recipe in shared)


@pytest.mark.parametrize(("name", "variant"), [(n, v) for n, vs in ATTENTIONS.items() for v in vs])
def test_variant_has_the_attention_of_its_name(name, variant):
    kind, particulars = ATTENTIONS[name][variant]
    model = model_of(FOLDER / f"{name}.yaml", variant)
    if name.startswith("match"):
        found = [layer.attn for layer in model.coarse_transformer.layers]
        assert len(found) == 8
    else:
        backbone = getattr(model, "backbone", model)
        found = [block.attn for stage in backbone.stages for block in stage.blocks]
    assert all(type(attention) is kind for attention in found)
    lepe = any("lepe" in parameter for parameter, _ in found[0].named_parameters())
    own = {key: lepe if key == "lepe" else getattr(found[0], key) for key in particulars}
    assert own == particulars


@pytest.mark.parametrize(
    ("task", "options", "score", "least"),
    [
        ("classify", ["--trainer.max_epochs=2"], "val/top1", 60),  # chance is 25
        # chance is 50
        ("classify", ["--variant=tiny20", "--trainer.max_epochs=2"], "val/top1", 80),
        (  # of nothing but background: 19
            "segment",
            [
                *(f"--data.{name}=48" for name in ("generated_size", "height", "width")),
                "--trainer.max_epochs=3",
            ],
            "val/miou", 45,
        ),
    ],
)  # fmt: skip
def test_debug_recipes_train(task, options, score, least, tmp_path):
    rows = train(task, FOLDER / task / "debug.yaml", tmp_path / "run", *options)
    assert max(float(row[score]) for row in rows if row[score]) > least
    assert (tmp_path / "run" / "best.safetensors").exists()
