# SPDX-License-Identifier: Apache-2.0
"""Comparisons by training: the runs, the file they grow, measured steps, scores of weights."""

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from benchmarks.result import read_all
from benchmarks.tables.training import section
from benchmarks.training import runs
from benchmarks.training.comparison import comparisons
from benchmarks.training.runs import find_recipes, fingerprint, read_history, seconds_before
from benchmarks.training.scores import HELD_OUT
from quadtree_attention import models
from quadtree_attention.files import file_sha256
from quadtree_attention.models.weights import read_checkpoint
from quadtree_attention.tasks.match.data import MatchData
from quadtree_attention.tasks.match.module import images
from quadtree_attention.tasks.match.readers import read_pairs
from tests.benchmarks.conftest import command, read, refused, stored, write_graf
from tests.conftest import ROOT

CLASSIFY = {
    "task": "classify",
    "seed_everything": 0,
    "model": {"model": "test_quadtree", "lr": 0.2, "warmup_epochs": 0, "drop_path": 0.0,
              "mixup": 0.0, "cutmix": 0.0},
    "data": {"source": "generated", "generated_count": 32, "generated_classes": 2,
             "image_size": 32, "stored_size": 32, "batch_size": 16, "augment": "batch",
             "eval_crop": 1.0},
    "trainer": {"max_epochs": 1, "accelerator": "cpu"},
}  # fmt: skip
NARROW = {"dims": [16, 24, 32], "num_pairs": 1, "num_heads": 2, "fine_heads": 2}
MATCH = {
    "task": "match",
    "seed_everything": 0,
    "model": {"model": "loftr_quadtree_small", "lr": 8e-3, "warmup_epochs": 0, "fine_matches": 32,
              "options": NARROW},
    "data": {"source": "synthetic", "procedural": 8, "texture_size": 64, "height": 64, "width": 96,
             "pairs": 8, "val_pairs": 2, "batch_size": 4,
             "scene": {"objects": [1, 2], "samples": 1, "photometric": 0.0,
                       "baseline": [0.02, 0.1]}},
    "trainer": {"max_epochs": 1, "accelerator": "cpu"},
}  # fmt: skip
# In place of training: all that the runs leave behind, at once.
PRETEND = """
import os, pathlib, signal, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(options["--run_dir"])
if "slow" in folder.name: time.sleep(60)
if "killed" in folder.name: sys.exit("/home/someone/data/train.npz is not there")
if "mute" in folder.name: os.kill(os.getpid(), signal.SIGKILL)
folder.mkdir()
rows = ["epoch,seconds,val/loss,val/top1,val/top5,train/loss"]
for epoch in range(int(options["--trainer.max_epochs"])):
    loss = "nan" if "diverged" in folder.name else 1.5
    rows.append(f"{epoch + 1},0.5,{loss},{50 - epoch},90,1.25")
(folder / "history.csv").write_text("\\n".join(rows) + "\\n")
"""


@pytest.fixture
def pretend(monkeypatch):
    monkeypatch.setattr(runs, "TRAIN", PRETEND)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe with these variants; returns the file."""

    def write(content: dict = CLASSIFY, /, **variants: dict) -> Path:
        path = tmp_path / "recipe.yaml"
        named = {name.replace("_", "-"): change for name, change in variants.items()}
        path.write_text(f"# a comment\n{yaml.safe_dump(content | {'variants': named})}")
        return path

    return write


def rows(path: Path, kind: str) -> list[dict]:
    return [row for row in read(path)["rows"] if row["kind"] == kind]


def names(path: Path, *, failed: bool = False) -> list[tuple[str, int]]:
    """Variant and seed of the runs that are recorded."""
    found = [row for row in rows(path, "run") if ("error" in row) == failed]
    return [(row["case"]["recipe"], row["case"]["seed"]) for row in found]


# ---- what is compared


@pytest.mark.parametrize("name", comparisons())
def test_variants_differ_in_the_attention_alone(name):
    """And they are those of the runs that are stored, whose recipes have not changed since."""
    comparison = comparisons()[name]
    recipes = find_recipes(comparison, ROOT / "recipes" / f"{comparison.recipe}.yaml")
    assert set(recipes) == set(comparison.variants)
    assert next(iter(recipes)) == comparison.ours
    shared, options = [], []
    for recipe in recipes.values():
        content = json.loads(json.dumps(recipe.settings))
        model = content["model"]
        # quadtree_a and quadtree_b backbones are one layout with the attention as its option
        model["model"] = model["model"].replace("quadtree_a", "quadtree_b")
        options.append((recipe.settings["model"]["model"], json.dumps(model.pop("options", {}))))
        shared.append(content)
    assert all(content == shared[0] for content in shared)
    assert len(set(options)) == len(options)
    result = next(iter(read_all(comparison.kind).values()), {"rows": []})
    assert result["rows"] or comparison.paired  # which is not trained yet
    for row in (row for row in result["rows"] if row["kind"] == "run"):
        case, extra = row["case"], result["runs"][row["run"]]["settings"]["extra"]
        recipe = recipes[case["recipe"]]
        assert case["fingerprint"] == fingerprint(recipe, data=case["data"], extra=extra)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("attentions train --variants sr,winodw", "winodw"),
        ("attentions train --recipe nowhere.yaml", "there is no recipe nowhere.yaml"),
        ("attentions train --jobs 0", "must be at least 1, got 0"),
        ("attentions train --seeds a", "must be numbers with commas, got 'a'"),
        ("attentions measure --out .", ". is a directory"),
        ("attentions measure --memory-only --device cpu", "only the memory of a GPU is measured"),
        ("attentions evaluate", "keeps no weights to score; those that do: match-attentions"),
        ("match-attentions evaluate --weights nowhere", "there is no folder nowhere"),
        ("match-attentions evaluate --weights . --data nowhere", "no folder nowhere of real pairs"),
        ("match-attentions evaluate --sets graff", "unknown 'graff'"),
        ("attentions figures --results none.json", "none.json"),
        ("faces train", "invalid choice: 'faces'"),
    ],
)
def test_bad_options(options, message, capsys):
    assert message in refused(capsys, f"training {options}")


# ---- runs


@pytest.mark.usefixtures("pretend")
def test_only_what_changed_is_trained_again(recipe, tmp_path):
    path, out = recipe(a={}, b={}), tmp_path / "result.json"
    work, data = tmp_path / "kept", tmp_path / "photos"
    train = ["training attentions train --jobs 4", "--recipe", path, "--out", out]
    train += ["--work", work, "--data", data]
    assert command(*train) == 0
    assert sorted(names(out)) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    runs = rows(out, "run")
    assert {row["case"]["data"] for row in runs} == {"photos"}
    assert str(tmp_path) not in out.read_text() and read(out)["complete"]
    assert "--data photos" in read(out)["runs"][0]["command"]
    assert max(row["values"]["beside"] for row in runs) == 3
    assert (work / "a-s1" / "history.csv").exists()

    recipe(a={"model": {"lr": 0.1}}, b={})
    path.write_text("# other words\n" + path.read_text())
    assert command(*train, "--seeds", "0") == 0
    again = rows(out, "run")
    assert [row["case"]["recipe"] for row in again] == ["b", "b", "a"]  # also seed 1 of the old a
    assert again[-1]["case"]["fingerprint"] != runs[0]["case"]["fingerprint"]

    assert command(*train, "--seeds", "1", "--variants", "a", "--epochs", "3") == 0
    (row,) = (row for row in rows(out, "run") if row["case"]["recipe"] == "a")
    assert row["details"]["history"]["epoch"] == [1, 2, 3]
    assert row["values"]["final"]["top1"] == 48
    assert row["values"]["best"] == {"epoch": 1, "top1": 50.0}


@pytest.mark.usefixtures("pretend")
def test_failures_stop_nothing_and_are_forgotten_when_mended(recipe, tmp_path, monkeypatch, capsys):
    path, out = recipe(diverged={}, fine={}, killed={}, mute={}), tmp_path / "result.json"
    train = ["training attentions train --seeds 0", "--recipe", path, "--out", out]
    assert command(*train) == 1
    assert names(out) == [("fine", 0)]
    reasons = {r["case"]["recipe"]: r["error"] for r in rows(out, "run") if "error" in r}
    assert reasons["killed"] == "train.npz is not there"
    assert reasons["mute"] == "exit code -9"
    assert "val/loss is not finite" in reasons["diverged"]
    progress = capsys.readouterr().err
    assert "/home/someone/data/train.npz" in progress and "killed seed 0: failed" in progress
    assert not read(out)["complete"]

    monkeypatch.setattr(runs, "TRAIN", PRETEND.replace("killed", "nobody"))
    assert command(*train, "--variants", "killed") == 0
    assert names(out, failed=True) == [("diverged", 0), ("mute", 0)]


@pytest.mark.usefixtures("pretend")
def test_time_limit(recipe, tmp_path, capsys):
    path, out = recipe(slow={}, quick={}), tmp_path / "result.json"
    train = ["training attentions train --seeds 0 --jobs 2", "--recipe", path, "--out", out]
    assert command(*train, "--time-limit", "0") == 0
    assert not out.exists()
    assert "not finished: slow seed 0" in capsys.readouterr().err

    began = time.monotonic()
    assert command(*train, "--time-limit", "4") == 0
    assert time.monotonic() - began < 45  # the slow one would take 60
    assert names(out) == [("quick", 0)] and names(out, failed=True) == []
    printed = capsys.readouterr()
    assert "not finished: slow seed 0" in printed.err
    assert "1 of 2 runs are in" in printed.out and "repeat the command" in printed.out


@pytest.mark.usefixtures("pretend")
def test_what_would_not_be_ready_is_not_started(recipe, tmp_path):
    path, out = recipe(a={}, b={}), tmp_path / "result.json"
    train = ["training attentions train", "--recipe", path, "--out", out]
    assert command(*train, "--seeds", "0") == 0
    result = read(out)
    result["rows"][0]["values"]["seconds"] = 1000.0
    out.write_text(json.dumps(result))
    assert command(*train, "--seeds", "1", "--time-limit", "30") == 0
    assert names(out) == [("a", 0), ("b", 0), ("b", 1)]


def test_epochs_that_were_not_validated_are_left_out(tmp_path):
    path, comparison = tmp_path / "history.csv", comparisons()["attentions"]
    head = "epoch,seconds,val/loss,val/top1,val/top5,train/loss"
    lines = ["1,0.5,,,,2.0", "2,0.75,1.5,50,90,1.25", "3,0.5,,,,1.0", "4,0.75,1.25,60,95,0.75"]
    path.write_text("\n".join([head, *lines]))
    history = read_history(path, 4, comparison)
    assert history["epoch"] == [2, 4] and history["val/top1"] == [50, 60]
    assert history["train/loss"] == [1.25, 0.75]
    path.write_text("\n".join([head, *lines[:3]]))
    with pytest.raises(ValueError, match="no val/top1 of its last epoch"):
        read_history(path, 3, comparison)


@pytest.mark.slow
def test_stopped_run_goes_on(recipe, tmp_path):
    """A command that is ended in the second epoch leaves what the next one continues."""
    out, work = tmp_path / "result.json", tmp_path / "work"
    path = recipe(MATCH, linear={"model": {"options": {"attention": "linear"}}})
    train = ["training", "match-attentions", "train", "--recipe", str(path), "--out", str(out)]
    train += ["--work", str(work), "--weights", str(tmp_path / "weights"), "--epochs", "4"]
    first = [sys.executable, "-m", "benchmarks", *train]
    process = subprocess.Popen(first, cwd=ROOT, stderr=subprocess.DEVNULL)
    folder, end = work / "linear-s0", time.monotonic() + 120
    try:
        while not (folder / "last.ckpt").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not out.exists()
    before = list(csv.DictReader((folder / "history.csv").open()))
    assert 0 < len(before) < 4

    assert command("training", *train[1:]) == 0
    after = list(csv.DictReader((folder / "history.csv").open()))
    assert len(after) == 4
    assert before[0].items() <= after[0].items()  # its time, too: the epoch was not trained again
    (row,) = rows(out, "run")
    seconds = row["values"]["seconds"]
    assert seconds > sum(row["details"]["history"]["seconds"])  # those of the first command too

    assert 0 < seconds_before(row["case"], folder) < seconds
    for change in ({"fingerprint": "0"}, {"epochs": 5}):  # other runs begin anew
        assert seconds_before(row["case"] | change, folder) is None


# ---- steps


def test_measured_steps(recipe, tmp_path):
    path, out = recipe(ours={}, broken={"model": {"options": {"lepee": True}}}), tmp_path / "r.json"
    measure = ["training attentions measure --device cpu --threads 1 --seconds-per-row 0.01"]
    measure += ["--recipe", path, "--out", out]
    assert command(*measure) == 1
    broken, ours = rows(out, "step")
    assert ours["values"]["params"] > 0 and ours["values"]["macs"] > 0
    assert ours["values"]["median_ms"] > 0 and "lepee" in broken["error"]
    settings = read(out)["runs"][0]["settings"]
    assert settings == {"batch": 16, "precision": "32-true", "image": [32, 32]}
    assert str(tmp_path) not in out.read_text()
    again = ["--variants", "ours", "--extra=--data.batch_size=8"]
    assert command(*measure, *again) == 0  # in the place of the first
    assert read(out)["runs"][1]["settings"]["batch"] == 8
    assert [row["case"]["recipe"] for row in rows(out, "step")] == ["broken", "ours"]
    assert [row["run"] for row in rows(out, "step")] == [0, 1]


@pytest.mark.parametrize(
    ("name", "recipe_file", "variant"),
    [
        ("bccd-attentions", "detect/debug", "retinanet"),
        ("nuclei-attentions", "detect/debug", "maskrcnn"),
        ("camvid-attentions", "segment/debug", None),
        ("match-attentions", "match/debug", None),
        ("stereo-attentions", "stereo/debug", None),
    ],
)
def test_training_steps_of_every_task(name, recipe_file, variant, tmp_path):
    content = yaml.safe_load((ROOT / "recipes" / f"{recipe_file}.yaml").read_text())
    content["data"] |= {"batch_size": 2}
    content["variants"] = {"sr": content.get("variants", {}).get(variant, {})}
    path, out = tmp_path / "recipe.yaml", tmp_path / "result.json"
    path.write_text(yaml.safe_dump(content))
    options = "--device cpu --threads 1 --seconds-per-row 0.01"
    assert command(f"training {name} measure {options}", "--recipe", path, "--out", out) == 0
    (row,) = rows(out, "step")
    assert row["case"]["recipe"] == "sr" and row["values"]["median_ms"] > 0


@pytest.mark.gpu
def test_memory_is_added_to_speed(recipe, tmp_path):
    out = tmp_path / "result.json"
    measure = ["training attentions measure --seconds-per-row 0.01"]
    measure += ["--recipe", recipe(ours={}), "--out", out]
    assert command(*measure, "--memory-only") == 2  # nothing to add it to
    assert command(*measure) == 0
    before = rows(out, "step")
    assert command(*measure, "--memory-only") == 0
    assert rows(out, "step") == before
    (row,) = rows(out, "memory")
    assert row["values"]["peak_mib"] > 0 and row["run"] == 1


# ---- scores


def test_from_training_to_pictures(recipe, tmp_path, capsys):
    tree = {"num_levels": 2, "topk": 2, "attention": "quadtree_b"}
    variants = {"linear": {"attention": "linear"}, "quadtree_b": tree}
    path = recipe(MATCH, **{name: {"model": {"options": o}} for name, o in variants.items()})
    out, weights = tmp_path / "new" / "result.json", tmp_path / "weights"
    train = ["training match-attentions train --seeds 3 --jobs 2", "--recipe", path, "--out", out]
    train += ["--weights", weights, "--work", tmp_path / "work"]
    assert command(*train) == 0
    assert sorted(names(out)) == [("linear", 3), ("quadtree-b", 3)]
    runs = rows(out, "run")
    for row in runs:
        score, history = row["values"]["final"]["fscore"], row["details"]["history"]
        assert score == row["values"]["best"]["fscore"] == history["val/fscore"][0]
        assert history["train/loss"][0] > 0 and "val/auc10" in history
        assert row["values"]["seconds"] > history["seconds"][0] > 0 and row["case"]["epochs"] == 1
    assert str(ROOT) not in out.read_text() and str(tmp_path) not in out.read_text()
    progress = capsys.readouterr().err
    assert "quadtree-b seed 3: F-score" in progress and "[2/2]" in progress
    assert read(out)["complete"]
    assert_weights_are_those_of_the_runs(weights, tmp_path / "work", runs)

    before = out.read_text()
    assert command(*train) == 0  # nothing left to do
    assert out.read_text() == before

    evaluate = ["training match-attentions evaluate --threads 1 --pairs 2 --size 320"]
    evaluate += ["--results", out, "--weights", weights, "--recipe-file", path]
    write_graf(tmp_path / "data")
    evaluate += ["--work", tmp_path / "scores", "--data", tmp_path / "data"]
    assert command(*evaluate, "--sets", "synthetic") == 0
    first = rows(out, "score")
    scenes = read(out)["runs"][first[0]["run"]]["settings"]["synthetic"]
    assert (scenes["pairs"], scenes["height"], scenes["width"]) == (2, 64, 96)
    assert [row["case"]["recipe"] for row in first] == ["sift", "quadtree-b", "linear"]
    assert all(row["values"]["pairs"] == 2 and row["values"]["truth"] == "pose" for row in first)
    assert_scenes_are_new(tmp_path / "scores" / "synthetic")
    assert command(*evaluate, "--sets", "synthetic,graf") == 0  # what is missing is added
    scored = rows(out, "score")
    assert scored[:3] == first and [row["case"]["set"] for row in scored[3:]] == ["graf"] * 3
    assert "graf" in capsys.readouterr().out
    assert str(ROOT) not in out.read_text() and str(tmp_path) not in out.read_text()

    pictures = tmp_path / "pictures"
    draw = "training match-attentions figures"
    assert command(draw, "--results", out, "--out", pictures) == 0
    drawn = sorted(picture.name for picture in pictures.iterdir())
    assert drawn == ["match-attentions-auc.png", "match-attentions-curves.png"]
    text = section("match-attentions--x", read(out))
    assert "| synthetic | linear (LoFTR) |" in text


def assert_weights_are_those_of_the_runs(weights: Path, work: Path, runs: list[dict]) -> None:
    files = sorted(weights.iterdir())  # one a run, and nothing else: they travel as files
    assert [path.name for path in files] == ["linear-s3.safetensors", "quadtree-b-s3.safetensors"]
    checksums = {row["case"]["recipe"]: row["details"]["weights"]["sha256"] for row in runs}
    for path in files:
        assert file_sha256(path) == checksums[path.stem.removesuffix("-s3")]
        best = read_checkpoint(work / path.stem / "best.safetensors")
        stored = read_checkpoint(path)
        assert {t.dtype for t in stored.values() if t.is_floating_point()} == {torch.float16}
        models.load(path)
        for name, tensor in stored.items():
            assert torch.equal(tensor, best[name].to(tensor.dtype)), name


def assert_scenes_are_new(folder: Path) -> None:
    """They are not the validation scenes of the run, and their poses are exact."""
    pairs = read_pairs(folder / "pairs.txt")
    data = MatchData(**MATCH["data"] | {"val_pairs": 2}, seed=HELD_OUT)
    data.setup()
    truth = data.on_after_batch_transfer({"indices": torch.arange(2), "training": False}, 0)
    pixels = torch.tensor(np.asarray(Image.open(folder / pairs[1].image0), float))
    shown = truth["image0"][1].permute(1, 2, 0) * 255
    assert (pixels - shown).abs().max() <= 0.501
    assert torch.allclose(torch.tensor(pairs[1].T_0to1), truth["T_0to1"][1].double())
    data.seed = 3  # the run's
    other = data.on_after_batch_transfer({"indices": torch.arange(2), "training": False}, 0)
    assert not torch.allclose(images(other)["image0"], images(truth)["image0"], atol=0.1)


def test_weights_of_other_runs_are_refused(tmp_path, capsys):
    weights, path = tmp_path / "weights", tmp_path / "x.json"
    weights.mkdir()
    before = stored("training/match-attentions")
    path.write_text(json.dumps(before))
    evaluate = ["training match-attentions evaluate --sets synthetic", "--results", path]
    evaluate += ["--weights", weights]
    assert "there are no weights in" in refused(capsys, *evaluate)
    (weights / "linear-s0.safetensors").write_bytes(b"others")
    assert "linear-s0.safetensors holds weights of no run" in refused(capsys, *evaluate)
    assert read(path) == before
    path.write_text('{"kind": "quality/matching"}')
    assert "is not a result file" in refused(capsys, *evaluate)
