# SPDX-License-Identifier: Apache-2.0
"""Attentions compared by training: the runs, the file they grow, its table and its pictures."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")
pytest.importorskip("timm")
yaml = pytest.importorskip("yaml")

from tests.conftest import ROOT  # noqa: E402

RECIPE = {
    "seed_everything": 0,
    "model": {
        "model": "test_quadtree",
        "lr": 0.2,
        "warmup_epochs": 0,
        "drop_path": 0.0,
        "mixup": 0.0,
        "cutmix": 0.0,
    },
    "data": {
        "source": "generated",
        "generated_count": 32,
        "generated_classes": 2,
        "image_size": 32,
        "stored_size": 32,
        "batch_size": 16,
        "augment": "batch",
        "eval_crop": 1.0,
    },
    "trainer": {"max_epochs": 1, "accelerator": "cpu"},
}
OWN = ("model", "options")  # where a recipe says which attention
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
def attentions() -> ModuleType:
    from benchmarks import attentions

    return attentions


@pytest.fixture
def tables() -> ModuleType:
    from benchmarks import attention_tables

    return attention_tables


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import attention_runs

    monkeypatch.setattr(attention_runs, "TRAIN", PRETEND)


@pytest.fixture
def recipes(tmp_path: Path) -> Callable[..., Path]:
    """Writes recipes by their names into a folder; returns the folder."""

    def write(**changes: dict) -> Path:
        folder = tmp_path / "recipes"
        folder.mkdir(exist_ok=True)
        for name, change in changes.items():
            content = {key: RECIPE[key] | change.get(key, {}) for key in ("model", "data")}
            text = "# a comment\n" + yaml.safe_dump(RECIPE | content)
            (folder / f"tiny20-{name}.yaml").write_text(text)
        return folder

    return write


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_training_end_to_end(
    attentions: ModuleType,
    tables: ModuleType,
    recipes: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    linear = {"model": {"options": {"attention": "linear"}}}
    folder = recipes(ours={}, linear=linear, broken={"data": {"imge_size": 32}})
    out = tmp_path / "new" / "result.json"
    command = ["train", "--folder", str(folder), "--seeds", "3", "--jobs", "2", "--out", str(out)]
    assert attentions.main(command) == 1

    result = read(out)
    tables.check_result(result)
    assert sorted(run["recipe"] for run in result["runs"]) == ["linear", "ours"]
    for run in result["runs"]:
        assert (run["seed"], run["epochs"]) == (3, 1)
        assert run["final"]["top1"] == run["best"]["top1"] == run["history"]["val/top1"][-1]
        assert run["seconds"] > run["history"]["seconds"][0] > 0
    # The first two start together; whether the third meets one of them is up to the machine.
    assert {run["recipe"]: run["beside"] for run in result["runs"]}["linear"] == 1
    (failure,) = result["failures"]
    assert failure["recipe"] == "broken"
    assert "did you mean data.image_size?" in "\n".join(failure["lines"])
    assert str(ROOT) not in out.read_text() and str(tmp_path) not in out.read_text()
    progress = capsys.readouterr().err
    assert "[3/3]" in progress and "broken seed 3: failed" in progress

    before = out.read_text()
    assert attentions.main([*command, "--recipes", "ours,linear"]) == 0  # nothing is left to do
    assert out.read_text() == before


@pytest.mark.usefixtures("pretend")
def test_only_what_changed_is_trained_again(
    attentions: ModuleType, recipes: Callable[..., Path], tmp_path: Path
) -> None:
    folder = recipes(a={}, b={}, debug={})
    out = tmp_path / "result.json"
    work, data = tmp_path / "kept", tmp_path / "photos"
    command = ["train", "--folder", str(folder), "--work", str(work), "--out", str(out)]
    command += ["--data", str(data), "--jobs", "4"]
    assert attentions.main(command) == 0
    runs = read(out)["runs"]
    assert sorted((run["recipe"], run["seed"]) for run in runs) == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1),
    ]  # fmt: skip
    assert {run["data"] for run in runs} == {"photos"} and str(tmp_path) not in out.read_text()
    assert "--data photos" in read(out)["sessions"][0]["command"]
    assert max(run["beside"] for run in runs) == 3
    assert (work / "a-s1" / "history.csv").exists()

    recipes(a={"model": {"lr": 0.1}})
    (folder / "tiny20-b.yaml").write_text(
        "# other words\n" + (folder / "tiny20-b.yaml").read_text()
    )
    assert attentions.main([*command, "--seeds", "0"]) == 0
    again = read(out)["runs"]
    assert [run["recipe"] for run in again] == ["b", "b", "a"]  # seed 1 of the old a is gone too
    assert [run["fingerprint"] == runs[0]["fingerprint"] for run in again][-1] is False

    assert attentions.main([*command, "--seeds", "1", "--recipes", "a", "--epochs", "3"]) == 0
    (run,) = [run for run in read(out)["runs"] if run["recipe"] == "a"]
    assert run["history"]["epoch"] == [1, 2, 3]
    assert run["final"]["top1"] == 48 and run["best"] == {"epoch": 1, "top1": 50.0}


@pytest.mark.usefixtures("pretend")
def test_failures_stop_nothing_and_are_forgotten_when_mended(
    attentions: ModuleType,
    recipes: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from benchmarks import attention_runs

    folder, out = recipes(diverged={}, fine={}, killed={}, mute={}), tmp_path / "result.json"
    command = ["train", "--folder", str(folder), "--seeds", "0", "--out", str(out)]
    assert attentions.main(command) == 1
    result = read(out)
    assert [run["recipe"] for run in result["runs"]] == ["fine"]
    reasons = {failure["recipe"]: failure["lines"] for failure in result["failures"]}
    assert reasons["killed"] == ["train.npz is not there"]
    assert reasons["mute"] == ["exit code -9"]
    assert "val/loss is not finite" in reasons["diverged"][-1]
    assert "/home/someone/data/train.npz" in capsys.readouterr().err

    monkeypatch.setattr(attention_runs, "TRAIN", PRETEND.replace("killed", "nobody"))
    assert attentions.main([*command, "--recipes", "killed"]) == 0
    assert [failure["recipe"] for failure in read(out)["failures"]] == [
        "diverged", "mute",
    ]  # fmt: skip


@pytest.mark.usefixtures("pretend")
def test_time_limit(
    attentions: ModuleType,
    recipes: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = recipes(slow={}, quick={}), tmp_path / "result.json"
    command = ["train", "--folder", str(folder), "--seeds", "0", "--jobs", "2", "--out", str(out)]
    assert attentions.main([*command, "--time-limit", "0"]) == 0
    assert not out.exists()
    assert "not finished: slow seed 0" in capsys.readouterr().err

    began = time.monotonic()
    assert attentions.main([*command, "--time-limit", "8"]) == 0
    assert time.monotonic() - began < 45  # the slow one would take 60
    assert [run["recipe"] for run in read(out)["runs"]] == ["quick"]
    assert read(out)["failures"] == []
    printed = capsys.readouterr()
    assert "not finished: slow seed 0" in printed.err
    assert "1 of 2 runs are in" in printed.out and "repeat the command" in printed.out


@pytest.mark.usefixtures("pretend")
def test_what_would_not_be_ready_is_not_started(
    attentions: ModuleType, recipes: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = recipes(a={}, b={}), tmp_path / "result.json"
    command = ["train", "--folder", str(folder), "--out", str(out)]
    assert attentions.main([*command, "--seeds", "0"]) == 0
    result = read(out)
    result["runs"][0]["seconds"] = 1000.0
    out.write_text(json.dumps(result))
    assert attentions.main([*command, "--seeds", "1", "--time-limit", "30"]) == 0
    assert [(run["recipe"], run["seed"]) for run in read(out)["runs"]] == [
        ("a", 0), ("b", 0), ("b", 1),
    ]  # fmt: skip


def test_measure_counts_and_times(
    attentions: ModuleType, tables: ModuleType, recipes: Callable[..., Path], tmp_path: Path
) -> None:
    broken = {"model": {"options": {"lepee": True}}}
    folder, out = recipes(ours={}, broken=broken), tmp_path / "result.json"
    small = ["--batch=2", "--image=32", "--seconds-per-row=0.01", "--device=cpu", "--threads=1"]
    assert attentions.main(["measure", "--folder", str(folder), "--out", str(out), *small]) == 1
    result = read(out)
    tables.check_result(result)
    broken, ours = result["measurement"]["rows"]
    assert ours["params"] > 0 and ours["macs"] > 0 and ours["median_ms"] > 0
    assert "lepee" in broken["error"]
    assert result["runs"] == [] and result["measurement"]["batch"] == 2


def test_recipes_differ_in_the_attention_alone(attentions: ModuleType, tables: ModuleType) -> None:
    from benchmarks.attention_runs import find_recipes

    found = find_recipes(ROOT / "recipes" / "classify", attentions.SUITE)
    assert tuple(recipe.name for recipe in found) == tables.ORDER
    assert sorted(tables.ORDER) == sorted(tables.LABELS)
    common = []
    for recipe in found:
        settings = {k: v for k, v in recipe.content["model"].items() if k not in OWN}
        common.append(recipe.content | {"model": settings})
    assert all(settings == common[0] for settings in common)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train", "--recipes", "sr,winodw"], "there is no recipe 'winodw'"),
        (["train", "--folder", "nowhere"], "there are no recipes tiny20-*.yaml in nowhere"),
        (["train", "--jobs", "0"], "must be at least 1, got 0"),
        (["measure", "--out", "."], ". is a directory"),
        (["measure", "--memory-only", "--device", "cpu"], "only the memory of a GPU is measured"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    attentions: ModuleType, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        attentions.main(options)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


ABOUT = {
    "command": "python -m benchmarks.attentions train",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "device": "cuda",
    "machine": {"device_name": "NVIDIA X", "cpu": "Y", "cores": 8, "threads": 1, "load": 0.5},
    "versions": {
        "python": "3.12.0",
        "torch": "2.11.0",
        "cuda": "13.0",
        "triton": "3.6.0",
        "numba": None,
        "quadtree_attention": "0.1.0",
        "timm": "1.0",
        "pytorch_lightning": "2.6.6",
    },
}


def run_of(recipe: str, seed: int, score: float, epochs: int = 3) -> dict:
    scores = [score - 9.0] * (epochs - 2) + [score + 1.0, score]
    history = {"epoch": list(range(1, epochs + 1)), "seconds": [2.0] * epochs}
    history |= {"train/loss": [2.0, *[1.0] * (epochs - 1)], "val/loss": [1.5] * epochs}
    history |= {"val/top1": scores, "val/top5": [90.0] * epochs}
    return {
        "recipe": recipe,
        "seed": seed,
        "epochs": epochs,
        "fingerprint": "0" * 16,
        "data": "photos",
        "seconds": 60.0,
        "beside": 6,
        "final": {"loss": 1.5, "top1": score, "top5": 90.0},
        "best": {"epoch": epochs - 1, "top1": score + 1.0},
        "history": history,
        "session": ABOUT["date"],
    }


def row_of(recipe: str, ms: float) -> dict:
    times = {"median_ms": ms, "q25_ms": ms, "q75_ms": ms, "repeats": 9, "peak_mib": 4321.0}
    return {"recipe": recipe, "params": 3_340_000, "macs": 620_000_000, **times}


@pytest.fixture
def result(tables: ModuleType) -> dict:
    """Made up: QuadTree-B leads, some runs are missing, one failed."""
    runs = [run_of("quadtree-b", 0, 70.0), run_of("quadtree-b", 1, 71.0), run_of("sr", 0, 66.0)]
    runs += [run_of("window", 0, 69.5), run_of("quadtree-b-k1", 0, 68.0)]
    runs += [run_of("focal", 0, 99.0, epochs=4)]  # trained for longer: does not compare
    failure = {key: run_of("linear", 0, 0.0)[key] for key in ("recipe", "seed", "epochs")}
    failure |= {"fingerprint": "0", "lines": ["…", "out of memory"], "session": ABOUT["date"]}
    rows = [row_of("quadtree-b", 100.0), row_of("sr", 50.0), row_of("quadtree-b-k1", 80.0)]
    rows.append({"recipe": "linear", "error": "OutOfMemoryError"})
    measurement = ABOUT | {"batch": 128, "image": 224, "precision": "bfloat16", "rows": rows}
    filled = {"seeds": [0, 1], "sessions": [ABOUT], "runs": runs, "failures": [failure]}
    result = tables.empty_result() | filled | {"measurement": measurement}
    tables.check_result(result)
    return result


def test_table_says_what_is_there_and_what_is_not(tables: ModuleType, result: dict) -> None:
    text = tables.markdown({"attentions--x": result})
    assert "### NVIDIA X: `attentions--x.json`" in text
    assert "Trained on photos for 3 epochs, 5 runs, seeds 0, 1." in text
    assert "about ±1.5 points of sampling noise" in text
    counted, missing = "| 3.34 | 0.62 |", "not yet | not yet | not yet"
    numbers = f"{counted} 2 | 70.5 ± 0.5 | 71.5 ± 0.5 | 1.000 | 1280 | 4321 |"
    assert f"| QuadTree-B (LePE, K 8) {numbers}" in text
    numbers = f"{counted} 1 | 66.0 | 67.0 | 1.000 | 2560 | 4321 |"
    assert f"| spatial reduction (PVTv2) {numbers}" in text
    assert f"| focal | not yet | not yet | 0 | {missing} | not yet | not yet |" in text
    assert f"| linear | failed | failed | 0 | {missing} | failed | failed |" in text
    assert "- linear, seed 0: failed: out of memory" in text
    assert "- spatial reduction (PVTv2), seed 1: not yet" in text
    assert "- QuadTree-B (LePE, K 8), seed" not in text
    assert "up to 6 others beside a run" in text and "commit 0123456789ab." in text
    assert "    python -m benchmarks.attentions train" in text


def test_memory_that_another_command_measured(tables: ModuleType, result: dict) -> None:
    measurement = result["measurement"]
    about = {name: value for name, value in measurement.items() if name != "rows"}
    memory = about | {"command": "python -m benchmarks.attentions measure --memory-only"}
    result["measurement"] = measurement | {"memory": memory}
    tables.check_result(result)
    text = tables.markdown({"attentions--x": result})
    assert "Memory, by itself: NVIDIA X." in text and memory["command"] in text


@pytest.mark.gpu
def test_memory_is_added_to_speed(
    attentions: ModuleType, recipes: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    small = ["--batch=2", "--image=32", "--folder", str(recipes(ours={})), "--out", str(out)]
    assert attentions.main(["measure", "--memory-only", *small]) == 2  # nothing to add it to
    assert attentions.main(["measure", "--seconds-per-row=0.01", *small]) == 0
    before = read(out)["measurement"]["rows"]
    assert attentions.main(["measure", "--memory-only", *small]) == 0
    (row,) = read(out)["measurement"]["rows"]
    assert row["median_ms"] == before[0]["median_ms"] and row["peak_mib"] > 0


def test_order_is_claimed_only_where_it_holds(tables: ModuleType, result: dict) -> None:
    def said() -> str:
        return tables.markdown({"x": result})

    assert "That holds here: it has 70.5, the next is shifted windows (Swin) (69.5)." in said()
    assert "too close to call: shifted windows (Swin) (69.5)." in said()
    assert "Not yet compared: spatial reduction + LePE" in said()
    assert "top-1 rises with every step of K (K 1: 68.0, K 8: 70.5)" in said()

    result["runs"] += [run_of("sr-lepe", 0, 72.5), run_of("quadtree-b-k4", 0, 67.5)]
    assert "That holds" not in said()
    assert "That does not hold here: not behind its 70.5 are spatial reduction + " in said()
    assert "does not rise with every step of K" in said()
    assert "Points of top-1 that LePE adds: spatial reduction (PVTv2) +6.5." in said()
    result["runs"].append(run_of("quadtree-b-no-lepe", 0, 71.0))
    assert "+6.5, QuadTree-B -0.5." in said()

    result["runs"] = [run_of("sr", 0, 66.0)]
    assert "Whether that holds here cannot be told yet." in said()
    result["runs"] = []
    assert "No run has finished yet." in said() and "cannot be told yet" in said()
    assert tables.markdown({}) == "Not measured yet."


def test_epochs_that_were_not_validated_are_left_out(tmp_path: Path) -> None:
    from benchmarks.attention_runs import read_history
    from benchmarks.attentions import SUITE

    path = tmp_path / "history.csv"
    head = "epoch,seconds,val/loss,val/top1,val/top5,train/loss"
    rows = ["1,0.5,,,,2.0", "2,0.75,1.5,50,90,1.25", "3,0.5,,,,1.0", "4,0.75,1.25,60,95,0.75"]
    path.write_text("\n".join([head, *rows]))
    history = read_history(path, 4, SUITE)
    assert history["epoch"] == [2, 4] and history["val/top1"] == [50, 60]
    assert history["train/loss"] == [1.25, 0.75]
    path.write_text("\n".join([head, *rows[:3]]))
    with pytest.raises(ValueError, match="no val/top1 of its last epoch"):
        read_history(path, 3, SUITE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(kind="model-times"), "expected 'attentions', schema 1"),
        (lambda r: r["runs"][0].pop("seed"), r"runs\[0\] must have the fields"),
        (lambda r: r["runs"][1]["history"]["epoch"].pop(), r"ends with epoch \[2\] of 3"),
        (lambda r: r["runs"][1]["history"]["seconds"].pop(), "history.seconds has 2 of 3 epochs"),
        (lambda r: r["runs"][0]["final"].update(top1="70"), "final.top1 must be"),
        (lambda r: r["measurement"].pop("batch"), "measurement must have the fields"),
    ],
)
def test_other_files_are_refused(
    tables: ModuleType, result: dict, change: Callable[[dict], object], message: str
) -> None:
    result = json.loads(json.dumps(result))
    change(result)
    with pytest.raises(ValueError, match=message):
        tables.check_result(result)


def test_outdated_page_is_refused(
    result: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import tables

    assert ROOT / "docs" / "results" / "attentions.md" in tables.TARGETS
    page = tmp_path / "attentions.md"
    page.write_text("Words.\n\n<!-- generated: attentions -->\nold\n<!-- end generated -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "TARGETS", (page,))
    (tmp_path / "attentions--x.json").write_text(json.dumps(result))
    assert tables.main(["--check"]) == 1
    assert "old" in page.read_text()
    assert tables.main([]) == 0
    assert "Words." in page.read_text() and "| focal |" in page.read_text()
    assert tables.main(["--check"]) == 0


def test_page_is_up_to_date() -> None:
    from benchmarks import tables

    assert tables.main(["--check"]) == 0


def test_figures(attentions: ModuleType, tables: ModuleType, result: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "attentions--x.json", tmp_path / "pictures"
    path.write_text(json.dumps(result))
    assert attentions.main(["figures", "--results", str(path), "--out", str(out)]) == 0
    names = sorted(picture.name for picture in out.iterdir())
    assert names == ["attentions-curves.png", "attentions-topk.png"]
    assert all(picture.stat().st_size > 10_000 for picture in out.iterdir())


def test_figures_show_runs_means_and_names(tables: ModuleType, result: dict) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.attention_figures import STYLES, draw_curves, draw_topk

    assert sorted(STYLES) == sorted(tables.COMPARED)
    runs = tables.compared_runs(result)
    loss, accuracy = draw_curves(runs).axes
    assert len(loss.lines) == len(accuracy.lines) == 2 + 1 + 1 + 1  # two seeds, three means
    mean = next(line for line in accuracy.lines if line.get_label() == "QuadTree-B (LePE, K 8)")
    assert list(mean.get_ydata()) == [61.5, 71.5, 70.5]
    left, right = draw_topk(runs, result["measurement"]).axes
    assert list(left.lines[0].get_xdata()) == [1, 8]
    assert list(right.lines[0].get_ydata()) == [1600.0, 1280.0]
    assert len(draw_topk(runs, None).axes) == 1
    nothing = tables.compared_runs(tables.empty_result())
    assert draw_curves(nothing) is None and draw_topk(nothing, None) is None
