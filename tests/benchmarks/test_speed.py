# SPDX-License-Identifier: Apache-2.0
"""Suites of time and memory: small runs on a CPU, what is measured, and mistakes."""

import random
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import (
    MIB,
    Memory,
    in_fresh_process,
    measure,
    printed_by,
    scores_held,
    summarise,
)
from benchmarks.result import CHECKS, STAGES, deviation, read_all
from benchmarks.speed import backbones, counts, cpu, detectors, matchers, ops, sizes, stereo
from benchmarks.suite import Work, measured, one_line
from benchmarks.tables.table import number
from quadtree_attention.nn.position import DepthwiseConv
from quadtree_attention.ops.attention.tree import Tree
from quadtree_attention.ops.planning.flops import attention_flops
from tests.benchmarks.conftest import TURNS, read, refused
from tests.conftest import ROOT

QUICK = "--device cpu --threads 1 --seconds-per-row 0.02"


@pytest.fixture
def rows_of(result):
    """Rows of a small run; cases and values in one."""

    def rows_of(words: str) -> list[dict]:
        made = result(f"speed {words}")
        rows = [row["case"] | row["values"] for row in made["rows"]]
        assert made["complete"] and all(row["q25_ms"] <= row["median_ms"] for row in rows)
        assert all(0 < row["median_ms"] <= row["q75_ms"] for row in rows)
        return rows

    return rows_of


def test_a_command_of_its_own(tmp_path):
    """As a user runs it: progress on one stream, the table on the other."""
    out = tmp_path / "new folder" / "result.json"
    options = f"--implementations quadtree,sdpa --dtypes float32 --passes forward {QUICK}"
    words = ["-m", "benchmarks", "speed", "ops", "--cases", "tiny", *options.split(), "--out", out]
    words = [sys.executable, *map(str, words)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert [path.name for path in out.parent.iterdir()] == ["result.json"]
    result = read(out)
    assert result["runs"][0]["machine"]["threads"] == 1
    quadtree, sdpa = result["rows"]
    assert quadtree["values"]["backend"] and sdpa["values"]["backend"] is None
    assert "[2/2] tiny float32 forward eager sdpa: " in run.stderr
    ratio = sdpa["values"]["median_ms"] / quadtree["values"]["median_ms"]
    assert f"{number(ratio)}x" in run.stdout and f"written: {out}" in run.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ops --cases tiny,huge", "unknown case 'huge'; known: all, growth, vit, det"),
        ("ops --device cpu --modes graph", "argument --modes: graph means CUDA graphs"),
        ("ops --seconds-per-row 0", "argument --seconds-per-row: must be more than 0, got 0"),
        ("ops --threads 0", "argument --threads: must be at least 1, got 0"),
        ("ops --device cpu --out .", "argument --out: . is a directory"),
        ("counts --models quadtree_c", "unknown 'quadtree_c'; known: quadtree_a_b0"),
        ("backbones --device cpu --modes compile+graph", "graph means CUDA graphs"),
        ("matchers --attentions flash", "unknown 'flash'; known: linear"),
        ("matchers --images 640", "must be like 640x480,1024x1024, got '640'"),
        ("matchers --images 0x480", "must be like 640x480,1024x1024, got '0x480'"),
        ("matchers --device cpu --memory 8", "only the memory of a GPU can be limited"),
        ("scenes --size 7x20", "must be HEIGHTxWIDTH, at least 8x8, got '7x20'"),
        ("scenes --size axb", "must be HEIGHTxWIDTH, at least 8x8, got 'axb'"),
        ("cars", "invalid choice: 'cars'"),
    ],
)
def test_bad_options(options, message, capsys):
    assert message in refused(capsys, f"speed {options}")


# ---- how it is measured


def test_median_and_quartiles():
    five = {"median_ms": 3.0, "q25_ms": 2.0, "q75_ms": 4.0, "repeats": 5}
    assert summarise([5.0, 1.0, 2.0, 4.0, 3.0]) == five
    assert summarise([7.0]) == {"median_ms": 7.0, "q25_ms": 7.0, "q75_ms": 7.0, "repeats": 1}


def test_compared_calls_are_interleaved():
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    timings = measure(*calls, device="cpu", seconds=1e-9)
    assert order[2:] == ["a", "b"] * TURNS  # after the warm-up
    assert [timing["repeats"] for timing in timings] == [TURNS, TURNS]


class Seen(TorchDispatchMode):
    """Notes which operations ran, and the dtype of what they gave."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.dtypes[function.overloadpacket.__name__] = result.dtype
        return result


def test_scores_are_held_in_the_precision_of_queries():
    q = torch.rand(1, 2, 8, 16, dtype=torch.bfloat16)
    with Seen() as fused:
        F.scaled_dot_product_attention(q, q, q)
    with scores_held(), Seen() as held:
        F.scaled_dot_product_attention(q, q, q)
    assert not any("softmax" in name for name in fused.dtypes)
    products = [dtype for name, dtype in held.dtypes.items() if name in ("bmm", "_safe_softmax")]
    assert products == [torch.bfloat16] * 2
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


class Suite:
    """A suite whose second work fails, when it is prepared or when it is called."""

    def __init__(self, fail: str) -> None:
        self.fail = fail

    def prepare(self, work):
        def call():
            if work["i"] == 1 and self.fail == "call":
                raise RuntimeError("no\nmore")

        if work["i"] == 1 and self.fail == "prepare":
            raise MemoryError("out of memory")
        return call


def test_failing_rows_carry_the_error():
    options = Namespace(device="cpu", seconds_per_row=0.001)
    works = [Work({"i": i, "mode": "eager"}, "cpu") for i in range(3)]
    first, second, third = measured(Suite("prepare"), works, options)
    assert second == {"case": {"i": 1, "mode": "eager"}, "error": "out of memory"}
    assert first["values"]["repeats"] == third["values"]["repeats"] > 0
    assert one_line(second) == "1 eager: failed: out of memory"
    rows = measured(Suite("call"), works, options)  # none has all its turns
    assert [row["error"] for row in rows] == ["RuntimeError: no"] * 3
    assert not any("values" in row for row in rows)


def stages_of_a_fresh_process() -> tuple[dict[str, float], float] | None:
    """A stage that takes 64 MiB for a moment, after one that keeps 16; None if it cannot be told.

    Other tests leave memory in their process that comes and goes while this is measured.
    """
    try:
        memory = Memory("cpu")
    except OSError:
        return None
    memory.begin("first")
    kept = torch.ones(4 * 2**20)
    memory.end("first")
    memory.begin("second")
    torch.ones(16 * 2**20)
    memory.end("second")
    memory.begin("third")
    memory.end("third")
    del kept
    return memory.stages, memory.whole()


def test_peaks_are_those_of_the_stages():
    found = in_fresh_process(stages_of_a_fresh_process, threads=1)
    if found is None:
        pytest.skip("this system does not let a process measure its own peak again and again")
    stages, whole = found
    assert stages["second"] - stages["first"] == pytest.approx(64, abs=8)
    assert stages["third"] - stages["first"] == pytest.approx(0, abs=8)
    assert whole == stages["second"]


# ---- ops


def ops_work(**case: str) -> Work:
    fields = {"case": "tiny", "implementation": "sdpa", "dtype": "float32", "pass": "forward"}
    return Work(fields | {"mode": "eager"} | case, "cpu", {"variant": "B", "limit": 60.0})


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
def test_backward_computes_all_gradients(implementation):
    work = ops_work(implementation=implementation, **{"pass": "forward+backward"})
    assert ops.values(work)["backend"] == ("reference" if implementation == "reference" else None)
    grads = ops.prepare(work)()
    assert len(grads) == 3
    assert all(grad.isfinite().all() and grad.abs().sum() > 0 for grad in grads)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_is_that_of_the_call(monkeypatch):
    case = replace(ops.TINY, batch=64, heads=8, head_dim=64, grid=(15, 14))
    monkeypatch.setitem(ops.KNOWN, "tiny", case)
    result = 64 * 8 * 64 * 15 * 14 * 4 / MIB  # full attention holds little else
    peak = ops.peak(ops_work(), Namespace(threads=1))
    assert peak is not None and result - 1 < peak < result + 8


def test_slow_rows_are_skipped_and_say_so(result, capsys):
    options = "--device cpu --cases tiny --implementations sdpa --dtypes float32 --passes forward"
    (row,) = result(f"speed ops {options} --max-estimated-seconds 1e-9")["rows"]
    assert row["skipped"].startswith("estimated ")
    assert row["skipped"].endswith(" s for one run, limit 1e-09 s")
    assert f"skipped: {row['skipped']}" in capsys.readouterr().out


def test_cases_and_their_work():
    assert ops.find_cases("all") == ops.CASES and len(ops.CASES) == 7
    grown = [(case.grid[0], case.num_levels) for case in ops.GROWTH]
    assert grown == [(64, 3), (128, 4), (256, 5), (512, 6), (1024, 7)]
    # 9 x 14 tokens, then 5 x 7, then 3 x 4; four of twelve cells kept, 16 candidates below.
    pairs = 12 * 12 + 35 * 16 + 126 * 16
    assert ops.flops(ops.TINY, "quadtree") == 4 * 2 * 16 * pairs
    assert ops.flops(ops.TINY, "sdpa") == 4 * 2 * 16 * 126**2


# ---- backbones

IMAGE = (70, 45)  # pads at every level
PLAIN = {"attention": "spatial_reduction", "topk": None, "value_act": None}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_quadtree", {"variant": "A", "value_act": None}),
        ("test_quadtree", {"variant": "B"}),
        ("test_quadtree", PLAIN),
        ("quadtree_a_b0", {}),
        ("pvt_v2_b0", {}),
    ],
)
@pytest.mark.parametrize("task", ["classification", "backbone"])
def test_counting_needs_no_numbers(name, options, task):
    model = backbones.build(name, task, IMAGE, **options)
    fake = counts.count(model, IMAGE)
    real = counts.counts_of(model.eval(), torch.zeros(1, 3, *IMAGE))
    assert fake == real
    assert 0 < fake["attention_macs"] < fake["macs"]


@pytest.mark.parametrize("variant", ["A", "B"])
def test_attention_counts_by_its_formula(variant):
    image = (64, 96)  # no padding, which the operators on the CPU count as work
    options = {"variant": variant, "backend": "cpu"}
    model = backbones.build("test_quadtree", "classification", image, **options)
    expected, grid = 0, (16, 24)
    for blocks, heads, levels in zip((1, 1, 2, 1), (1, 2, 3, 4), (4, 3, 2, 1), strict=True):
        tree = Tree(grid, num_levels=levels)
        sizes = {"batch": 1, "heads": heads, "dim": 8, "value_dim": 8}
        topk = [8] * (levels - 1)
        per_level = attention_flops(query_tree=tree, key_tree=tree, topk=topk, **sizes)
        expected += blocks * sum(per_level) // 2
        grid = (grid[0] // 2, grid[1] // 2)
    assert counts.count(model, image)["attention_macs"] == expected


@pytest.mark.parametrize("name", ["quadtree_a_b0", "swin_tiny_patch4_window7_224"])
def test_convolutions_and_linear_layers_count(name):
    image = (224, 224)
    model = backbones.build(name, "classification", image).eval()
    layers = []

    def add(layer, inputs, output):
        layers.append(output.numel() * layer.weight[0].numel())  # one weight per input of an output

    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | DepthwiseConv):
            layer.register_forward_hook(add)
    with torch.no_grad():
        model(torch.zeros(1, 3, *image))
    expected = sum(layers)
    counted = counts.count(model, image)
    assert counted["macs"] == expected + counted["attention_macs"]


@pytest.fixture(scope="module")
def published() -> list[dict]:
    """The committed counts."""
    return read_all("speed/counts")["speed/counts"]["rows"]


def test_committed_counts_are_those_of_this_code(published):
    ours = [name for name in timm.list_models("*quadtree*") if not name.startswith("test_")]
    assert sorted(backbones.BASELINES) == sorted(ours)
    for task in backbones.TOPK:
        rows = [row["case"]["model"] for row in published if row["case"]["task"] == task]
        assert sorted(rows) == sorted(backbones.MODELS)
    rows = [row for row in published if row["case"]["model"] == "quadtree_b_b0"]
    found = [counts.measure_row(Work(row["case"]), Namespace()) for row in rows]
    assert found == [row["values"] for row in rows] and len(rows) == 2


def test_committed_counts_meet_what_is_published(published):
    far = set()
    for case, values in ((row["case"], row["values"]) for row in published):
        if "quadtree" in case["model"]:
            classes = 1000 if case["task"] == "classification" else 0
            model = timm.create_model(case["model"], num_classes=classes, device="meta")
            assert values["params"] == sum(parameter.numel() for parameter in model.parameters())
        official = values["published"].get("code_params")
        assert official is None or official["value"] == values["params"], case
        away = {name: deviation(values, name) for name in values["published"]}
        far |= {(case["model"], name) for name, by in away.items() if abs(by or 0) >= 0.05}
        detector = values.get("detector", {})
        if "published_image" in detector:  # what the notes say: that is the size they counted at
            found = detector["macs_at_published_image"] / 1e9
            assert round(found) == values["published"]["gmacs"]["value"]
    assert far == {("swin_tiny_quadtree_b", "params_m")}  # whose note says what is known


def test_counts_far_from_what_is_published_need_a_note(published):
    row = next(row for row in published if row["values"]["published"] and not row["values"]["note"])
    with pytest.raises(ValueError, match="far from ours: a note must say why"):
        CHECKS["speed/counts"]({**row, "values": row["values"] | {"params": 1}}, "rows[0]")


def backbone_call(**case):
    """What the call to time returns."""
    fields = {"task": "classification", "model": "test_quadtree", "images": [2, 3, 32, 64]}
    fields |= {"pass": "training", "mode": "eager", "precision": "float32"}
    return backbones.prepare(Work(fields | case))()


@pytest.mark.parametrize("task", ["classification", "backbone"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16 autocast"])
def test_a_training_step_reaches_every_parameter(task, precision):
    grads = backbone_call(task=task, precision=precision)
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_forward_is_cast_or_autocast():
    forward = {"pass": "forward"}
    assert backbone_call(precision="bfloat16", **forward).dtype == torch.bfloat16
    maps = backbone_call(task="backbone", precision="bfloat16 autocast", **forward)
    assert [x.shape[2] for x in maps] == [8, 4, 2, 1]
    options = Namespace(dtype="bfloat16", precision="usual")
    assert backbones._precision(options, "forward") == "bfloat16"
    assert backbones._precision(options, "training") == "bfloat16 autocast"
    options = Namespace(dtype="float32", precision="autocast")
    assert backbones._precision(options, "training") == "float32"


def test_backbones(rows_of):
    options = f"--dtype float32 --models test_quadtree --tasks classification --batch 1 {QUICK}"
    rows = rows_of(f"backbones {options}")
    assert [row["pass"] for row in rows] == ["forward", "training"]
    assert all(row["images"] == [1, 3, 224, 224] and row["mode"] == "eager" for row in rows)


# ---- detectors


def test_detectors(rows_of, capsys):
    options = "--model retinanet_test_quadtree --images 96x64 --modes eager --batch 2"
    options += " --parts network --precisions float32"  # memory takes a process for each row
    rows = rows_of(f"detectors {options} {QUICK}")
    assert [row["attention"] for row in rows] == ["held", "sr", "quadtree"]
    shown = capsys.readouterr().out
    (ours,) = (line for line in shown.splitlines() if "network" in line and "QuadTree" in line)
    *_, of_held, of_fused, peak, of_held_peak, of_fused_peak = ours.split()
    assert float(peak) > 0
    for ratio in (of_held, of_fused, of_held_peak, of_fused_peak):
        assert float(ratio.removesuffix("x")) > 0


class Attention(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift  # a number that no run before has left a compiled network for

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x) + self.shift


@torch._functorch.config.patch(enable_autograd_cache=True)  # and as it was, afterwards
def test_attentions_are_compiled_apart():
    torch._dynamo.reset()
    x, shift = torch.rand(1, 2, 32, 16), random.random()
    for held in (True, False, True):
        network = detectors.compiled(Attention(shift))
        with torch.no_grad(), scores_held() if held else nullcontext():
            network(x)
            with profile() as kernels:
                network(x)
        names = " ".join(event.key for event in kernels.key_averages())
        assert ("flash_attention" in names) != held
        assert ("bmm" in names) == held


# ---- matchers


def matcher_work(**case) -> Work:
    fields = {"model": "loftr_quadtree_small", "attention": "quadtree_b", "image": [80, 64]}
    return Work(fields | {"matches": 123, "precision": "float32"} | case)


def test_matchers(rows_of, capsys):
    options = "--models loftr_quadtree_small --attentions linear,full --images 80x64 --matches 30"
    rows = rows_of(f"matchers {options} {QUICK}")
    told = capsys.readouterr()
    assert "[2/2] 80x64 loftr_quadtree_small 30 float32 full: " in told.err
    assert "Peak memory in MiB" in told.out
    assert [row["attention"] for row in rows] == ["linear", "full"]
    for row in rows:
        stages, spread = row["stages_ms"], row["q75_ms"] - row["q25_ms"]
        assert 0 < stages["attention"] < stages["transformer"]
        assert sum(stages[stage] for stage in STAGES) < row["median_ms"] + spread + 5
        if row["peak_mib"] is not None:
            assert row["peak_mib"] >= max(row["stages_mib"].values()) > 0


def test_so_many_matches_go_to_the_fine_stage():
    model, call = matchers.prepare(matcher_work())
    sizes = []
    model.fine_transformer.register_forward_hook(lambda *args: sizes.append(len(args[2][0])))
    assert len(call()["confidence"]) == 123 and sizes == [123]


def test_stages_are_timed_call_by_call(monkeypatch):
    """The CNN sees a large pair one by one: both halves count, and no other call does."""
    clock = matchers.Clock("cpu")
    ticks = iter([0, 1, 5, 8, 10, 11, 20, 20, 30, 35, 40, 42])
    monkeypatch.setattr(clock, "_now", lambda: next(ticks) / 1e3)
    for _ in range(3):
        clock.calls.append({})
        for _ in range(2):
            clock.mark("CNN")
            clock.mark("CNN")
    medians = [clock.medians(repeats)["CNN"] for repeats in (3, 2, 1)]
    assert medians == pytest.approx([4, 4, 7])


def test_images_that_are_too_large_say_so():
    options = Namespace(device="cpu", seconds_per_row=0.05, threads=1)
    works = [[matcher_work(image=[3_000_000, 3_000_000])], [matcher_work(attention="none")]]
    (huge,), (unknown,) = (measured(matchers, work, options) for work in works)
    assert huge["error"] == "out of memory" != unknown["error"]


# ---- stereo and scenes


def test_attention_is_counted_as_worked_out_by_hand():
    names = ("full-2", "explicit-2", "quadtree-2")
    full, explicit, ours = (stereo.count(name, 64, 32) for name in names)
    # scores and messages: 16 rows of 32 cells, of both views, 12 attentions of 128 channels
    by_hand = 2 * 16 * 32 * 32 * 128 * 2 * 12
    assert full["attention_macs"] == explicit["attention_macs"] == by_hand
    assert ours["attention_macs"] < full["attention_macs"]
    assert ours["macs"] - ours["attention_macs"] == full["macs"] - full["attention_macs"]
    assert ours["params"] - full["params"] == 12 * 4  # weights of the levels


def test_stereo(rows_of, capsys):
    rows = rows_of(f"stereo --networks quadtree-2 --images 48x32 --large 64x32 {QUICK}")
    assert [row["pass"] for row in rows] == ["forward", "training", "forward"]
    assert rows[0]["macs"] == rows[1]["macs"] < rows[2]["macs"]
    assert rows[0]["median_ms"] < rows[1]["median_ms"]  # each row has its own time
    assert "48x32  training  float32    QuadTree-B, 1/2" in capsys.readouterr().out


def test_parts_of_scenes_add_up(rows_of):
    options = "--device cpu --size 16x20 --batch 2 --seconds-per-row 0.05"
    threads = f"--threads {torch.get_num_threads()}"
    rows = rows_of(f"scenes {options} {threads}")
    parts = {row["part"]: row for row in rows}
    names = ("layout", "both views", "photometric, both views")
    assert parts["scenes"]["median_ms"] > max(parts[name]["median_ms"] for name in names) / 2
    rate = 2e3 / parts["scenes"]["median_ms"]
    assert parts["scenes"]["pairs_per_second"] == pytest.approx(rate)
    assert {"scenes, first call", "planes, first call", "planes"} <= parts.keys()


# ---- new processes


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(cpu.BACKBONES, "b2 forward", ("quadtree_b_b0", [1, 3, 64, 64], "forward"))
    monkeypatch.setattr(cpu, "SIZE", (96, 64))
    monkeypatch.setattr(cpu, "LATER", 1)


CPU = "speed cpu --threads 1 --seconds-per-row 0.1 --parts"


@pytest.mark.usefixtures("small")
def test_backbone_beside_its_baseline(result, capsys):
    ours, baseline = result(CPU, "b2 forward")["rows"]
    assert (ours["case"]["baseline"], baseline["case"]["model"]) == ("pvt_v2_b0", "pvt_v2_b0")
    assert ours["values"]["median_ms"] > 0 and "first_ms" not in ours["values"]
    assert "pvt_v2_b0" in capsys.readouterr().out


@pytest.mark.slow  # compiles all kernels
@pytest.mark.usefixtures("small")
def test_command_in_new_processes(result):
    (match,) = result(CPU, "match")["rows"]
    assert match["values"]["first_ms"] > match["values"]["median_ms"] > 0
    assert match["values"]["peak_mib"] > 100 and match["values"]["repeats"] == 1


def test_first_calls(result, monkeypatch, capsys):
    monkeypatch.setitem(sizes.SIDES, "pvt_v2_b0", (32, 64, 1))
    made = result("speed sizes --networks pvt_v2_b0 --sizes 2 --device cpu")
    new_size, new_process = (row["values"] for row in made["rows"])
    assert new_size["repeats"] == 2 and new_size["first_ms"] > 0 and new_size["again_ms"] > 0
    assert min(new_process[key] for key in ("first_ms", "cached_ms", "again_ms")) > 0
    assert "the same size again" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="ValueError: no such network"):
        printed_by("raise ValueError('no such network')")


def test_a_vision_transformer_with_variant_c(result, capsys):
    options = "--sides 28 --attentions dense,C --topk 4 --seconds-per-row 0.01 --device cpu"
    dense, own = (
        row["values"] for row in result(f"speed accelerate {options} --threads 1")["rows"]
    )
    assert min(x["median_ms"] for x in (dense, own)) > 0 and own["peak_mib"] > 0
    assert "C vs dense" in capsys.readouterr().out
