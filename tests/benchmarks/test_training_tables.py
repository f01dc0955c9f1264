# SPDX-License-Identifier: Apache-2.0
"""Tables, sentences and pictures of comparisons by training, from results that are made up."""

import pytest

from benchmarks.result import check, dumps
from benchmarks.tables.table import find
from benchmarks.tables.training import area, auc_difference, pooled, section
from benchmarks.training.comparison import comparisons
from quadtree_attention.tasks.match.metrics import auc
from tests.benchmarks.conftest import command, run_of, times

HISTORY = {"train/loss": [2.0, 1.0, 1.0], "val/loss": [1.5] * 3, "val/top5": [90.0] * 3}


def result_with(name: str, rows: list[dict], *runs: dict) -> dict:
    rows = [{"run": 0} | row for row in rows]
    result = {"schema": 2, "kind": f"training/{name}", "complete": True}
    result |= {"runs": list(runs) or [run_of(seeds=[0, 1], extra=[])], "rows": rows}
    check(result)
    return result


def run_row(recipe: str, seed: int, score: float, epochs: int = 3) -> dict:
    history = {"epoch": list(range(1, epochs + 1)), "seconds": [2.0] * epochs}
    history |= {name: [*column, *column[-1:] * (epochs - 3)] for name, column in HISTORY.items()}
    history["val/top1"] = [score - 9.0] * (epochs - 2) + [score + 1.0, score]
    values = {"seconds": 60.0, "beside": 6, "final": {"loss": 1.5, "top1": score, "top5": 90.0}}
    return {
        "kind": "run", "case": case_of(recipe, seed, epochs),
        "values": values | {"best": {"epoch": epochs - 1, "top1": score + 1.0}},
        "details": {"history": history},
    }  # fmt: skip


def case_of(recipe: str, seed: int = 0, epochs: int = 3) -> dict:
    case = {"recipe": recipe, "seed": seed, "epochs": epochs, "fingerprint": "0" * 16}
    return case | {"data": "photos"}


def step_row(recipe: str, ms: float) -> dict:
    values = {"params": 3_340_000, "macs": 620_000_000} | times(ms, 4321.0)
    return {"kind": "step", "run": 1, "case": {"recipe": recipe}, "values": values}


def attentions() -> dict:
    """QuadTree-B leads, some runs are missing, one failed."""
    rows = [run_row("quadtree-b", 0, 70.0), run_row("quadtree-b", 1, 71.0), run_row("sr", 0, 66.0)]
    rows += [run_row("window", 0, 69.5), run_row("quadtree-b-k1", 0, 68.0)]
    rows += [run_row("focal", 0, 99.0, epochs=4)]  # trained for longer: does not compare
    rows += [{"kind": "run", "case": case_of("linear"), "error": "…\nout of memory"}]
    rows += [step_row("quadtree-b", 100.0), step_row("sr", 50.0), step_row("quadtree-b-k1", 80.0)]
    rows += [{"kind": "step", "run": 1, "case": {"recipe": "linear"}, "error": "OutOfMemoryError"}]
    steps = run_of(batch=128, precision="bfloat16", image=[224, 224])
    return result_with("attentions", rows, run_of(seeds=[0, 1], extra=[]), steps)


def said(result: dict) -> str:
    return section("x", result)


def test_table_says_what_is_there_and_what_is_not():
    text = said(attentions())
    assert "### NVIDIA X\n" in text and "`benchmarks/results/x.json`" in text
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
    assert "up to 6 other runs at the same time" in text and "commit 0123456789ab." in text
    assert "Measured (training steps of 128 samples of 224 x 224, bfloat16)" in text


def test_memory_that_another_command_measured():
    result = attentions()
    command = "python -m benchmarks training attentions measure --memory-only"
    result["runs"].append(run_of(batch=128, precision="bfloat16") | {"command": command})
    memory = {"kind": "memory", "run": 2, "case": {"recipe": "sr"}, "values": {"peak_mib": 1234.0}}
    result["rows"].append(memory)
    check(result)
    text = said(result)
    assert "Memory: NVIDIA X." in text and command in text
    assert "| 2560 | 1234 |" in text and "| 1280 | 4321 |" in text


def test_order_is_claimed_only_where_it_holds():
    result = attentions()
    text = said(result)
    ours = "QuadTree-B (LePE, K 8) has top-1 70.5"
    close = "too close to call: shifted windows (Swin) (69.5)"
    behind = "behind it: spatial reduction (PVTv2) (66.0)"
    assert f"{ours}; ahead of it: none; {close}; {behind} (differences up to 1.5" in text
    assert "Not yet compared: spatial reduction + LePE" in text
    assert "top-1 increases monotonically with K (K 1: 68.0, K 8: 70.5)" in text

    result["rows"] += [{"run": 0} | run_row("sr-lepe", 0, 72.5)]
    result["rows"] += [{"run": 0} | run_row("quadtree-b-k4", 0, 67.5)]
    text = said(result)
    assert f"{ours}; ahead of it: spatial reduction + LePE (72.5); {close}" in text
    assert "does not increase monotonically with K" in text
    assert "Points of top-1 that LePE adds: spatial reduction (PVTv2) +6.5." in text
    result["rows"] += [{"run": 0} | run_row("quadtree-b-no-lepe", 0, 71.0)]
    assert "+6.5, QuadTree-B -0.5." in said(result)

    result["rows"] = [{"run": 0} | run_row("sr", 0, 66.0)]
    assert "There are not enough runs to test this yet." in said(result)
    assert "One seed each: the variance between seeds is unknown." in said(result)
    result["rows"] = []
    assert "No run has finished yet." in said(result) and "not enough runs" in said(result)


def test_runs_of_stereo_with_and_without_measured_steps():
    def row(recipe: str, seed: int, score: float) -> dict:
        names = ("good3", "epe_all", "epe_noc", "occlusion_iou", "occlusion_iou_both")
        history = {"epoch": [1, 2, 3], "seconds": [9.0, 2.0, 2.0], "train/loss": [1.0] * 3}
        history |= {f"val/{name}": [score] * 3 for name in names} | {"peak_mib": [None, 5.0, 7.0]}
        values = {"seconds": 60.0, "beside": 0, "final": dict.fromkeys(names, score)}
        values |= {"best": {"epoch": 1, "good3": score}}
        return {"kind": "run", "case": case_of(recipe, seed), "values": values,
                "details": {"history": history}}  # fmt: skip

    rows = [row("full", 0, 90.0), row("full", 1, 91.0), row("quadtree-b", 0, 90.4)]
    text = said(result_with("stereo-attentions", rows))
    assert "| full | 2 | 90.50 ± 0.50 |" in text and "| 1.000 ± 0.000 | 2.00 | 6.00 |" in text
    assert "| QuadTree-A | 0 | not yet |" in text and "s per epoch" in text
    assert "QuadTree-B (K 6) has within 3 px, % 90.40; ahead of it: none" in text
    assert "too close to call: full (90.50)" in text and "speed and memory" not in text
    rows.append(step_row("full", 50.0))
    text = said(result_with("stereo-attentions", rows, run_of(seeds=[0], extra=[]),
                            run_of(batch=4, precision="32-true")))  # fmt: skip
    assert "samples/s" in text and "s per epoch" not in text and "| 80.0 | 4321 |" in text
    assert "- speed and memory of QuadTree-A, QuadTree-B (K 6): not yet" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(kind="training"), "kind is 'training', expected one of"),
        (lambda r: r["rows"][0].pop("kind"), r"rows\[0\].kind must be run\|step"),
        (lambda r: r["rows"][0]["case"].pop("seed"), r"rows\[0\].case must have the keys"),
        (
            lambda r: r["rows"][1]["details"]["history"]["epoch"].pop(),
            r"ends with epoch \[2\] of 3",
        ),
        (
            lambda r: r["rows"][1]["details"]["history"]["seconds"].pop(),
            "seconds has 2 epochs of 3",
        ),
        (lambda r: r["runs"][1]["settings"].pop("batch"), r"runs\[1\].settings must have the keys"),
    ],
)
def test_other_files_are_refused(change, message):
    result = attentions()
    change(result)
    with pytest.raises(ValueError, match=message):
        check(result)


# ---- scores


def match_run(recipe: str, loss: float, fscore: float, *, poses: bool = False) -> dict:
    history = {"epoch": [1, 2], "seconds": [2.0, 2.0], "train/loss": [2 * loss, loss]}
    history |= {"train/coarse": [1.0, 0.5], "train/fine": [0.1, 0.1]}
    history |= {"val/fscore": [fscore / 2, fscore], "val/matches": [100.0, 210.0]}
    history |= {"val/auc10": [0.0, 50.0]} if poses else {}
    values = {"seconds": 90.0, "beside": 3, "final": {"fscore": fscore, "matches": 210.0}}
    weights = {"sha256": f"of {recipe}", "bytes": 3 * 2**20, "epoch": 2}
    return {
        "run": 0, "kind": "run", "case": case_of(recipe, epochs=2),
        "values": values | {"best": {"epoch": 2, "fscore": fscore}},
        "details": {"history": history, "weights": weights},
    }  # fmt: skip


def score_row(recipe: str, errors: list[float | None], set_: str = "synthetic") -> dict:
    infinite = [float("inf") if error is None else error for error in errors]
    areas = dict(zip(("5", "10", "20"), auc(infinite, (5, 10, 20)), strict=True))
    score = {"auc": areas, "median": None, "failed": errors.count(None)}
    trained = recipe != "sift"
    case = {"recipe": recipe, "seed": 0 if trained else None}
    values = {"truth": "pose", "pairs": len(errors), "missing": 0, "matches": 210.0}
    values |= {"precision": 80.0, "median_seconds": 0.5}
    return {
        "run": 2, "kind": "score",
        "case": case | {"weights": f"of {recipe}" if trained else None, "set": set_},
        "values": values | {"estimators": {"opencv": score, "poselib": score}},
        "details": {"errors": {"opencv": errors, "poselib": errors}},
    }  # fmt: skip


def match_result() -> dict:
    """QuadTree-B leads linear, and is level with QuadTree-A; others are missing."""
    ours = [1.0 + 0.1 * (i % 5) for i in range(20)]
    rows = [match_run("quadtree-b", 0.5, 60.0), match_run("linear", 0.7, 50.0)]
    rows += [match_run("quadtree-a", 0.5, 60.0), match_run("quadtree-b-k1", 0.6, 55.0)]
    rows += [step_row("quadtree-b", 100.0)]
    rows += [score_row("sift", [None] * 20), score_row("quadtree-b", ours)]
    rows += [score_row("linear", [3 * error for error in ours])]
    rows += [score_row("quadtree-a", [error + 0.1 * (-1) ** i for i, error in enumerate(ours)])]
    rows += [score_row("quadtree-b-k1", [2 * error for error in ours])]
    rows += [score_row("quadtree-b", [4.0, None], "scannet")]
    rows += [score_row("linear", [8.0, 3.0], "scannet")]
    scenes = {"pairs": 20, "seed": 5, "height": 384, "width": 512, "textures": "others"}
    runs = [run_of(seeds=[0], extra=[]), run_of(batch=8, precision="b", image=[384, 512])]
    return result_with("match-attentions", rows, *runs, run_of(size=640, synthetic=scenes))


def test_scores_say_what_is_there_and_what_is_not():
    result = match_result()
    text = said(result)
    assert "textures of photos for 2 epochs, 4 runs, seeds 0." in text
    assert "| QuadTree-B (K 8) | 3.34 | 1 | 0.500 | 60.0 | 210 | 80.0 | 4321 |" in text
    missing = "not yet | not yet | not yet | not yet | not yet |"
    assert f"| full | not yet | 0 | {missing}" in text
    assert "- full, seed 0: not yet" in text and "scores of" not in text
    assert "| synthetic | linear (LoFTR) | 210 | 80.0 | " in text and "20 of 20 | 0.50 |" in text
    assert "| synthetic | SIFT | 210 | 80.0 | 0.0 / 0.0 / 0.0 | 0 of 20 |" in text
    assert "20 pairs of 384 x 512 of seed 5, textures of others" in text
    assert "weights in float16, up to 3.00 MiB" in text

    result["rows"][0]["details"]["weights"]["sha256"] = "other"  # made again
    text = said(result)
    assert "| synthetic | QuadTree-B (K 8) |" not in text  # scores of weights that are gone
    assert "- scores of QuadTree-B (K 8), seed 0: not yet" in text


def test_order_is_claimed_only_where_pairs_decide_it():
    result = match_result()
    text = said(result)
    start = text.index("On synthetic (20 pairs) QuadTree-B (K 8) has AUC@10° (poselib) 8")
    close, behind = text.index("call: QuadTree-A (K 8)"), text.index("behind it: linear (LoFTR)")
    assert start < close < behind
    assert "too close to call: linear (LoFTR) (" in text[text.index("On scannet (2 pairs") :]
    assert "AUC@10° on synthetic increases monotonically with K (K 1: " in text

    rows = pooled(comparisons()["match-attentions"], result)
    ours = find(rows, {"set": "synthetic", "recipe": "quadtree-b"})
    linear = find(rows, {"set": "synthetic", "recipe": "linear"})
    mean, error = auc_difference(ours, linear)
    # errors 1.0, 1.1, ... 1.4, four times each, against three times as much
    assert mean == pytest.approx(20 * 1.2, abs=1e-9)
    assert error == pytest.approx(20 * (0.02 * 20 / 19 / 20) ** 0.5, abs=1e-9)
    assert auc_difference(linear, linear) == (0.0, 0.0)

    result["rows"] = [score_row("linear", [3.0, 8.0])]
    assert "There are not enough runs to test this yet." in said(result)
    assert "No run has finished yet." in said(result)


def test_seeds_are_pooled():
    result = match_result()
    again = match_run("linear", 0.9, 40.0)
    again["case"]["seed"] = 1
    again["details"]["weights"]["sha256"] = "of linear 1"
    better = score_row("linear", [0.0] * 20)
    better["case"] |= {"seed": 1, "weights": "of linear 1"}
    first = find(result["rows"], {"recipe": "linear", "set": "synthetic", "seed": 0})
    result["rows"] += [again, better]
    rows = pooled(comparisons()["match-attentions"], result)
    row = find(rows, {"set": "synthetic", "recipe": "linear"})
    assert area(row) == pytest.approx((area(first) + area(better)) / 2)
    assert (row["values"]["pairs"], row["values"]["seeds"]) == (40, 2)
    ours = find(rows, {"set": "synthetic", "recipe": "quadtree-b"})
    assert auc_difference(ours, row)[0] == pytest.approx((20 * 1.2 - 10 * 1.2) / 2)
    assert "| linear (LoFTR) | not yet | 2 | 0.800 | 45.0 |" in said(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["rows"][1]["details"]["weights"].pop("sha256"), "weights must have the keys"),
        (lambda r: r["rows"][6]["details"]["errors"]["opencv"].pop(), "opencv has 19 pairs of 20"),
        (lambda r: r["runs"][2]["settings"]["synthetic"].pop("seed"), "synthetic must have"),
    ],
)
def test_scores_that_are_not_right_are_refused(change, message):
    result = match_result()
    change(result)
    with pytest.raises(ValueError, match=message):
        check(result)


# ---- pictures


def test_figures_show_runs_means_and_names(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.training.figures import curves, topk

    comparison, result = comparisons()["attentions"], attentions()
    loss, accuracy = curves(comparison, result).axes
    assert len(loss.lines) == len(accuracy.lines) == 2 + 1 + 1 + 1  # two seeds, three means
    mean = next(line for line in accuracy.lines if line.get_label() == "QuadTree-B (LePE, K 8)")
    assert list(mean.get_ydata()) == [61.5, 71.5, 70.5]
    left, right = topk(comparison, result).axes
    assert list(left.lines[0].get_xdata()) == [1, 8]
    assert list(right.lines[0].get_ydata()) == [1600.0, 1280.0]
    path, out = tmp_path / "x.json", tmp_path / "pictures"
    path.write_text(dumps(result))
    assert command("training attentions figures", "--results", path, "--out", out) == 0
    names = sorted(picture.name for picture in out.iterdir())
    assert names == ["attentions-curves.png", "attentions-topk.png"]
    assert all(picture.stat().st_size > 10_000 for picture in out.iterdir())
    result["rows"] = [row for row in result["rows"] if row["kind"] == "run"]
    assert len(topk(comparison, result).axes) == 1
    result["rows"] = []
    assert curves(comparison, result) is None and topk(comparison, result) is None


def test_figures_of_matchers():
    pytest.importorskip("matplotlib")
    from benchmarks.training.figures import areas, curves, styles

    comparison, result = comparisons()["match-attentions"], match_result()
    assert len(set(styles(comparison, list(comparison.variants)).values())) == 7
    loss, fscore = curves(comparison, result).axes
    assert len(loss.lines) == len(fscore.lines) == 4
    line = next(line for line in fscore.lines if line.get_label() == "QuadTree-B (K 8)")
    assert list(line.get_ydata()) == [30.0, 60.0]
    synthetic, scannet = areas(comparison, result).axes
    names = [text.get_text() for text in synthetic.get_yticklabels()]
    assert names[0] == "SIFT" and names[-1] == "QuadTree-B (K 8)" and len(names) == 5
    (line,) = [line for line in synthetic.lines if line.get_label() == "AUC@10°, poselib"]
    ours = find(pooled(comparison, result), {"set": "synthetic", "recipe": "quadtree-b"})
    assert line.get_xdata()[-1] == area(ours) and list(line.get_ydata()) == [0, 1, 2, 3, 4]
    assert len(scannet.lines[0].get_xdata()) == 2

    result["rows"] = [match_run("linear", 0.5, 50.0, poses=True)]
    assert len(curves(comparison, result).axes) == 3
    result["rows"] = []
    assert curves(comparison, result) is None and areas(comparison, result) is None
