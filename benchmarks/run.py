# SPDX-License-Identifier: Apache-2.0
"""Measures quadtree attention next to full attention: `python -m benchmarks.run --help`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import GROWTH, Work, find_cases, flops, implementations, prepare
from benchmarks.measure import measure, peak_mib, use_threads
from benchmarks.program import (
    OneLineParser,
    at_least_one,
    describe_run,
    device_name,
    list_of,
    one_line_of,
    positive,
    release_memory,
    slug,
    write,
)
from benchmarks.tables import (
    PASSES,
    RESULTS,
    check_result,
    number,
    outcome_text,
    text_table,
)

DTYPES = ("float32", "bfloat16", "float16", "float64")
MODES = ("eager", "graph")
CALIBRATION = GROWTH[0]


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
    parser = OneLineParser(prog="python -m benchmarks.run", description=__doc__)
    add = parser.add_argument
    available = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cpu", "cuda"), default=available)
    add("--cases", default="all", help="all, growth, or names separated by commas")
    add(
        "--implementations",
        type=list_of(implementations()),
        default="quadtree,reference,sdpa",
        help="quadtree[:backend], reference, sdpa",
    )
    add("--dtypes", type=list_of(DTYPES), default="float32,bfloat16")
    add("--passes", type=list_of(PASSES), default=",".join(PASSES))
    add("--variant", choices=("A", "B"), default="B")
    add("--modes", type=list_of(MODES), default="eager", help="eager, graph (CUDA graph)")
    add("--seconds-per-row", type=positive, default=2.0, help="time for the repeats of a row")
    add("--max-estimated-seconds", type=positive, default=60.0, help="skip slower calls")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
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
        return row | {"error": one_line_of(error)}


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


def describe(row: dict[str, Any]) -> str:
    """A row in one line."""
    keys = ("case", "implementation", "dtype", "pass", "mode")
    name = " ".join(row[key] for key in keys)
    if "median_ms" not in row:
        return f"{name}: {outcome_text(row)}"
    return f"{name}: {number(row['median_ms'])} ms, {number(row['peak_mib'])} MiB"


def _suffix(variant: str) -> str:
    return "" if variant == "B" else "-variant-a"


if __name__ == "__main__":
    sys.exit(main())
