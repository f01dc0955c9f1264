# SPDX-License-Identifier: Apache-2.0
"""Tables, sentences and pictures of comparisons by training: committed results, changed."""

import copy

import pytest

from benchmarks.result import dumps
from benchmarks.tables import words
from benchmarks.tables.table import find
from benchmarks.tables.training import area, auc_difference, pooled, section
from benchmarks.training.comparison import comparisons
from tests.benchmarks.conftest import command, stored

ATTENTIONS, MATCH = "training/attentions", "training/match-attentions"


def row_of(result: dict, kind: str, recipe: str, **case) -> dict:
    """The first row of a variant."""
    rows = [row for row in result["rows"] if row["kind"] == kind]
    return find(rows, {"recipe": recipe, **case})


def fail(row: dict, error: str) -> None:
    row["error"] = error
    del row["values"]


def test_what_is_missing_or_failed_is_said():
    result = stored(ATTENTIONS)
    assert "Missing:" not in section("x", result)
    fail(row_of(result, "run", "linear", seed=0), "…\nout of memory")
    fail(row_of(result, "step", "focal"), "OutOfMemoryError")
    result["rows"].remove(row_of(result, "run", "sr", seed=1))
    row_of(result, "run", "window", seed=0)["case"]["epochs"] += 1  # does not compare
    for seed in (0, 1):
        result["rows"].remove(row_of(result, "run", "sr-lepe", seed=seed))
    lines = section("x", result).splitlines()
    start = lines.index("Missing:") + 2
    assert lines[start : lines.index("", start)] == [
        "- spatial reduction (PVTv2), seed 1: not yet",
        "- spatial reduction + LePE, seed 0: not yet",
        "- spatial reduction + LePE, seed 1: not yet",
        "- shifted windows (Swin), seed 0: not yet",
        "- linear, seed 0: failed: out of memory",
    ]
    table = {line.split(" | ")[0]: line.split(" | ") for line in lines if line.startswith("| ")}
    assert table["| focal"][-2:] == ["failed", "failed |"]
    assert table["| spatial reduction + LePE"].count("not yet") >= 3
    assert "Not yet compared: spatial reduction + LePE." in "".join(lines)

    result["rows"] = [row for row in result["rows"] if row["case"].get("seed") == 0]
    assert "One seed each: the variance between seeds is unknown." in section("x", result)
    result["rows"] = [row_of(result, "run", "sr")]
    assert "There are not enough runs to test this yet." in section("x", result)
    result["rows"] = []
    assert "No run has finished yet." in section("x", result)


def test_order_is_claimed_only_where_it_holds():
    scores = {"far": (8.0, 1.0), "near": (1.0, 1.0), "level": (-1.0, 1.0), "last": (-1.1, 1.0)}
    others = [words.Other(name, 70 + by, by, margin) for name, (by, margin) in scores.items()]
    assert words.verdict("ours", "top-1", 70.0, others, 1) == (
        "ours has top-1 70.0; ahead of it: far (78.0); too close to call: near (71.0), "
        "level (69.0); behind it: last (68.9)"
    )
    assert words.Other("a", 1.0, -0.25, 0, 0.125).text(2) == "a (1.00, -0.25 ± 0.12)"
    rises, falls = {1: 1.0, 4: 2.0, 8: 9.0}, {1: 1.0, 4: 3.0, 8: 2.0}
    assert (
        words.growth("AP", rises, 1, 0)
        == "AP increases monotonically with K (K 1: 1, K 4: 2, K 8: 9)."
    )
    told = "AP does not increase monotonically with K, and all values are within 2 (K 1: 1, "
    assert words.growth("AP", falls, 2, 0).startswith(told)
    assert words.gains("AP", {"a": (1.0, 7.5), "b": (2.0, 1.5)}, 1) == (
        "Points of AP that LePE adds: a +6.5, b -0.5."
    )


# ---- scores


def with_errors(row: dict, errors: list[float]) -> dict:
    """A row of scores with other errors of its pairs, and no pair but these."""
    row["details"] = {"errors": {"opencv": errors, "poselib": errors}}
    row["values"]["pairs"] = len(errors)
    return row


def test_differences_are_those_of_pairs_and_seeds():
    result = stored(MATCH)
    errors = [1.0 + 0.1 * (i % 5) for i in range(20)]  # 1.0, 1.1, ... 1.4, four times each
    ours = with_errors(row_of(result, "score", "quadtree-b", set="synthetic"), errors)
    linear = with_errors(
        row_of(result, "score", "linear", set="synthetic"), [3 * e for e in errors]
    )
    run = row_of(result, "run", "linear", seed=0)
    again, better = copy.deepcopy([run, linear])
    again["details"]["weights"]["sha256"] = better["case"]["weights"] = "again"
    again["case"]["seed"] = better["case"]["seed"] = 1
    with_errors(better, [0.0] * 20)["values"]["estimators"]["poselib"]["auc"]["10"] = 100.0

    def pooled_rows():
        rows = pooled(comparisons()["match-attentions"], result)
        return [find(rows, {"set": "synthetic", "recipe": x}) for x in ("quadtree-b", "linear")]

    first, second = pooled_rows()
    mean, error = auc_difference(first, second)
    assert mean == pytest.approx(20 * 1.2, abs=1e-9)
    assert error == pytest.approx(20 * (0.02 * 20 / 19 / 20) ** 0.5, abs=1e-9)
    assert auc_difference(second, second) == (0.0, 0.0)
    result["rows"] += [again, better]
    first, second = pooled_rows()
    assert area(second) == pytest.approx((area(linear) + 100) / 2)
    assert (second["values"]["pairs"], second["values"]["seeds"]) == (40, 2)
    assert auc_difference(first, second)[0] == pytest.approx((20 * 1.2 - 10 * 1.2) / 2)
    assert area(first) == area(ours)


def test_scores_of_weights_that_are_gone_are_left_out():
    result = stored(MATCH)
    line = "| synthetic | QuadTree-B (K 8) |"
    assert line in section("x", result) and "scores of" not in section("x", result)
    row_of(result, "run", "quadtree-b")["details"]["weights"]["sha256"] = "other"  # made again
    text = section("x", result)
    assert line not in text and "- scores of QuadTree-B (K 8), seed 0: not yet" in text


# ---- pictures


def test_figures_show_runs_means_and_names(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.training.figures import areas, curves, topk

    comparison, result = comparisons()["attentions"], stored(ATTENTIONS)
    _, accuracy = curves(comparison, result).axes
    label = comparison.label("quadtree-b")
    (mean,) = (line for line in accuracy.lines if line.get_label() == label)
    seeds = [row_of(result, "run", "quadtree-b", seed=seed) for seed in (0, 1)]
    last = [row["values"]["final"]["top1"] for row in seeds]
    assert mean.get_ydata()[-1] == pytest.approx(sum(last) / 2)
    left, right = topk(comparison, result).axes
    assert list(left.lines[0].get_xdata()) == list(right.lines[0].get_xdata()) == [1, 4, 8, 16]
    path, out = tmp_path / "x.json", tmp_path / "pictures"
    path.write_text(dumps(result))
    assert command("training attentions figures", "--results", path, "--out", out) == 0
    assert sorted(picture.name for picture in out.iterdir()) == sorted(comparison.pictures)

    match, scores = comparisons()["match-attentions"], stored(MATCH)
    synthetic, scannet = areas(match, scores).axes
    names = [text.get_text() for text in synthetic.get_yticklabels()]
    assert names[0] == "SIFT" and names[-1] == match.label("quadtree-b")
    (line,) = (line for line in synthetic.lines if line.get_label() == "AUC@10°, poselib")
    ours = find(pooled(match, scores), {"set": "synthetic", "recipe": "quadtree-b"})
    assert line.get_xdata()[-1] == area(ours) and len(scannet.lines) == len(synthetic.lines)
    for empty in (result, scores):
        empty["rows"] = []
    assert curves(comparison, result) is topk(comparison, result) is areas(match, scores) is None
