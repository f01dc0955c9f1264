# SPDX-License-Identifier: Apache-2.0
"""The benchmark program: its results, its refusals, and the tables made from committed results."""

import copy
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT


@pytest.fixture
def tables() -> ModuleType:
    from benchmarks import tables

    return tables


@pytest.fixture
def work():
    from benchmarks.cases import TINY, Work

    return Work(TINY, "sdpa", "float32", False, "B", "cpu")


def program(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_run_writes_a_valid_result(tmp_path: Path, tables: ModuleType) -> None:
    out = tmp_path / "new folder" / "result.json"
    options = "--device cpu --cases tiny --implementations quadtree,sdpa --dtypes float32"
    limits = "--passes forward --threads 1 --seconds-per-row 0.05"
    run = program("run", *options.split(), *limits.split(), "--out", str(out))
    assert run.returncode == 0, run.stderr
    assert [path.name for path in out.parent.iterdir()] == ["result.json"]

    result = json.loads(out.read_text())
    tables.check_result(result)
    assert result["complete"] and result["device"] == "cpu" and result["machine"]["threads"] == 1
    assert [row["implementation"] for row in result["rows"]] == ["quadtree", "sdpa"]
    assert [bool(row["backend"]) for row in result["rows"]] == [True, False]
    for row in result["rows"]:
        assert (row["case"], row["pass"], row["mode"]) == ("tiny", "forward", "eager")
        assert 0 < row["q25_ms"] <= row["median_ms"] <= row["q75_ms"]
        assert row["repeats"] >= 1
    assert "[2/2] tiny sdpa" in run.stderr
    quadtree, sdpa = (row["median_ms"] for row in result["rows"])
    assert f"{tables.number(sdpa / quadtree)}x" in run.stdout


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
def test_backward_computes_all_gradients(work, implementation: str) -> None:
    from benchmarks.cases import prepare

    work = replace(work, implementation=implementation, backward=True)
    call, backend = prepare(work)
    assert backend == ("reference" if implementation == "reference" else None)
    assert len(call()) == 3
    assert all(grad.isfinite().all() and grad.abs().sum() > 0 for grad in call())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_is_that_of_the_call(work) -> None:
    from benchmarks.measure import MIB, peak_mib

    case = replace(work.case, batch=64, heads=8, head_dim=64, grid=(15, 14))
    result = 64 * 8 * 64 * 15 * 14 * 4 / MIB  # full attention holds little else
    peak = peak_mib(replace(work, case=case), lambda: None, threads=1)
    assert peak is not None and result - 1 < peak < result + 8


def test_slow_rows_are_skipped_and_say_so(tmp_path: Path, tables: ModuleType) -> None:
    out = tmp_path / "result.json"
    options = "--device cpu --cases tiny --implementations sdpa --dtypes float32 --passes forward"
    run = program("run", *options.split(), "--max-estimated-seconds", "1e-9", "--out", str(out))
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text())
    tables.check_result(result)
    (row,) = result["rows"]
    assert row["skipped"].startswith("estimated ")
    assert row["skipped"].endswith(" s for one run, limit 1e-09 s")
    assert f"skipped: {row['skipped']}" in run.stdout


def test_failing_rows_carry_the_error(work) -> None:
    from benchmarks.run import run_row

    options = Namespace(max_estimated_seconds=60, seconds_per_row=0.1, threads=1)
    row = run_row(replace(work, implementation="reference", variant="C"), "eager", options)
    assert row["error"].startswith("OptionError: ") and "\n" not in row["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cases tiny,huge", "argument --cases: unknown case 'huge'; known: all, growth, det"),
        ("--implementations fast", "argument --implementations: unknown 'fast'; known: quadtree"),
        ("--dtypes int8", "argument --dtypes: unknown 'int8'; known: float32"),
        ("--device cpu --modes graph", "argument --modes: graph means CUDA graphs"),
        ("--seconds-per-row 0", "argument --seconds-per-row: must be more than 0, got 0"),
        ("--threads 0", "argument --threads: must be at least 1, got 0"),
        ("--device cpu --out .", "argument --out: . is a directory"),
    ],
)
def test_bad_options(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.run import main

    with pytest.raises(SystemExit) as stop:
        main(options.split())
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"python -m benchmarks.run: {message}") and error.count("\n") == 1


def test_cases_and_their_work() -> None:
    from benchmarks.cases import CASES, GROWTH, TINY, find_cases, flops

    assert find_cases("all") == CASES and len(CASES) == 7
    assert [(case.grid[0], case.num_levels) for case in GROWTH] == [
        (64, 3), (128, 4), (256, 5), (512, 6), (1024, 7),
    ]  # fmt: skip
    # 9 x 14 tokens, then 5 x 7, then 3 x 4; four of twelve cells kept, 16 candidates below.
    pairs = 12 * 12 + 35 * 16 + 126 * 16
    assert flops(TINY, "quadtree") == 4 * 2 * 16 * pairs
    assert flops(TINY, "sdpa") == 4 * 2 * 16 * 126**2


def test_median_and_quartiles() -> None:
    from benchmarks.measure import Timing, summarise

    assert summarise([5.0, 1.0, 2.0, 4.0, 3.0]) == Timing(3.0, 2.0, 4.0, 5)
    assert summarise([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def result_with(*rows: dict) -> dict:
    versions = {"python": "3", "torch": "2", "cuda": None, "triton": None, "numba": None}
    return {
        "schema": 1, "command": "python -m benchmarks.run", "date": "2030-01-02T03:04:05+00:00",
        "commit": None, "device": "cpu", "variant": "B",
        "machine": {"device_name": "X", "cpu": "X", "cores": 2, "threads": 2, "load": 0.5},
        "versions": versions | {"quadtree_attention": "0"},
        "complete": True, "rows": list(rows),
    }  # fmt: skip


def row_of(implementation: str, name: str, **outcome: object) -> dict:
    fields = {"case": "tiny", "backend": None, "dtype": "float32", "pass": name, "mode": "eager"}
    return fields | {"implementation": implementation} | outcome


def measured(ms: float) -> dict:
    return {"median_ms": ms, "q25_ms": ms, "q75_ms": ms, "repeats": 3, "peak_mib": 1.5}


def test_tables_show_losses_and_gaps(tables: ModuleType) -> None:
    result = result_with(
        row_of("quadtree", "forward", **measured(10.0)),
        row_of("sdpa", "forward", **measured(4.0)),
        row_of("quadtree", "forward+backward", **measured(30.0)),
        row_of("sdpa", "forward+backward", skipped="estimated 99 s for one run, limit 60 s"),
    )
    tables.check_result(result)
    text = tables.updated("<!-- generated: r -->\nold\n<!-- end generated -->\n", {"r": result})
    assert "old" not in text
    assert "| tiny | float32 | eager | 10.0 / 30.0 | 1.50 / 1.50 | 4.00 / - |" in text
    assert "| 0.40x / - |" in text
    assert "- tiny, sdpa, float32, forward+backward, eager: skipped: estimated 99 s" in text
    assert tables.updated(text, {"r": result}) == text
    with pytest.raises(ValueError, match="no result file for <!-- generated: r -->"):
        tables.updated(text, {})


def test_invalid_results_are_refused(tables: ModuleType) -> None:
    good = result_with(row_of("sdpa", "forward", **measured(4.0)))
    for change, message in [
        (lambda r: r.pop("date"), "result must have the fields"),
        (lambda r: r.update(schema=2), "schema is 2"),
        (lambda r: r["rows"][0].update(median_ms="4"), r"rows\[0\].median_ms must be"),
        (lambda r: r["rows"][0].pop("peak_mib"), r"rows\[0\] must have the fields"),
    ]:
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises(ValueError, match=message):
            tables.check_result(bad)


def test_committed_results_are_valid(tables: ModuleType) -> None:
    for result in tables.read_results().values():
        assert result["complete"]
        for row in result["rows"]:
            assert row.get("median_ms", 1) > 0


def test_docs_are_up_to_date() -> None:
    run = program("tables", "--check")
    assert run.returncode == 0, run.stdout + run.stderr
