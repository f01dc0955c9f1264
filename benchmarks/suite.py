# SPDX-License-Identifier: Apache-2.0
"""Runs a suite: `python -m benchmarks speed|quality|paper SUITE`.

A suite is a module with the name of its kind. It has

- `plan(options) -> [[Work]]`: what to measure; one list is timed in turns;
- `prepare(work) -> call`: the call to time; or, where values are not those of one timed call,
  `measure_row(work, options) -> values`, with `details` among them; None for work that `prepare` is
  for.

And, where it is not as for the others: `check_options(parser, options)`, `values(work) -> values`
beside the times, `peak(work, options)` on a CPU, and `LIBRARIES` whose versions are noted. Its
options are declared in options.yaml, what its rows hold in kinds.yaml, its tables in
tables/views.yaml. Settings of a kind are options, or what `check_options` or `plan` adds to them.
"""

import importlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch

from benchmarks.measure import capture, cuda_peak_mib, measure, release_memory, use_threads
from benchmarks.options import add_options, complete, working_folder
from benchmarks.result import KINDS, OUT_OF_MEMORY, ResultFile, Row, describe, one_line_of
from benchmarks.tables import views
from benchmarks.tables.table import name_of, number, outcome_of
from quadtree_attention.errors import DataError
from quadtree_attention.tasks.predictor import out_of_memory


@dataclass(frozen=True)
class Work:
    """One row to measure."""

    case: dict[str, Any]  # what the row of the result says about it
    device: str = "cpu"  # or "cuda"
    more: dict[str, Any] = field(default_factory=dict)  # what else the suite has to know

    def __getitem__(self, key: str) -> Any:
        return self.case[key]


def cases(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """All combinations of values; the last key varies fastest. A "_" after a key is left out."""
    names = [name.rstrip("_") for name in axes]
    return [dict(zip(names, values, strict=True)) for values in product(*axes.values())]


class SkippedError(Exception):
    """Raised by a suite for work that is not to be measured; says why."""


def set_up(parser: ArgumentParser, kind: str) -> None:
    """Gives the parser of a suite its options, and what to do with them."""
    suite = importlib.import_module(f"benchmarks.{kind.replace('/', '.')}")
    parser.description = suite.__doc__
    add_options(parser, kind, suite)

    def check(options: Namespace) -> None:
        complete(parser, options, kind, suite)
        getattr(suite, "check_options", lambda *_: None)(parser, options)

    parser.set_defaults(run=partial(run, suite, kind), check_options=check)


def run(suite: ModuleType, kind: str, options: Namespace, argv: Sequence[str]) -> int:
    """Measures one list of works after the other, and writes what there is after each."""
    use_threads(options.threads, opencv="cv2" in sys.modules)  # as the suite imports it
    file = ResultFile(options.out, kind)
    with working_folder(getattr(options, "work", None)) as options.folder:
        planned = suite.plan(options)
        settings = {name: getattr(options, name) for name in KINDS[kind].get("settings", {})}
        file.begin(describe(argv, options, libraries=getattr(suite, "LIBRARIES", ()), **settings))
        for done, works in enumerate(planned, start=1):
            rows = measured(suite, works, options)
            release_memory(options.device)
            file.add(*rows, complete=done == len(planned))
            for row in rows:
                print(f"[{done}/{len(planned)}] {one_line(row)}", file=sys.stderr, flush=True)
    print(views.text(file.read()))
    print(f"\nwritten: {options.out}")
    return 0


def measured(suite: ModuleType, works: Sequence[Work], options: Namespace) -> list[Row]:
    """Measures rows in turns; one that fails says so instead. Bad data ends the command."""
    rows: list[Row] = [{"case": work.case} for work in works]
    calls = []
    if any("compile" in work.case.get("mode", "") for work in works):
        torch._dynamo.reset()  # once: it would discard what this list has compiled
    for row, work in zip(rows, works, strict=True):
        try:
            row["values"] = dict(getattr(suite, "values", lambda _: {})(work))
            found = getattr(suite, "measure_row", lambda *_: None)(work, options)
            if found is not None:
                row |= {"details": found.pop("details")} if "details" in found else {}
                row["values"] |= found
                continue
            call = suite.prepare(work)
            row["values"]["peak_mib"] = _peak(suite, work, call, options)
            graph = "graph" in work.case.get("mode", "")
            calls.append((row, capture(call) if graph else call))
        except DataError:
            raise
        except Exception as error:  # whatever happens to one row, the others are still wanted
            _fail(row, error)
    if not calls:
        return rows
    try:
        timed = [call for _, call in calls]
        timings = measure(*timed, device=options.device, seconds=options.seconds_per_row)
        for (row, _), timing in zip(calls, timings, strict=True):
            row["values"] |= timing
    except Exception as error:  # in the call of one row, after which none has all its turns
        for row, _ in calls:
            _fail(row, error)
    return rows


def _peak(suite: ModuleType, work: Work, call: Any, options: Namespace) -> float | None:
    if work.device == "cuda":
        return cuda_peak_mib(call)
    return suite.peak(work, options) if hasattr(suite, "peak") else None


def _fail(row: Row, error: Exception) -> None:
    """Puts the reason in the place of times; counts stay."""
    row.get("values", {}).pop("peak_mib", None)
    if not row.get("values"):
        row.pop("values", None)
    if isinstance(error, SkippedError):
        row["skipped"] = str(error)
    else:
        row["error"] = OUT_OF_MEMORY if out_of_memory(error) else one_line_of(error)


def one_line(row: Row) -> str:
    """A row in one line."""
    name, values = name_of(row["case"], " "), row.get("values", {})
    if "error" in row or "skipped" in row:
        return f"{name}: {outcome_of(row)}"
    units = {"macs": (1e9, "GMACs"), "median_ms": (1, "ms"), "peak_mib": (1, "MiB")}
    found = {key: values.get(key) for key in units if key in values}
    shown = [f"{number(v and v / units[key][0])} {units[key][1]}" for key, v in found.items()]
    return f"{name}: {', '.join(shown) or 'done'}"
