# SPDX-License-Identifier: Apache-2.0
"""What whole models cost: the counts, the timed calls, the committed figures and their tables."""

import copy
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

from quadtree_attention.ops.flops import attention_flops  # noqa: E402
from quadtree_attention.ops.tree import Tree  # noqa: E402
from tests.conftest import ROOT  # noqa: E402

IMAGE = (70, 45)  # pads at every level


@pytest.fixture
def models() -> ModuleType:
    from benchmarks import models

    return models


@pytest.fixture
def tables() -> ModuleType:
    from benchmarks import tables

    return tables


@pytest.fixture
def counts(tables: ModuleType) -> dict:
    return tables.read_results()["complexity"]


@pytest.fixture
def work(models: ModuleType, monkeypatch: pytest.MonkeyPatch):
    images = dict.fromkeys(models.TIMED_IMAGE, (32, 64))
    monkeypatch.setattr(models, "TIMED_IMAGE", images)
    fields = {"batch": 2, "device": "cpu", "dtype": "float32", "autocast": False}
    return models.Work("test_quadtree", "classification", True, compiled=False, **fields)


def program(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.complexity", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_quadtree", {"variant": "A", "value_act": None}),
        ("test_quadtree", {"variant": "B"}),
        ("test_quadtree", {"attention": "spatial_reduction", "topk": None, "value_act": None}),
        ("quadtree_a_b0", {}),
        ("quadtree_b_b0", {}),
        ("pvt_v2_b0", {}),
    ],
)
@pytest.mark.parametrize("task", ["classification", "backbone"])
def test_counting_needs_no_numbers(models: ModuleType, name: str, options: dict, task: str) -> None:
    model = models.build(name, task, IMAGE, **options)
    fake, real = models.count(model, IMAGE), models.count(model, IMAGE, fake=False)
    assert fake == real
    assert 0 < fake.attention_macs < fake.macs


@pytest.mark.parametrize("variant", ["A", "B"])
def test_attention_counts_by_its_formula(models: ModuleType, variant: str) -> None:
    image = (64, 96)  # no padding, which the operators on the CPU count as work
    model = models.build("test_quadtree", "classification", image, variant=variant, backend="cpu")
    expected, grid = 0, (16, 24)
    for blocks, heads, levels in zip((1, 1, 2, 1), (1, 2, 3, 4), (4, 3, 2, 1), strict=True):
        tree = Tree(grid, num_levels=levels)
        sizes = {"batch": 1, "heads": heads, "dim": 8, "value_dim": 8}
        topk = [8] * (levels - 1)
        per_level = attention_flops(query_tree=tree, key_tree=tree, topk=topk, **sizes)
        expected += blocks * sum(per_level) // 2
        grid = (grid[0] // 2, grid[1] // 2)
    assert models.count(model, image).attention_macs == expected


@pytest.mark.parametrize("name", ["quadtree_a_b0", "pvt_v2_b0", "swin_tiny_patch4_window7_224"])
def test_convolutions_and_linear_layers_count(models: ModuleType, name: str) -> None:
    image = (224, 224)
    model = models.build(name, "classification", image).eval()
    layers = 0

    def add(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        nonlocal layers
        layers += output.numel() * layer.weight[0].numel()  # one weight per input of an output

    hooks = [
        layer.register_forward_hook(add)
        for layer in model.modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    with torch.no_grad():
        model(torch.zeros(1, 3, *image))
    for hook in hooks:
        hook.remove()
    count = models.count(model, image)
    assert count.macs == layers + count.attention_macs


def test_every_model_is_counted(models: ModuleType, counts: dict) -> None:
    ours = [name for name in timm.list_models("*quadtree*") if not name.startswith("test_")]
    assert sorted(models.RIVALS) == sorted(ours)
    for task in models.TOPK:
        rows = [row["model"] for row in counts["rows"] if row["task"] == task]
        assert sorted(rows) == sorted(models.MODELS)


def test_parameters_are_those_of_the_models(counts: dict) -> None:
    for row in counts["rows"]:
        if "quadtree" in row["model"]:
            classes = 1000 if row["task"] == "classification" else 0
            model = timm.create_model(row["model"], num_classes=classes, device="meta")
            assert row["params"] == sum(parameter.numel() for parameter in model.parameters())
        official = row["published"]["code_params"]
        assert official is None or official["value"] == row["params"], row["model"]


def test_committed_counts_are_those_of_this_code(counts: dict) -> None:
    from benchmarks.complexity import count_row

    rows = [row for row in counts["rows"] if row["model"] == "quadtree_b_b0"]
    assert [count_row(row["task"], row["model"], Namespace()) for row in rows] == rows


def test_published_figures_are_met(tables: ModuleType, counts: dict) -> None:
    far = set()
    for row in counts["rows"]:
        for name, figure in row["published"].items():
            away = None if figure is None else tables.deviation(row, name)
            if away is not None and abs(away) >= 0.05:
                far.add((row["model"], name))
        detector = row["detector"] or {}
        if detector.get("published_image"):  # what the notes say: that is the size they counted at
            found = detector["macs_at_published_image"] / 1e9
            assert round(found) == row["published"]["gmacs"]["value"]
    assert far == {("swin_tiny_quadtree_b", "params_m")}  # whose note says what is known


@pytest.mark.parametrize("task", ["classification", "backbone"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step_reaches_every_parameter(
    models: ModuleType, work, task: str, autocast: bool
) -> None:
    work = replace(work, task=task, autocast=autocast, dtype="bfloat16" if autocast else "float32")
    grads = models.prepare(work)()
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_forward_is_cast_or_autocast(models: ModuleType, work) -> None:
    work = replace(work, training=False, dtype="bfloat16")
    assert (work.precision, models.prepare(work)().dtype) == ("bfloat16", torch.bfloat16)
    work = replace(work, task="backbone", autocast=True)
    assert work.precision == "bfloat16 autocast"
    assert [x.shape[2] for x in models.prepare(work)()] == [8, 4, 2, 1]


def test_failing_rows_carry_the_error(work) -> None:
    from benchmarks.complexity import time_row

    row = time_row(replace(work, model="pvt_v9"), "eager", Namespace(seconds_per_row=0.1))
    assert row["error"].startswith("RuntimeError: ") and "\n" not in row["error"]


def test_count_writes_a_valid_result(tmp_path: Path, tables: ModuleType) -> None:
    out = tmp_path / "result.json"
    run = program("count", "--models", "test_quadtree", "--out", str(out))
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text())
    tables.check_result(result)
    assert result["complete"] and result["kind"] == tables.COUNTS
    assert [row["task"] for row in result["rows"]] == ["classification", "backbone"]
    assert [row["topk"] for row in result["rows"]] == [8, 32]
    assert result["rows"][1]["detector"]["macs"] > result["rows"][1]["macs"]
    assert "[2/2] backbone test_quadtree: " in run.stderr
    assert "not found" in tables.markdown_section("result", result)


def test_measure_writes_a_valid_result(tmp_path: Path, tables: ModuleType) -> None:
    out = tmp_path / "result.json"
    options = "--device cpu --dtype float32 --models test_quadtree --tasks classification"
    limits = "--batch 1 --threads 1 --seconds-per-row 0.05"
    run = program("measure", *options.split(), *limits.split(), "--out", str(out))
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text())
    tables.check_result(result)
    assert result["complete"] and result["kind"] == tables.TIMES
    assert [row["pass"] for row in result["rows"]] == ["forward", "training"]
    for row in result["rows"]:
        assert (row["images"], row["precision"]) == ([1, 3, 224, 224], "float32")
        assert 0 < row["q25_ms"] <= row["median_ms"] <= row["q75_ms"]
    assert "[2/2] classification test_quadtree training eager float32: " in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("count --models quadtree_c", "unknown 'quadtree_c'; known: quadtree_a_b0, quadtree_a_b1"),
        ("measure --models pvt_v2_b9", "unknown 'pvt_v2_b9'; known: quadtree_a_b0"),
        ("measure --modes fast", "unknown 'fast'; known: eager, graph, compile, compile+graph"),
        ("measure --device cpu --modes compile+graph", "argument --modes: graph means CUDA graphs"),
        ("measure --batch 0", "argument --batch: must be at least 1, got 0"),
        ("count --out .", "argument --out: . is a directory"),
    ],
)
def test_bad_options(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.complexity import main

    with pytest.raises(SystemExit) as stop:
        main(options.split())
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m benchmarks.complexity") and message in error
    assert error.count("\n") == 1


def test_invalid_counts_are_refused(tables: ModuleType, counts: dict) -> None:
    for change, message in [
        (lambda r: r.update(kind="model-prices"), "kind is 'model-prices'"),
        (lambda r: r["versions"].pop("timm"), "versions must have the fields"),
        (lambda r: r["rows"][0].pop("macs"), r"rows\[0\] must have the fields"),
        (lambda r: r["rows"][0].update(task="stereo"), r"rows\[0\].task is 'stereo'"),
        (lambda r: r["rows"][0]["published"].pop("score"), r"rows\[0\].published must have"),
        (lambda r: r["rows"][0]["published"]["code_params"].pop("source"), "code_params must have"),
        (lambda r: r["rows"][0].update(params=1), "far from ours: a note must say why"),
    ]:
        bad = copy.deepcopy(counts)
        change(bad)
        with pytest.raises(ValueError, match=message):
            tables.check_result(bad)


def time_of(model: str, name: str, **outcome: object) -> dict:
    rival = "pvt_v2_b0" if "quadtree" in model else None
    fields = {"model": model, "rival": rival, "task": "backbone", "images": [1, 3, 800, 1344]}
    return fields | {"pass": name, "mode": "graph", "precision": "bfloat16"} | outcome


def test_times_show_losses_and_gaps(tables: ModuleType, counts: dict) -> None:
    def measured(ms: float, mib: float) -> dict:
        return {"median_ms": ms, "q25_ms": ms, "q75_ms": ms, "repeats": 3, "peak_mib": mib}

    rows = [
        time_of("quadtree_b_b0", "forward", **measured(10.0, 30.0)),
        time_of("pvt_v2_b0", "forward", **measured(4.0, 20.0)),
        time_of("quadtree_b_b0", "training", **measured(30.0, 90.0)),
        time_of("pvt_v2_b0", "training", error="OutOfMemoryError: no"),
    ]
    result = counts | {"kind": tables.TIMES, "rows": rows}
    tables.check_result(result)
    page = "<!-- generated: model-times -->\nold\n<!-- end generated -->\n"
    text = tables.updated(page, {"complexity--x": result, "complexity": counts})
    start = "| 1 x 3 x 800 x 1344 | graph | bfloat16 / bfloat16 |"
    assert f"{start} quadtree_b_b0 | 10.0 / 30.0 | 30.0 / 90.0 | pvt_v2_b0 | 0.40x / - |" in text
    assert "| 1.50x / - |" in text and "old" not in text and "GMACs" not in text
    assert "- backbone, pvt_v2_b0, training, graph: failed: OutOfMemoryError: no" in text
    assert "Not measured yet." in tables.updated(page, {"complexity": counts})


def test_tables_of_models_are_up_to_date(tables: ModuleType) -> None:
    assert ROOT / "docs" / "models.md" in tables.TARGETS
    assert tables.main(["--check"]) == 0
