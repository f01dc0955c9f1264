# SPDX-License-Identifier: Apache-2.0
"""The matcher's time and memory: a real run, what it measures, its tables, and mistakes."""

import json
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import ModuleType

import pytest
import torch

from tests.benchmarks.test_run import program

STAGES = ["CNN", "transformer", "coarse matching", "fine"]


@pytest.fixture
def matchers() -> ModuleType:
    from benchmarks import matchers

    return matchers


@pytest.fixture
def tables() -> ModuleType:
    from benchmarks import matcher_tables

    return matcher_tables


def row(**changes) -> dict:
    fields = {
        "model": "loftr_quadtree_small", "attention": "quadtree_b", "image": [2048, 1024],
        "matches": 2000, "precision": "float32", "median_ms": 100.0, "q25_ms": 90.0,
        "q75_ms": 120.0, "repeats": 3, "peak_mib": 4000.0,
        "stages_ms": dict(zip([*STAGES, "attention"], [30.0, 20.0, 40.0, 5.0, 12.5], strict=True)),
        "stages_mib": dict(zip(STAGES, [4000.0, 3000.0, 2000.0, 1000.0], strict=True)),
    }  # fmt: skip
    return fields | changes


def failed(error: str, **changes) -> dict:
    kept = ("model", "attention", "image", "matches", "precision")
    return {key: row()[key] for key in kept} | changes | {"error": error}


def result(*rows: dict, **changes) -> dict:
    return {
        "kind": "matcher-times",
        "schema": 1,
        "command": "python -m benchmarks.matchers",
        "date": "2030-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "device": "cuda",
        "machine": {"device_name": "GPU", "cpu": "CPU", "cores": 2, "threads": 1, "load": 0.5},
        "versions": {
            "python": "3.11", "torch": "2.9", "cuda": "13.0", "triton": None, "numba": None,
            "quadtree_attention": "0.1",
        },
        "memory_gib": None,
        "complete": True,
        "rows": list(rows),
        **changes,
    }  # fmt: skip


def test_a_run(tmp_path, tables):
    out = tmp_path / "matchers--here.json"
    options = "--device cpu --models loftr_quadtree_small --attentions linear,full --images 80x64"
    limits = "--matches 30 --threads 1 --seconds-per-row 0.05"
    done = program("matchers", *options.split(), *limits.split(), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "[2/2] 80x64 loftr_quadtree_small full float32: " in done.stderr
    assert f"written: {out}" in done.stdout and "Peak memory in MiB" in done.stdout
    found = json.loads(out.read_text())
    tables.check_result(found)
    assert found["complete"] and not list(tmp_path.glob("*.partial"))
    assert [(r["image"], r["attention"]) for r in found["rows"]] == [
        ([80, 64], "linear"), ([80, 64], "full"),
    ]  # fmt: skip
    for measured in found["rows"]:
        times, spread = measured["stages_ms"], measured["q75_ms"] - measured["q25_ms"]
        assert 0 < measured["q25_ms"] <= measured["median_ms"] <= measured["q75_ms"]
        assert 0 < times["attention"] < times["transformer"]
        assert sum(times[stage] for stage in STAGES) < measured["median_ms"] + spread + 5
        if measured["peak_mib"] is not None:
            assert measured["peak_mib"] >= max(measured["stages_mib"].values()) > 0


def test_so_many_matches_go_to_the_fine_stage(matchers):
    work = matchers.Work("loftr_quadtree_small", "quadtree_b", (80, 64), 123, "float32", "cpu")
    model, call = matchers.prepare(work)
    sizes = []
    model.fine_transformer.register_forward_hook(lambda *args: sizes.append(len(args[2][0])))
    assert len(call()["confidence"]) == 123 and sizes == [123]


def test_stages_are_timed_call_by_call(matchers, monkeypatch):
    """The CNN sees a large pair one by one: both halves count, and no other call does."""
    clock = matchers.Clock("cpu")
    ticks = iter([0, 1, 5, 8, 10, 11, 20, 20, 30, 35, 40, 42])
    monkeypatch.setattr(clock, "_now", lambda: next(ticks) / 1e3)
    for _ in range(3):
        clock.calls.append({})
        for _ in range(2):
            clock.begin("CNN")
            clock.end("CNN")
    assert clock.medians(3)["CNN"] == pytest.approx(4)
    assert clock.medians(2)["CNN"] == pytest.approx(4)
    assert clock.medians(1)["CNN"] == pytest.approx(7)


def stages_of_a_fresh_process() -> tuple[dict[str, float], float] | None:
    """A stage that takes 64 MiB for a moment, after one that keeps 16; None if it cannot be told.

    Other tests leave memory in their process that comes and goes while this is measured.
    """
    from benchmarks.matchers import Memory, _return_memory_when_freed

    _return_memory_when_freed()
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
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(stages_of_a_fresh_process).result()
    if found is None:
        pytest.skip("this system does not let a process measure its own peak again and again")
    stages, whole = found
    assert stages["second"] - stages["first"] == pytest.approx(64, abs=8)
    assert stages["third"] - stages["first"] == pytest.approx(0, abs=8)
    assert whole == stages["second"]


def test_failing_rows_say_why(matchers):
    options = Namespace(seconds_per_row=0.05, threads=1)
    huge = matchers.Work(
        "loftr_quadtree_small", "linear", (3_000_000, 3_000_000), 1, "float32", "cpu"
    )
    assert matchers.measured(huge, options)["error"] == "out of memory"
    unknown = matchers.Work("loftr_quadtree_small", "none", (64, 64), 1, "float32", "cpu")
    assert "out of memory" not in matchers.measured(unknown, options)["error"]


def test_tables(tables):
    rows = [
        row(),
        failed("out of memory", attention="full"),
        failed("RuntimeError: no", attention="linear"),
    ]
    found = result(*rows, memory_gib=8.0)
    tables.check_result(found)
    lines = tables.markdown({"matchers--gpu": found}).splitlines()
    assert lines[0] == "### GPU: `matchers--gpu.json`"
    assert "PyTorch was given 8.00 GiB of the GPU." in lines
    start = "| 2048x1024 | loftr_quadtree_small | float32 |"
    times = f"{start} quadtree_b | 100 | 90.0 - 120 | 30.0 | 20.0 | 12.5 | 40.0 | 5.00 |"
    memory = f"{start} quadtree_b | 4000 | 4000 | 3000 | 2000 | 1000 |"
    assert lines.index(times) < lines.index("#### Peak memory in MiB") < lines.index(memory)
    assert f"{start} full | out of memory | - | - | - | - | - | - |" in lines
    assert f"{start} full | out of memory | - | - | - | - |" in lines
    assert (
        lines[-1] == "- 2048x1024, loftr_quadtree_small, float32, linear: failed: RuntimeError: no"
    )
    assert all(line.count("|") == times.count("|") for line in lines if line.endswith("5.00 |"))
    unknown = tables.markdown({"m": result(row(peak_mib=None, stages_mib=None))})
    assert f"{start} quadtree_b | - | - | - | - | - |" in unknown
    assert tables.markdown({}) == "Not measured yet."


def test_results_that_are_not_right_are_refused(tables, tmp_path):
    for bad, message in (
        (result() | {"kind": "else"}, "kind is 'else'"),
        (result(row(stages_ms={"CNN": 1.0})), r"rows\[0\].stages_ms must have the fields"),
        (result(row(image="2048x2048")), r"rows\[0\].image must be"),
        (result(row() | {"error": "no"}), r"rows\[0\] must have the fields"),
    ):
        with pytest.raises(ValueError, match=message):
            tables.check_result(bad)
    (tmp_path / "matchers--x.json").write_text(json.dumps(result(row(matches=None))))
    with pytest.raises(ValueError, match=r"matchers--x.json: rows\[0\].matches must be"):
        tables.read_results(tmp_path)


def test_committed_results_are_valid(tables):
    for found in tables.read_results().values():
        assert found["complete"] and found["rows"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "superglue"], "unknown 'superglue'; known: loftr, loftr_lite"),
        (["--attentions", "flash"], "unknown 'flash'; known: linear"),
        (["--images", "640"], "must be like 640x480,1024x1024, got '640'"),
        (["--images", "0x480"], "must be like 640x480,1024x1024, got '0x480'"),
        (["--matches", "0"], "must be at least 1, got 0"),
        (["--device", "cpu", "--memory", "8"], "only the memory of a GPU can be limited"),
        (["--out", "."], "argument --out: . is a directory"),
    ],
)
def test_mistakes(matchers, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        matchers.main(options)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and message in told and told.count("\n") == 1
