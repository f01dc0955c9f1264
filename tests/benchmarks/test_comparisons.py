# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.comparisons`: from recipes to a table and a picture."""

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

from quadtree_attention.tasks.training.recipe import read_recipe
from tests.conftest import ROOT


@pytest.fixture
def comparison():
    from benchmarks.comparison_tables import COMPARISONS

    return COMPARISONS["stereo-attentions"]


@pytest.mark.parametrize(
    "name", ["stereo-attentions", "bccd-attentions", "nuclei-attentions", "camvid-attentions"]
)
def test_recipes_differ_in_the_attention_alone(name):
    from benchmarks.attention_runs import find_recipes
    from benchmarks.comparison_tables import COMPARISONS

    comparison = COMPARISONS[name]
    recipes = find_recipes(ROOT / "recipes" / comparison.task, comparison.suite)
    assert {recipe.name for recipe in recipes} == set(comparison.labels)
    shared, options = [], []
    for recipe in recipes:
        content = json.loads(json.dumps(recipe.content))
        model = content["model"]
        # quadtree_a and quadtree_b backbones are one layout with the attention as its option
        model["model"] = model["model"].replace("quadtree_a", "quadtree_b")
        options.append((recipe.content["model"]["model"], json.dumps(model.pop("options", {}))))
        shared.append(content)
    assert all(content == shared[0] for content in shared)
    assert len(set(options)) == len(options)


def write_recipes(folder: Path) -> None:
    recipe = read_recipe(ROOT / "recipes" / "stereo" / "debug.yaml").settings
    recipe["data"] |= {"pairs": 4, "val_pairs": 1, "height": 32, "width": 48, "procedural": 2}
    recipe["trainer"]["max_epochs"] = 1
    for name, attention in (("full", "full"), ("quadtree-b", "quadtree_b")):
        options = {"dims": [8, 8, 8, 8], "dim": 16, "num_heads": 2, "num_layers": 1}
        options |= {"attention": attention, "refine_dim": 8, "context": [8, 8, 8, 8]}
        recipe["model"]["options"] = options
        (folder / f"attention-{name}.yaml").write_text(yaml.safe_dump(recipe))


def test_from_recipes_to_a_picture(tmp_path, comparison, capsys):
    from benchmarks.comparison_tables import markdown, read_results
    from benchmarks.comparisons import main

    write_recipes(tmp_path)
    out = tmp_path / "stereo-attentions--here.json"
    command = ["train", "stereo-attentions", "--folder", str(tmp_path), "--seeds", "0"]
    assert main([*command, "--jobs", "2", "--out", str(out)]) == 0
    results = read_results(comparison, tmp_path)
    (result,) = results.values()
    assert sorted(run["recipe"] for run in result["runs"]) == ["full", "quadtree-b"]
    text = markdown(comparison, results)
    assert "| full | 1 |" in text and "| QuadTree-A | 0 | not yet |" in text
    assert "QuadTree-B (K 6) has within 3 px, %" in text
    assert "- QuadTree-A, seed 0: not yet" in text and "speed" not in text
    assert str(tmp_path) not in out.read_text()

    assert "s per epoch" in text
    steps = ["measure", "stereo-attentions", "--folder", str(tmp_path), "--out", str(out)]
    assert main([*steps, "--device", "cpu", "--seconds-per-row", "0.01", "--threads", "1"]) == 0
    (result,) = read_results(comparison, tmp_path).values()
    assert [row["recipe"] for row in result["measurement"]["rows"]] == ["quadtree-b", "full"]
    assert all(
        row["median_ms"] > 0 and row["params"] > 1000 for row in result["measurement"]["rows"]
    )
    text = markdown(comparison, read_results(comparison, tmp_path))
    assert "samples/s" in text and "s per epoch" not in text
    assert "Measured (training steps of 4 samples, 32-true)" in text
    assert str(tmp_path) not in out.read_text()

    drawing = ["figures", "stereo-attentions", "--results", str(out), "--out", str(tmp_path)]
    assert main(drawing) == 0
    assert Image.open(tmp_path / "stereo-attentions.png").size[0] > 500
    assert "2 of 2 runs are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("bccd-attentions", "detect/debug.yaml:retinanet"),
        ("nuclei-attentions", "detect/debug.yaml:maskrcnn"),
        ("camvid-attentions", "segment/debug.yaml:semfpn"),
    ],
)
def test_training_steps_of_every_task(name, recipe, tmp_path):
    from benchmarks.comparison_tables import COMPARISONS, read_results
    from benchmarks.comparisons import main

    comparison = COMPARISONS[name]
    path, variant = recipe.split(":")
    content = read_recipe(ROOT / "recipes" / path, variant).settings
    content["data"] |= {"batch_size": 2}
    (tmp_path / f"{comparison.prefix}sr.yaml").write_text(yaml.safe_dump(content))
    options = ["--device", "cpu", "--seconds-per-row", "0.01", "--threads", "1"]
    out = ["--folder", str(tmp_path), "--out", str(tmp_path / f"{name}--here.json")]
    assert main(["measure", name, *out, *options]) == 0
    (result,) = read_results(comparison, tmp_path).values()
    (row,) = result["measurement"]["rows"]
    assert row["recipe"] == "sr" and row["median_ms"] > 0


def test_verdict_counts_seeds(comparison):
    from benchmarks.comparison_tables import _verdict, spread

    def run(value: float) -> dict:
        return {"final": {"good3": value}}

    runs = {"full": [run(90.0), run(91.0)], "quadtree-a": [], "quadtree-b": [run(90.4), run(90.2)]}
    (text, _) = _verdict(comparison, runs)
    assert "has within 3 px, % 90.30; not behind it: full (90.50). Within 0.3" in text
    assert spread(runs["full"], lambda r: r["final"]["good3"]) == "90.50 ± 0.50"


def test_unknown_name(capsys):
    from benchmarks.comparisons import main

    with pytest.raises(SystemExit) as ended:
        main(["train", "faces"])
    assert ended.value.code == 2 and "invalid choice: 'faces'" in capsys.readouterr().err
