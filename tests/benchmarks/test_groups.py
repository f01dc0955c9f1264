# SPDX-License-Identifier: Apache-2.0
"""Comparisons that are paired by image and by seed: standard errors, runs, the page."""

import math
import os
from statistics import stdev

import numpy as np
import pytest
import yaml

from benchmarks.result import ROOT
from benchmarks.tables.training import section
from benchmarks.training import compare
from benchmarks.training.comparison import comparisons
from benchmarks.training.differences import difference
from tests.benchmarks.conftest import command, read
from tests.test_recipe_steps import small

PAIRED = [name for name, comparison in comparisons().items() if comparison.paired]
NOT_THERE = ("numba", "cv2", "poselib", "kornia", "transformers")  # on a bare machine


def run_with(scores, seed=0):
    """A run whose score is the mean over images, each a group of its own."""
    left = [(sum(scores) - score) / (len(scores) - 1) for score in scores]
    groups = {"samples": len(scores), "whole": {"ap": float(np.mean(scores))},
              "left_out": {"ap": left}}  # fmt: skip
    return {"case": {"seed": seed}, "details": {"groups": groups}}


def test_jackknife_of_means_is_the_standard_error_over_images():
    random = np.random.default_rng(0)
    hard = random.normal(0, 10, 40)  # images differ a lot, networks little
    first, second = hard + random.normal(1, 0.5, 40), hard + random.normal(0, 0.5, 40)
    found = difference([run_with(first)], [run_with(second)], "ap")
    assert found.ahead == pytest.approx(np.mean(first - second))
    assert found.images == pytest.approx(stdev(first - second) / math.sqrt(40))
    assert found.seeds == math.inf and not found.is_clear  # one seed does not tell
    assert difference([run_with(first)], [run_with(second)], "ap", -1).ahead == -found.ahead


def test_seeds_are_paired_and_count():
    scores = np.linspace(0, 1, 10)
    first = [run_with(scores + shift, seed) for seed, shift in enumerate((5.0, 6.0, 7.0))]
    second = [run_with(scores + shift, seed) for seed, shift in ((1, 2.0), (2, 1.0), (7, 50.0))]
    found = difference(first, second, "ap")
    assert found.count == 2 and found.ahead == pytest.approx((4 + 6) / 2)  # seeds 1 and 2
    assert found.seeds == pytest.approx(stdev([4, 6]) / math.sqrt(2))
    assert found.images == pytest.approx(0, abs=1e-12)
    assert found.is_clear and found.more == pytest.approx((2 * found.seeds / 5) ** 2)
    assert difference(first, [], "ap") is None


def narrow(comparison, variants, path):
    """Writes the recipe of a comparison at debug size, with some of its variants."""
    own = ROOT / "recipes" / f"{comparison.recipe}.yaml"
    base = small(own, variants[0]) | {"task": comparison.task}
    base["model"].pop("cuda_graph", None)
    base["trainer"] |= {"limit_train_batches": 2, "limit_val_batches": 1.0}
    synthetic = base["data"]["source"] == "synthetic"
    base["data"] |= {"pairs": 4, "val_pairs": 4} if synthetic else {"generated_count": 16}
    models = {name: small(own, name)["model"] for name in variants}
    for model in models.values():
        model.pop("cuda_graph", None)
    if comparison.task == "match":  # an untrained matcher is sure of nothing
        for model in models.values():
            model["options"] = model.get("options", {}) | {"threshold": 0.0}
    del base["model"]  # a variant would keep the options of another one
    base["variants"] = {name: {"model": model} for name, model in models.items()}
    path.write_text(f"# at debug size\n{yaml.safe_dump(base)}")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "tiny20-order" else [pytest.mark.slow])
        for name in PAIRED
    ],
)
def test_comparison_at_debug_size(name, tmp_path, monkeypatch):
    """On a CPU, without libraries that a bare machine lacks: runs, scores by image, the page."""
    comparison = comparisons()[name]
    variants = [comparison.ours, next(v for v in comparison.variants if v != comparison.ours)]
    monkeypatch.setattr(compare, "WEIGHTS", tmp_path / "runs")
    # synthetic scenes of two free cameras need numba
    gone = [library for library in NOT_THERE if library != "numba" or comparison.task != "match"]
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
        f"gone = lambda name: name.split('.')[0] in {gone!r}\n"
        "PathFinder.find_spec = lambda name, *more: None if gone(name) else find(name, *more)\n"
    )
    path = os.pathsep.join([str(bare), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    if comparison.start:
        train(comparison.start, variants, tmp_path, seeds="0,1")
    seeds = "0" if name == "tiny20-order" else "0,1"
    result = train(name, variants, tmp_path, seeds=seeds)
    for row in result["rows"]:
        groups = row["details"]["groups"]
        for metric in list(comparison.scores)[:2]:
            key = metric.removeprefix("val/")
            assert len(groups["left_out"][key]) == min(50, groups["samples"]) > 1
            final = row["values"]["final"][key]
            assert groups["whole"][key] == pytest.approx(final, rel=2e-2, abs=1e-3)
    text = section(name, result)
    assert "| significant |" in text and comparison.claim in text
    assert comparison.start == "" or str(tmp_path) not in str(result)


def train(name, variants, folder, seeds):
    comparison = comparisons()[name]
    recipe, out = folder / f"{name}.yaml", folder / f"{name}.json"
    narrow(comparison, variants, recipe)
    words = [f"training {name} train", "--recipe", recipe, "--out", out, "--seeds", seeds]
    assert command(*words, "--jobs", 2, "--variants", ",".join(variants)) == 0
    return read(out)
