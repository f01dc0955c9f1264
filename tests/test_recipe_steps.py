# SPDX-License-Identifier: Apache-2.0
"""Every variant of every recipe trains a step: its own settings around a small network and data.

One variant per file and class of network runs in CI, the others are slow.
"""

import csv
import math

import pytest
import yaml

from quadtree_attention.models.registry import SPECS
from tests.conftest import ROOT

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")
pytest.importorskip("timm", reason="backbones need timm")
pytest.importorskip("torchvision", reason="detectors need torchvision")

from quadtree_attention.tasks.training.recipe import merged, read_recipe
from quadtree_attention.tasks.training.run import run_command

RECIPES = [p for p in sorted((ROOT / "recipes").glob("*/*.yaml")) if p.stem != "debug"]
BACKBONE = {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 3, 4],
            "mlp_ratios": [2, 2, 2, 2]}  # fmt: skip
SMALL = {  # options of networks
    "classify": BACKBONE,
    "detect": {**BACKBONE, "channels": 16, "max_size": 64},
    "segment": {**BACKBONE, "channels": 16, "head_channels": 16},
    "match": {"dims": [16, 24, 32], "num_pairs": 1, "num_heads": 2, "fine_heads": 2},
    "stereo": {"dims": [8, 8, 8, 8], "dim": 16, "num_heads": 2, "num_layers": 1, "refine_dim": 8},
}
SCENES = {"source": "synthetic", "procedural": 2, "texture_size": 32, "pairs": 2, "val_pairs": 1,
          "batch_size": 2}  # fmt: skip
OBJECTS = {"source": "generated", "generated_count": 4, "batch_size": 2, "workers": 0}
DATA = {  # instead of that of the recipe, but for what changes samples
    "classify": {**OBJECTS, "generated_count": 8, "stored_size": 32, "image_size": 64,
                 "augment": "none"},
    "detect": {**OBJECTS, "generated_size": 64},
    "segment": {**OBJECTS, "generated_size": 64, "height": 64, "width": 64},
    "match": {**SCENES, "height": 64, "width": 96},
    "stereo": {**SCENES, "height": 32, "width": 64},
}  # fmt: skip
KEPT = ("masks", "crop", "flip", "jitter", "scale_min", "scale_max")
TRAINER = {"max_epochs": 1, "max_steps": -1, "limit_train_batches": 1, "limit_val_batches": 1,
           "val_check_interval": 1.0, "check_val_every_n_epoch": 1, "accelerator": "cpu",
           "devices": 1, "precision": "32-true", "sync_batchnorm": False,
           "num_sanity_val_steps": 0, "enable_progress_bar": False}  # fmt: skip


PAPER = yaml.safe_load((ROOT / "benchmarks" / "paper" / "rows.yaml").read_text())


def combined(path):
    """Variants of a recipe, and those that the rows of the paper combine."""
    rows = [row for part in PAPER for row in part["rows"]]
    own = f"{path.parent.name}/{path.stem}"
    named = [row["variant"] for row in rows if row.get("recipe") == own]
    return dict.fromkeys([*read_recipe(path).variants, *named])


def all_variants():
    seen = set()
    for path in RECIPES:
        for variant in combined(path):
            name = read_recipe(path, variant).settings["model"]["model"]
            key = (path, SPECS[name].network)
            marks = [pytest.mark.slow] if key in seen else []
            seen.add(key)
            yield pytest.param(
                path, variant, marks=marks, id=f"{path.parent.name}/{path.stem}-{variant}"
            )


def small(path, variant):
    """The settings of a variant, with a small network, little data and one step."""
    task, settings = path.parent.name, read_recipe(path, variant).settings
    model = settings["model"]
    sizes = model.get("options", {}).get("min_size")
    options = SMALL[task] | (
        {"min_size": [48, 64] if isinstance(sizes, list) else 64} if sizes else {}
    )
    options |= {"rois_per_image": 16, "proposals": 16} if "mask_rcnn" in model["model"] else {}
    options |= {"context": [8, 8, 8, 8]} if model["model"] == "sttr_quadtree_small" else {}
    settings["model"] = merged(model, {"options": options})
    alone = {"fine_matches": 16, "least_true": None, "cnn": None}  # no weights of another size
    settings["model"] |= alone if task == "match" else {}
    kept = {name: value for name, value in settings["data"].items() if name in KEPT}
    settings["data"] = DATA[task] | kept
    return settings | {"trainer": merged(settings["trainer"], TRAINER)}


@pytest.mark.parametrize(("path", "variant"), all_variants())
def test_variant_trains_a_step(path, variant, tmp_path):
    settings = small(path, variant)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings))
    options = ["--config", str(tmp_path / "small.yaml"), "--run_dir", str(tmp_path / "run")]
    run_command(path.parent.name, options)
    (row,) = csv.DictReader((tmp_path / "run" / "history.csv").open())
    assert 0 < float(row["train/loss"]) < math.inf
    assert (tmp_path / "run" / "last.ckpt").exists()
