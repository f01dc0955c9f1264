# SPDX-License-Identifier: Apache-2.0
"""Attentions compared in a matcher: real small runs, their weights and scores, tables, pictures."""

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")
pytest.importorskip("timm")
yaml = pytest.importorskip("yaml")

from tests.benchmarks.test_attentions import ABOUT  # noqa: E402
from tests.conftest import ROOT  # noqa: E402

DATA = ROOT.parent / "shared" / "data" / "matching"
NARROW = {"dims": [16, 24, 32], "num_pairs": 1, "num_heads": 2, "fine_heads": 2}
RECIPE = {
    "seed_everything": 0,
    "model": {"model": "loftr_quadtree_small", "lr": 8e-3, "warmup_epochs": 0, "fine_matches": 32},
    "data": {
        "source": "synthetic",
        "procedural": 8,
        "texture_size": 64,
        "height": 64,
        "width": 96,
        "pairs": 8,
        "val_pairs": 2,
        "batch_size": 4,
        "scene": {"objects": [1, 2], "samples": 1, "photometric": 0.0, "baseline": [0.02, 0.1]},
    },
    "trainer": {"max_epochs": 1, "accelerator": "cpu"},
}


@pytest.fixture
def program() -> ModuleType:
    from benchmarks import match_attentions

    return match_attentions


@pytest.fixture
def tables() -> ModuleType:
    from benchmarks import match_attention_tables

    return match_attention_tables


@pytest.fixture
def recipes(tmp_path: Path) -> Callable[..., Path]:
    """Writes recipes with these attentions by their names into a folder; returns the folder."""

    def write(**attentions: str) -> Path:
        folder = tmp_path / "recipes"
        folder.mkdir(exist_ok=True)
        for name, attention in attentions.items():
            more = {"num_levels": 2, "topk": 2} if attention.startswith("quadtree") else {}
            model = RECIPE["model"] | {"options": NARROW | more | {"attention": attention}}
            text = yaml.safe_dump(RECIPE | {"model": model})
            (folder / f"loftr-lite-{name.replace('_', '-')}.yaml").write_text(text)
        return folder

    return write


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_from_training_to_pictures(
    program: ModuleType,
    tables: ModuleType,
    recipes: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("poselib", reason="estimators need the extra 'models'")
    folder = recipes(linear="linear", quadtree_b="quadtree_b", full="fulll")
    out, weights = tmp_path / "new" / "result.json", tmp_path / "weights"
    command = ["train", "--folder", str(folder), "--seeds", "3", "--jobs", "3", "--out", str(out)]
    command += ["--weights", str(weights), "--work", str(tmp_path / "work")]
    assert program.main(command) == 1
    result = read(out)
    tables.check_result(result)
    assert sorted(run["recipe"] for run in result["runs"]) == ["linear", "quadtree-b"]
    (failure,) = result["failures"]
    assert failure["recipe"] == "full" and "'fulll'" in "\n".join(failure["lines"])
    for run in result["runs"]:
        assert run["final"]["fscore"] == run["best"]["fscore"] == run["history"]["val/fscore"][0]
        assert run["history"]["train/loss"][0] > 0 and "val/auc10" in run["history"]
    assert str(ROOT) not in out.read_text() and str(tmp_path) not in out.read_text()
    assert "quadtree-b seed 3: F-score" in capsys.readouterr().err
    assert_weights_are_those_of_the_runs(weights, tmp_path / "work", result)

    before = out.read_text()
    assert program.main([*command, "--recipes", "linear,quadtree-b"]) == 0  # nothing left to do
    assert out.read_text() == before

    evaluate = ["evaluate", "--results", str(out), "--weights", str(weights), "--threads", "1"]
    evaluate += ["--folder", str(folder), "--pairs", "2", "--work", str(tmp_path / "scores")]
    evaluate += ["--size", "320"]
    assert program.main([*evaluate, "--sets", "synthetic"]) == 0
    result = read(out)
    tables.check_result(result)
    scenes = result["evaluation"]["synthetic"]
    assert (scenes["pairs"], scenes["height"], scenes["width"]) == (2, 64, 96)
    first = result["evaluation"]["rows"]
    assert [row["recipe"] for row in first] == ["sift", "quadtree-b", "linear"]
    assert all(row["pairs"] == 2 and row["kind"] == "pose" for row in first)
    assert_scenes_are_new(tmp_path / "scores" / "synthetic", program)
    if DATA.is_dir():  # what is there stays, what is not is added
        assert program.main([*evaluate, "--sets", "synthetic,graf"]) == 0
        rows = read(out)["evaluation"]["rows"]
        assert rows[:3] == first and {row["set"] for row in rows[3:]} == {"graf"}
        assert "graf" in capsys.readouterr().out
    assert str(ROOT) not in out.read_text() and str(tmp_path) not in out.read_text()

    pictures = tmp_path / "pictures"
    assert program.main(["figures", "--results", str(out), "--out", str(pictures)]) == 0
    assert sorted(path.name for path in pictures.iterdir()) == [tables.AREAS, tables.CURVES]
    text = tables.markdown({"match-attentions--x": read(out)})
    assert "| synthetic | linear (LoFTR) |" in text and "full, seed 3: failed: " in text


def assert_weights_are_those_of_the_runs(weights: Path, work: Path, result: dict) -> None:
    from quadtree_attention.files import file_sha256
    from quadtree_attention.models.registry import load
    from quadtree_attention.models.weights import read_checkpoint

    files = sorted(weights.iterdir())  # one a run, and nothing else: they travel as files
    assert [path.name for path in files] == ["linear-s3.safetensors", "quadtree-b-s3.safetensors"]
    checksums = {run["recipe"]: run["weights"]["sha256"] for run in result["runs"]}
    for path in files:
        assert file_sha256(path) == checksums[path.stem.removesuffix("-s3")]
        best = read_checkpoint(work / path.stem / "best.safetensors")
        stored = read_checkpoint(path)
        assert {t.dtype for t in stored.values() if t.is_floating_point()} == {torch.float16}
        load(path)
        for name, tensor in stored.items():
            assert torch.equal(tensor, best[name].to(tensor.dtype)), name


def assert_scenes_are_new(folder: Path, program: ModuleType) -> None:
    """They are not the validation scenes of the run, and their poses are exact."""
    from PIL import Image

    from quadtree_attention.tasks.match.data import MatchData
    from quadtree_attention.tasks.match.module import images
    from quadtree_attention.tasks.match.readers import read_pairs

    pairs = read_pairs(folder / "pairs.txt")
    data = MatchData(**RECIPE["data"] | {"val_pairs": 2}, seed=program.HELD_OUT)
    data.setup()
    truth = data.on_after_batch_transfer({"indices": torch.arange(2), "training": False}, 0)
    pixels = torch.tensor(np.asarray(Image.open(folder / pairs[1].image0), float))
    shown = truth["image0"][1].permute(1, 2, 0) * 255
    assert (pixels - shown).abs().max() <= 0.501
    assert torch.allclose(torch.tensor(pairs[1].T_0to1), truth["T_0to1"][1].double())
    data.seed = 3  # the run's
    other = data.on_after_batch_transfer({"indices": torch.arange(2), "training": False}, 0)
    assert not torch.allclose(images(other)["image0"], images(truth)["image0"], atol=0.1)


@pytest.mark.slow
def test_stopped_run_goes_on(
    program: ModuleType, recipes: Callable[..., Path], tmp_path: Path
) -> None:
    """A command that is ended in the second epoch leaves what the next one goes on with."""
    from benchmarks.attention_runs import Job, _seconds_before, find_recipes

    out, work = tmp_path / "result.json", tmp_path / "work"
    command = ["train", "--folder", str(recipes(linear="linear")), "--out", str(out), "--work"]
    command += [str(work), "--weights", str(tmp_path / "weights"), "--epochs", "4"]
    first = [sys.executable, "-m", "benchmarks.match_attentions", *command]
    process = subprocess.Popen(first, cwd=ROOT, stderr=subprocess.DEVNULL)
    history = work / "linear-s0" / "history.csv"
    try:
        wait_for(work / "linear-s0" / "last.ckpt", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not out.exists()
    before = list(csv.DictReader(history.open()))
    assert 0 < len(before) < 4

    assert program.main(command) == 0
    after = list(csv.DictReader(history.open()))
    assert len(after) == 4
    assert before[0].items() <= after[0].items()  # its time, too: the epoch was not trained again
    (run,) = read(out)["runs"]
    assert run["seconds"] > sum(run["history"]["seconds"])  # those of the first command too

    (recipe,) = find_recipes(tmp_path / "recipes", program.SUITE)
    job = Job(recipe, 0, 4, None, run["fingerprint"])
    folder = work / "linear-s0"
    assert 0 < _seconds_before(job, folder) < run["seconds"]
    for change in ({"fingerprint": "0"}, {"epochs": 5}):  # other runs begin anew
        assert _seconds_before(replace(job, **change), folder) is None


def wait_for(path: Path, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


def test_measure(
    program: ModuleType, tables: ModuleType, recipes: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    command = ["measure", "--folder", str(recipes(linear="linear", full="fulll"))]
    command += ["--out", str(out), "--device=cpu", "--threads=1", "--seconds-per-row=0.01"]
    assert program.main(command) == 1
    result = read(out)
    tables.check_result(result)
    linear, broken = result["measurement"]["rows"]
    assert linear["params"] > 10_000 and linear["median_ms"] > 0
    assert "'fulll'" in broken["error"]
    assert (result["measurement"]["batch"], result["measurement"]["image"]) == (4, [64, 96])


def test_suite_has_the_recipes_that_are_there(program: ModuleType, tables: ModuleType) -> None:
    from benchmarks.attention_runs import find_recipes

    found = find_recipes(program.RECIPES, program.SUITE)
    assert tuple(recipe.name for recipe in found) == tables.ORDER
    assert sorted(tables.ORDER) == sorted(tables.LABELS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train", "--recipes", "lineer"], "there is no recipe 'lineer'"),
        (["evaluate", "--weights", "nowhere"], "there is no folder nowhere"),
        (["evaluate", "--weights", ".", "--data", "nowhere"], "there is no folder nowhere of real"),
        (["evaluate", "--sets", "graff"], "unknown 'graff'"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    program: ModuleType, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        program.main(options)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def run_of(recipe: str, loss: float, fscore: float, *, poses: bool = False) -> dict:
    history = {"epoch": [1, 2], "seconds": [2.0, 2.0], "train/loss": [2 * loss, loss]}
    history |= {"train/coarse": [1.0, 0.5], "train/fine": [0.1, 0.1]}
    history |= {"val/fscore": [fscore / 2, fscore], "val/matches": [100.0, 210.0]}
    history |= {"val/auc10": [0.0, 50.0]} if poses else {}
    final = {"fscore": fscore, "matches": 210.0} | ({"auc10": 50.0} if poses else {})
    return {
        "recipe": recipe,
        "seed": 0,
        "epochs": 2,
        "fingerprint": "0" * 16,
        "data": "photos",
        "seconds": 90.0,
        "beside": 3,
        "final": final,
        "best": {"epoch": 2, "fscore": fscore},
        "history": history,
        "weights": {"sha256": f"of {recipe}", "bytes": 3 * 2**20, "epoch": 2},
        "session": ABOUT["date"],
    }


def row_of(recipe: str, errors: list[float | None], set_: str = "synthetic") -> dict:
    from quadtree_attention.tasks.match.metrics import auc

    infinite = [float("inf") if error is None else error for error in errors]
    areas = dict(zip(("5", "10", "20"), auc(infinite, (5, 10, 20)), strict=True))
    score = {"auc": areas, "median": None, "failed": errors.count(None)}
    trained = recipe != "sift"
    return {
        "recipe": recipe,
        "seed": 0 if trained else None,
        "weights": f"of {recipe}" if trained else None,
        "set": set_,
        "kind": "pose",
        "pairs": len(errors),
        "missing": 0,
        "matches": 210.0,
        "precision": 80.0,
        "median_seconds": 0.5,
        "estimators": {"opencv": score, "poselib": score},
        "errors": {"opencv": errors, "poselib": errors},
    }


@pytest.fixture
def result(tables: ModuleType) -> dict:
    """Made up: QuadTree-B leads linear, and is level with QuadTree-A; others are missing."""
    runs = [run_of("quadtree-b", 0.5, 60.0), run_of("linear", 0.7, 50.0)]
    runs += [run_of("quadtree-a", 0.5, 60.0), run_of("quadtree-b-k1", 0.6, 55.0)]
    ours = [1.0 + 0.1 * (i % 5) for i in range(20)]
    rows = [row_of("sift", [None] * 20), row_of("quadtree-b", ours)]
    rows += [row_of("linear", [3 * error for error in ours])]
    rows += [row_of("quadtree-a", [error + 0.1 * (-1) ** i for i, error in enumerate(ours)])]
    rows += [row_of("quadtree-b-k1", [2 * error for error in ours])]
    rows += [row_of("quadtree-b", [4.0, None], "scannet"), row_of("linear", [8.0, 3.0], "scannet")]
    measured = {"median_ms": 100.0, "q25_ms": 99.0, "q75_ms": 101.0, "repeats": 9}
    measured |= {"recipe": "quadtree-b", "params": 2_900_000, "peak_mib": 4321.0}
    measurement = ABOUT | {"batch": 8, "image": [384, 512], "precision": "b", "rows": [measured]}
    versions = ABOUT["versions"] | {"opencv": "4.13", "poselib": "2.0"}
    scenes = {"pairs": 20, "seed": 5, "height": 384, "width": 512, "textures": "others"}
    evaluation = ABOUT | {"versions": versions, "size": 640, "synthetic": scenes, "rows": rows}
    filled = {"seeds": [0], "sessions": [ABOUT], "runs": runs}
    result = tables.empty_result() | filled | {"measurement": measurement, "evaluation": evaluation}
    tables.check_result(result)
    return result


def test_tables_say_what_is_there_and_what_is_not(tables: ModuleType, result: dict) -> None:
    text = tables.markdown({"match-attentions--x": result})
    assert "### NVIDIA X: `match-attentions--x.json`" in text
    assert "textures of photos for 2 epochs, 4 runs, seeds 0." in text
    assert "| QuadTree-B (K 8) | 2.90 | 1 | 0.500 | 60.0 | 210 | 80.0 | 4321 |" in text
    missing = "not yet | not yet | not yet | not yet | not yet |"
    assert f"| full | not yet | 0 | {missing}" in text
    assert "- full, seed 0: not yet" in text and "scores of" not in text
    assert "| synthetic | linear (LoFTR) | 210 | 80.0 | " in text and "20 of 20 | 0.50 |" in text
    assert "| synthetic | SIFT | 210 | 80.0 | 0.0 / 0.0 / 0.0 | 0 of 20 |" in text
    assert "20 pairs of 384 x 512 of seed 5, textures of others" in text
    assert "weights in float16, up to 3.00 MiB" in text

    made_again = result["runs"][0]
    made_again["weights"] = made_again["weights"] | {"sha256": "other"}
    text = tables.markdown({"x": result})
    assert "| synthetic | QuadTree-B (K 8) |" not in text  # scores of weights that are gone
    assert "- scores of QuadTree-B (K 8), seed 0: not yet" in text


def test_order_is_claimed_only_where_pairs_decide_it(tables: ModuleType, result: dict) -> None:
    text = tables.markdown({"x": result})
    assert "On synthetic (20 pairs, AUC@10° with poselib) it has 8" in text
    behind, close = text.index("behind it: linear (LoFTR)"), text.index("call: QuadTree-A (K 8)")
    assert behind < close
    assert "too close to call: linear (LoFTR) (" in text[text.index("On scannet (2 pairs") :]
    assert "AUC@10° on synthetic rises with every step of K (K 1: " in text

    rows = tables.pooled(result)
    mean, error = tables.difference(rows["synthetic", "quadtree-b"], rows["synthetic", "linear"])
    # errors 1.0, 1.1, ... 1.4, four times each, against three times as much
    assert mean == pytest.approx(20 * 1.2, abs=1e-9)
    assert error == pytest.approx(20 * (0.02 * 20 / 19 / 20) ** 0.5, abs=1e-9)
    same = tables.difference(rows["synthetic", "linear"], rows["synthetic", "linear"])
    assert same == (0.0, 0.0)

    result["evaluation"]["rows"] = [row_of("linear", [3.0, 8.0])]
    assert "Whether that holds here cannot be told yet." in tables.markdown({"x": result})
    result["runs"] = []
    assert "No run has finished yet." in tables.markdown({"x": result})
    assert tables.markdown({}) == "Not measured yet."


def test_seeds_are_pooled(tables: ModuleType, result: dict) -> None:
    again = run_of("linear", 0.9, 40.0) | {"seed": 1}
    again["weights"] = again["weights"] | {"sha256": "of linear 1"}
    result["runs"].append(again)
    better = row_of("linear", [0.0] * 20) | {"seed": 1, "weights": "of linear 1"}
    result["evaluation"]["rows"].append(better)
    row = tables.pooled(result)["synthetic", "linear"]
    (first,) = [
        row for row in result["evaluation"]["rows"]
        if (row["recipe"], row["set"], row["seed"]) == ("linear", "synthetic", 0)
    ]  # fmt: skip
    assert tables.area(row) == pytest.approx((tables.area(first) + tables.area(better)) / 2)
    assert (row["pairs"], row["seeds"]) == (40, 2)
    ours = tables.pooled(result)["synthetic", "quadtree-b"]
    assert tables.difference(ours, row)[0] == pytest.approx((20 * 1.2 - 10 * 1.2) / 2)
    assert "| linear (LoFTR) | not yet | 2 | 0.800 | 45.0 |" in tables.markdown({"x": result})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(kind="attentions"), "expected 'match-attentions', schema 1"),
        (lambda r: r["runs"][0]["final"].pop("fscore"), r"runs\[0\].final must have the fields"),
        (lambda r: r["runs"][1]["weights"].pop("sha256"), r"runs\[1\].weights must have"),
        (lambda r: r["evaluation"]["rows"][1]["errors"]["opencv"].pop(), "has 19 pairs of 20"),
        (lambda r: r["evaluation"]["synthetic"].pop("seed"), "evaluation.synthetic must have"),
    ],
)
def test_other_files_are_refused(
    tables: ModuleType, result: dict, change: Callable[[dict], object], message: str
) -> None:
    result = json.loads(json.dumps(result))
    change(result)
    with pytest.raises(ValueError, match=message):
        tables.check_result(result)


def test_weights_of_other_runs_are_refused(
    program: ModuleType, result: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cv2", reason="scores need the extra 'models'")
    (tmp_path / "weights").mkdir()
    path = tmp_path / "match-attentions--x.json"
    path.write_text(json.dumps(result))
    command = ["evaluate", "--results", str(path), "--weights", str(tmp_path / "weights")]
    command += ["--sets", "synthetic"]
    assert program.main(command) == 2
    assert "there are no weights in" in capsys.readouterr().err
    (tmp_path / "weights" / "linear-s0.safetensors").write_bytes(b"others")
    assert program.main(command) == 2
    assert "linear-s0.safetensors holds weights of no run" in capsys.readouterr().err
    assert read(path) == result

    path.write_text('{"kind": "matching"}')
    assert program.main(command) == 2
    error = capsys.readouterr().err
    assert "is no result of this program" in error and error.count("\n") == 1


def test_page_takes_the_block(
    result: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import tables

    assert ROOT / "docs" / "results" / "matching-attentions.md" in tables.TARGETS
    page = tmp_path / "page.md"
    page.write_text("Words.\n\n<!-- generated: match-attentions -->\nold\n<!-- end generated -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "TARGETS", (page,))
    (tmp_path / "match-attentions--x.json").write_text(json.dumps(result))
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert "Words." in page.read_text() and "| QuadTree-A (K 8) |" in page.read_text()
    assert tables.main(["--check"]) == 0


def test_figures(tables: ModuleType, result: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.match_attention_figures import STYLES, draw_all, draw_areas, draw_curves

    assert sorted(STYLES) == sorted(tables.LABELS)
    loss, fscore = draw_curves(tables.compared_runs(result)).axes
    assert len(loss.lines) == len(fscore.lines) == 4
    line = next(line for line in fscore.lines if line.get_label() == "QuadTree-B (K 8)")
    assert list(line.get_ydata()) == [30.0, 60.0]
    synthetic, scannet = draw_areas(tables.pooled(result)).axes
    names = [text.get_text() for text in synthetic.get_yticklabels()]
    assert names[0] == "SIFT" and names[-1] == "QuadTree-B (K 8)" and len(names) == 5
    (line,) = [line for line in synthetic.lines if line.get_label() == "AUC@10°, poselib"]
    ours = tables.pooled(result)["synthetic", "quadtree-b"]
    assert line.get_xdata()[-1] == tables.area(ours) and list(line.get_ydata()) == [0, 1, 2, 3, 4]
    assert len(scannet.lines[0].get_xdata()) == 2
    assert all(path.stat().st_size > 10_000 for path in draw_all(result, tmp_path))

    result["runs"] = [run_of("linear", 0.5, 50.0, poses=True)]
    tables.check_result(result)
    assert len(draw_curves(tables.compared_runs(result)).axes) == 3
    nothing = tables.empty_result()
    assert draw_curves(tables.compared_runs(nothing)) is None and draw_areas({}) is None
