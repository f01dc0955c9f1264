# SPDX-License-Identifier: Apache-2.0
"""Measures quadtree attention next to full attention: `python -m benchmarks.run --help`."""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch

import quadtree_attention
from benchmarks.cases import GROWTH, Work, find_cases, flops, implementations, prepare
from benchmarks.measure import measure, peak_mib, use_threads
from benchmarks.tables import (
    PASSES,
    RESULTS,
    ROOT,
    SCHEMA,
    check_result,
    number,
    outcome_text,
    text_table,
)

DTYPES = ("float32", "bfloat16", "float16", "float64")
MODES = ("eager", "graph")
CALIBRATION = GROWTH[0]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every row that the options ask for, writes the results and prints them."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    use_threads(options.threads)
    about = describe_run(argv, options)
    rows: list[dict[str, Any]] = []
    planned = list(plan(options))
    for work, mode in planned:
        rows.append(run_row(work, mode, options))
        release_memory(options.device)
        result = about | {"complete": len(rows) == len(planned), "rows": rows}
        check_result(result)
        write(options.out, result)
        progress = f"[{len(rows)}/{len(planned)}] {describe(rows[-1])}"
        print(progress, file=sys.stderr, flush=True)
    print(text_table(rows))
    print(f"\nwritten: {options.out}")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The checked options; a bad one ends the program with one line and exit code 2."""
    parser = _Parser(prog="python -m benchmarks.run", description=__doc__)
    add = parser.add_argument
    available = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cpu", "cuda"), default=available)
    add("--cases", default="all", help="all, growth, or names separated by commas")
    add(
        "--implementations",
        type=_list_of(implementations()),
        default="quadtree,reference,sdpa",
        help="quadtree[:backend], reference, sdpa",
    )
    add("--dtypes", type=_list_of(DTYPES), default="float32,bfloat16")
    add("--passes", type=_list_of(PASSES), default=",".join(PASSES))
    add("--variant", choices=("A", "B"), default="B")
    add("--modes", type=_list_of(MODES), default="eager", help="eager, graph (CUDA graph)")
    add("--seconds-per-row", type=_positive, default=2.0, help="time for the repeats of a row")
    add("--max-estimated-seconds", type=_positive, default=60.0, help="skip slower calls")
    add("--threads", type=_count, default=torch.get_num_threads(), help="CPU threads")
    add("--out", type=Path, help="default: benchmarks/results/<suite>--<device name>.json")
    options = parser.parse_args(argv)
    suite = options.cases if options.cases in ("all", "growth") else "custom"
    try:
        options.cases = find_cases(options.cases)
    except ValueError as error:
        parser.error(f"argument --cases: {error}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device here; use --device cpu")
    if options.device == "cpu" and "graph" in options.modes:
        parser.error("argument --modes: graph means CUDA graphs and needs --device cuda")
    if options.out is None:
        options.out = (
            RESULTS / f"{suite}{_suffix(options.variant)}--{slug(device_name(options))}.json"
        )
    if options.out.is_dir():
        parser.error(f"argument --out: {options.out} is a directory")
    return options


def plan(options: argparse.Namespace) -> Iterator[tuple[Work, str]]:
    """Every row to measure; those that are compared with each other come together."""
    for case in options.cases:
        for dtype in options.dtypes:
            for name in options.passes:
                for mode in options.modes:
                    for implementation in options.implementations:
                        backward = name == PASSES[1]
                        work = Work(
                            case, implementation, dtype, backward, options.variant, options.device
                        )
                        yield work, mode


def run_row(work: Work, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one row; one that would take too long or fails says so instead."""
    row: dict[str, Any] = {
        "case": work.case.name,
        "implementation": work.implementation,
        "backend": None,
        "dtype": work.dtype,
        "pass": PASSES[work.backward],
        "mode": mode,
    }
    try:
        return row | _outcome(work, mode, options)
    except Exception as error:  # whatever happens to one row, the others are still wanted
        return row | {"error": _one_line(error)}


def _outcome(work: Work, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    expected, limit = estimate(work), options.max_estimated_seconds
    if expected > limit:
        return {"skipped": f"estimated {number(expected)} s for one run, limit {limit:g} s"}
    call, backend = prepare(work)
    peak = peak_mib(work, call, options.threads)
    timing = measure(call, work.device, seconds=options.seconds_per_row, graph=mode == "graph")
    return {"backend": backend, **asdict(timing), "peak_mib": peak}


def estimate(work: Work) -> float:
    """Seconds that one call may take, from its FLOPs and the time of a small case."""
    ratio = flops(work.case, work.implementation) / flops(CALIBRATION, work.implementation)
    return calibrate(replace(work, case=CALIBRATION)) * ratio


@cache
def calibrate(work: Work) -> float:
    """Seconds of one call, measured briefly."""
    return measure(prepare(work)[0], work.device, seconds=0.1, max_repeats=10).median_ms / 1e3


def release_memory(device: str) -> None:
    """Lets no row start with the leftovers of another."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def describe(row: dict[str, Any]) -> str:
    """A row in one line."""
    keys = ("case", "implementation", "dtype", "pass", "mode")
    name = " ".join(row[key] for key in keys)
    if "median_ms" not in row:
        return f"{name}: {outcome_text(row)}"
    return f"{name}: {number(row['median_ms'])} ms, {number(row['peak_mib'])} MiB"


def describe_run(argv: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """All fields of a result but its rows."""
    return {
        "schema": SCHEMA,
        "command": shlex.join(["python", "-m", "benchmarks.run", *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "device": options.device,
        "variant": options.variant,
        "machine": {
            "device_name": device_name(options),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": options.threads,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if options.device == "cuda" else None,
            "triton": _version("triton"),
            "numba": _version("numba"),
            "quadtree_attention": quadtree_attention.__version__,
        },
    }


def device_name(options: argparse.Namespace) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()


def cpu_name() -> str:
    """The model of the CPU, or at least its architecture."""
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of this checkout, with "-dirty" if files differ from it; None if unknown."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() or None


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes the rows so far beside `path`, and puts them in its place once they are complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.partial")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    if result["complete"]:
        os.replace(unfinished, path)


def slug(text: str) -> str:
    """A name for a file: lower case, words joined by "-"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _list_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse_list(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; known: {', '.join(known)}")
        return names

    return parse_list


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _suffix(variant: str) -> str:
    return "" if variant == "B" else "-variant-a"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


if __name__ == "__main__":
    sys.exit(main())
