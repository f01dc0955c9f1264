# SPDX-License-Identifier: Apache-2.0
"""Tables from results: what cells show, what is not measured, and the pages in docs/."""

import pytest

from benchmarks.result import KINDS, ResultFileError, dumps
from benchmarks.tables import summary, views, write
from benchmarks.tables.table import number
from tests.benchmarks.conftest import command, result_of, times

STAGES = ["CNN", "transformer", "coarse matching", "fine"]


def section(result: dict, name: str = "x") -> str:
    return views.section(name, result)


def test_numbers():
    shown = [number(value) for value in (None, 1234.5, 12.34, 1.234, 0.0123)]
    assert shown == ["-", "1234", "12.3", "1.23", "0.012"]


def test_attention_shows_losses_and_gaps():
    def row(implementation: str, name: str, **outcome) -> dict:
        case = {"case": "tiny", "implementation": implementation, "dtype": "float32"}
        return {"case": case | {"pass": name, "mode": "eager"}, **outcome}

    def measured(ms: float) -> dict:
        return {"values": times(ms) | {"backend": None}}

    result = result_of(
        "speed/ops",
        row("quadtree", "forward", **measured(10.0)),
        row("sdpa", "forward", **measured(4.0)),
        row("quadtree", "forward+backward", **measured(30.0)),
        row("sdpa", "forward+backward", skipped="estimated 99 s for one run, limit 60 s"),
        variant="B",
    )
    text = section(result)
    assert "| tiny | float32 | eager | 10.0 / 30.0 | 1.50 / 1.50 | 4.00 / - |" in text
    assert "| 0.40x / - |" in text and "\nVariant B.\n" in text
    assert "CPU Y, 8 cores, 1 used, load 0.50" in text
    assert "- tiny, sdpa, float32, forward+backward, eager: skipped: estimated 99 s" in text
    assert "2030-01-02, commit 0123456789ab." in text


def test_backbones_show_losses_and_gaps():
    def row(model: str, name: str, precision: str, **outcome) -> dict:
        baseline = "pvt_v2_b0" if "quadtree" in model else None
        case = {"task": "backbone", "model": model, "baseline": baseline, "pass": name,
                "images": [1, 3, 800, 1344], "mode": "graph", "precision": precision}  # fmt: skip
        return {"case": case, **outcome}

    result = result_of(
        "speed/backbones",
        row("quadtree_b_b0", "forward", "bfloat16", values=times(10.0, 30.0)),
        row("pvt_v2_b0", "forward", "bfloat16", values=times(4.0, 20.0)),
        row("quadtree_b_b0", "training", "bfloat16 autocast", values=times(30.0, 90.0)),
        row("pvt_v2_b0", "training", "bfloat16 autocast", error="RuntimeError: no"),
    )
    text = section(result)
    start = "| 1 x 3 x 800 x 1344 | graph | bfloat16 / bfloat16 autocast |"
    assert f"{start} quadtree_b_b0 | 10.0 / 30.0 | 30.0 / 90.0 | pvt_v2_b0 | 0.40x / - |" in text
    assert "| 1.50x / - |" in text and f"{start} pvt_v2_b0 | 4.00 / - | 20.0 / - | - |" in text
    assert "1x3x800x1344, graph, bfloat16 autocast: failed: RuntimeError: no" in text


def test_matchers_show_stages_and_failures():
    def row(attention: str = "quadtree_b", **outcome) -> dict:
        case = {"model": "m", "attention": attention, "image": [2048, 1024], "matches": 2000}
        return {"case": case | {"precision": "float32"}, **outcome}

    ms = dict(zip([*STAGES, "attention"], [30.0, 20.0, 40.0, 5.0, 12.5], strict=True))
    mib = dict(zip(STAGES, [4000.0, 3000.0, 2000.0, 1000.0], strict=True))
    values = {"median_ms": 100.0, "q25_ms": 90.0, "q75_ms": 120.0, "repeats": 3, "peak_mib": 4000.0}
    rows = [row(values=values | {"stages_ms": ms, "stages_mib": mib})]
    rows += [row("full", error="out of memory"), row("linear", error="RuntimeError: no")]
    lines = section(result_of("speed/matchers", *rows, memory_gib=8.0)).splitlines()
    assert lines[0] == "### NVIDIA X" and "`benchmarks/results/x.json`" in lines
    assert "PyTorch was given 8.00 GiB of the GPU." in lines
    start = "| 2048x1024 | m | float32 |"
    shown = f"{start} quadtree_b | 100 | 90.0 - 120 | 30.0 | 20.0 | 12.5 | 40.0 | 5.00 |"
    memory = f"{start} quadtree_b | 4000 | 4000 | 3000 | 2000 | 1000 |"
    assert lines.index(shown) < lines.index("#### Peak memory in MiB") < lines.index(memory)
    assert f"{start} full | out of memory | - | - | - | - | - | - |" in lines
    assert f"{start} full | out of memory | - | - | - | - |" in lines
    assert f"{start} linear | failed | - | - | - | - |" in lines
    assert "- m, linear, 2048x1024, 2000, float32: failed: RuntimeError: no" in lines
    unknown = row(values=values | {"stages_ms": ms, "peak_mib": None})
    text = section(result_of("speed/matchers", unknown, memory_gib=None))
    assert f"{start} quadtree_b | - | - | - | - | - |" in text


def test_stereo_shows_counts_of_failures_and_the_paper():
    def row(network: str, name: str = "forward", **outcome) -> dict:
        case = {"network": network, "image": [960, 540], "pass": name, "precision": "float32"}
        return {"case": case, **outcome}

    counts = {"params": 5, "macs": 415 * 10**9, "attention_macs": 113 * 10**9}
    rows = [
        row("explicit-3", values=counts | times(78.0)),
        row("full-3", values=times(5.0) | counts),
    ]
    rows += [row("quadtree-2", "training", values=counts, error="out of memory")]
    text = section(result_of("speed/stereo", *rows))
    assert (
        "scores held, 1/3 | 415 | 113 | 78.0 | 78.0 - 78.0 | 1.50 | 490 GFLOPs, 8507 MB |" in text
    )
    assert "| QuadTree-B, 1/2 | 415 | 113 | out of memory | - | - | - |" in text
    assert "full attention, fused, 1/3 | 415 | 113 | 5.00 | 5.00 - 5.00 | 1.50 | - |" in text


def match_row(truth: str, areas: dict, **case) -> dict:
    score = {"auc": areas, "median": None, "failed": 1}
    pairs = [
        {"name": "a", "matches": 24, "precision": 66.6, "errors": {"opencv": 4.0, "poselib": 20.5}},
        {"name": "b", "matches": 0, "precision": 0.0, "errors": {"opencv": None, "poselib": None}},
    ]
    values = {"truth": truth, "pairs": 2, "missing": 0, "matches": 12.0, "precision": 33.333}
    values |= {"median_seconds": 0.5, "estimators": {"opencv": score, "poselib": score}}
    return {"case": case, "values": values, "details": {"settings": {}, "pairs": pairs}}


def test_matching():
    pose = match_row("pose", {"5": 10.0, "10": 40.0, "20": 60.5}, set="scannet", method="SIFT")
    plane = match_row("homography", {"3": 1.0, "5": 2.0, "10": 3.25}, set="graf", method="mine")
    methods = {
        "SIFT": {"images": "full size, grey"},
        "mine": {"model": "loftr_quadtree_small", "weights_sha256": "0123456789abcd", "x": None},
    }
    lines = section(result_of("quality/matching", pose, plane, methods=methods)).splitlines()
    assert "- SIFT: images full size, grey" in lines  # only checksums are cut
    assert "- mine: model loftr_quadtree_small, weights sha256 0123456789ab" in lines
    assert (
        "| scannet | SIFT | 12 | 33.3 | 10.0 / 40.0 / 60.5 | 1 of 2 | 10.0 / 40.0 / 60.5 | 0 of 2 "
        "| 0.50 |"
    ) in lines
    (head,) = (line for line in lines if "px" in line)
    assert "poselib AUC@3/5/10 px" in head and lines.index(head) > lines.index("#### Homographies")
    assert (
        "| graf | mine | 12 | 33.3 | 1.0 / 2.0 / 3.2 | 1 of 2 | 1.0 / 2.0 / 3.2 | 0 of 2 | 0.50 |"
    ) in lines
    for change, message in (
        (lambda row: row["values"].update(pairs=3), "details.pairs has 2 pairs of 3"),
        (lambda row: row["values"]["estimators"]["opencv"]["auc"].pop("5"), "auc must have"),
        (lambda row: row["values"].update(truth="flow"), "truth must be pose.homography"),
    ):
        bad = match_row("pose", {"5": 10.0, "10": 40.0, "20": 60.5}, set="scannet", method="SIFT")
        change(bad)
        with pytest.raises(ValueError, match=message):
            result_of("quality/matching", bad, methods={})


def test_stereo_scores():
    names = KINDS["quality/stereo"]["values"]["mean"]
    scores = dict.fromkeys(names, 1.25) | {"occlusion_iou": None}
    of_pair = scores | {"epe_all": 2.5, "d1_all": 30.0}
    pairs = [{"name": name, "scores": of_pair, "seconds": 0.5} for name in ("a", "b")]
    values = {"pairs": 2, "median_seconds": 0.5, "mean": scores | {"occlusion_iou": 0.625}}
    rows = [{"case": {"method": method}, "values": values, "details": {"pairs": pairs}}
            for method in ("SGBM", "mine")]  # fmt: skip
    result = result_of("quality/stereo", *rows, methods={"SGBM": {"block": 3}})
    lines = section(result).splitlines()
    assert "- SGBM: block 3" in lines
    assert "| SGBM | 1.25 | 1.25 | 1.25 | 1.25 | 1.25 | 1.25 | 0.62 | 0.50 |" in lines
    assert "| a | 2.50 | 1.25 | 30.00 | 2.50 | 1.25 | 30.00 |" in lines
    (head,) = (line for line in lines if line.startswith("| pair |"))
    assert head.count("SGBM") == head.count("mine") == 3
    rows[0]["details"] = {"pairs": pairs[:1]}
    with pytest.raises(ValueError, match=r"details.pairs has 1 pairs of 2"):
        result_of("quality/stereo", *rows, methods={})


def test_pages_are_updated_and_checked(tmp_path, monkeypatch, capsys):
    page, results = tmp_path / "docs" / "page.md", tmp_path / "results"
    page.parent.mkdir()
    (tmp_path / "README.md").write_text("Words.\n")
    monkeypatch.setattr(write, "DOCS", page.parent)
    monkeypatch.setattr(write, "RESULTS", results)
    page.write_text("Words.\n\n<!-- generated: speed/scenes -->\nold\n<!-- end generated -->\n")
    assert command("tables") == 0 and "Not measured yet." in page.read_text()
    settings = {"size": [8, 8], "batch": 1, "samples": 1, "plain": False}
    row = {"case": {"part": "layout"}, "values": times(2.0, None)}
    (results / "speed").mkdir(parents=True)
    (results / "speed" / "scenes--x.json").write_text(
        dumps(result_of("speed/scenes", row, **settings))
    )
    assert command("tables --check") == 1
    assert "page.md is out of date: run python -m benchmarks tables" in capsys.readouterr().out
    assert "| layout |" not in page.read_text()
    assert command("tables") == 0
    assert "Words." in page.read_text() and "| layout | 2.00 |" in page.read_text()
    assert command("tables --check") == 0
    page.write_text("<!-- generated: speed/cars -->\n<!-- end generated -->\n")
    assert command("tables") == 2
    assert "there is no kind 'speed/cars' of results; known: speed/ops" in capsys.readouterr().err


SUMMARY = """
- {what: time, file: speed/scenes--x, value: values.median_ms, unit: ms, name: theirs,
   ours: {part: layout}, theirs: {part: all}}
- {what: speed, file: speed/scenes--x, value: values.median_ms, better: higher, name: theirs,
   ours: {part: layout}, theirs: {part: all}}
- {what: close, file: speed/scenes--x, value: values.median_ms, digits: 1, margin: 3, name: theirs,
   ours: {part: layout}, theirs: {part: all}}
"""


def test_summary_marks_the_better_number(tmp_path, monkeypatch):
    rows = [{"case": {"part": part}, "values": times(ms, None)}
            for part, ms in (("layout", 2.0), ("all", 4.0))]  # fmt: skip
    result = result_of("speed/scenes", *rows, size=[8, 8], batch=1, samples=1, plain=False)
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "scenes--x.json").write_text(dumps(result))
    monkeypatch.setattr(summary, "RESULTS", tmp_path)
    summary._result.cache_clear()
    file = tmp_path / "summary.yaml"
    file.write_text(SUMMARY)
    try:
        assert summary.table(file).splitlines()[2:] == [
            "| time | **2.00 ms** | 4.00 ms theirs | NVIDIA X |",
            "| speed | 2.00 | **4.00** theirs | NVIDIA X |",
            "| close | 2.0 | 4.0 theirs | NVIDIA X |",
        ]
        file.write_text(SUMMARY.replace("part: all", "part: nothing"))
        with pytest.raises(ResultFileError, match=r"has 0 rows of .*nothing.*, expected one"):
            summary.table(file)
    finally:
        summary._result.cache_clear()


def test_docs_are_up_to_date(capsys):
    assert command("tables --check") == 0, capsys.readouterr().out
