# SPDX-License-Identifier: Apache-2.0
"""Result files of attentions that were compared by training, whatever the task: their common part.

The fields, the runs that compare, and what a page says about missing runs and about how, when and
where the others were made.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import (
    _MACHINE_FIELDS,
    _VERSION_FIELDS,
    SCHEMA,
    _check_fields,
    _circumstances,
    check_kind,
    number,
    read_checked,
)

Result = dict[str, Any]

NOT_YET = "not yet"
NOT_MEASURED = "Not measured yet."
SESSION_FIELDS = {
    "command": str, "date": str, "commit": str | None, "device": str, "machine": dict,
    "versions": dict,
}  # fmt: skip
_RESULT_FIELDS = {
    "kind": str, "schema": int, "seeds": list, "sessions": list, "runs": list, "failures": list,
    "measurement": dict | None,
}  # fmt: skip
_KEY_FIELDS = {"recipe": str, "seed": int, "epochs": int, "fingerprint": str}
_RUN_FIELDS = _KEY_FIELDS | {
    "data": str | None, "seconds": float, "beside": int, "final": dict, "best": dict,
    "history": dict, "session": str,
}  # fmt: skip
_FAILURE_FIELDS = _KEY_FIELDS | {"lines": list, "session": str}
MEASUREMENT_FIELDS = SESSION_FIELDS | {
    "batch": int, "image": int, "precision": str, "rows": list,
}  # fmt: skip
STEP_FIELDS = {
    "recipe": str, "params": int, "median_ms": float, "q25_ms": float, "q75_ms": float,
    "repeats": int, "peak_mib": float | None,
}  # fmt: skip
ROW_FIELDS = STEP_FIELDS | {"macs": int}


def empty_result(kind: str) -> Result:
    """A result without runs."""
    lists: Result = {"seeds": [], "sessions": [], "runs": [], "failures": []}
    return {"kind": kind, "schema": SCHEMA, **lists, "measurement": None}


def check_common(
    result: Result,
    kind: str,
    *,
    check_run: Callable[[Result, str], None],
    more_fields: Mapping[str, Any] | None = None,
    measurement_fields: Mapping[str, Any] = MEASUREMENT_FIELDS,
    row_fields: Mapping[str, Any] = ROW_FIELDS,
) -> None:
    """Checks the fields of a result file.

    Args:
        result: Its content.
        kind: What it must be.
        check_run: Checks a run, whose place in the file comes second.
        more_fields: Fields of the file that others do not have.
        measurement_fields: Of what `measure` found.
        row_fields: Of its rows that did not fail.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    _check_fields(result, _RESULT_FIELDS | dict(more_fields or {}), "result")
    check_kind(result, kind, SCHEMA)
    for i, session in enumerate(result["sessions"]):
        check_session(session, SESSION_FIELDS, f"sessions[{i}]")
    for i, run in enumerate(result["runs"]):
        check_run(run, f"runs[{i}]")
    for i, failure in enumerate(result["failures"]):
        _check_fields(failure, _FAILURE_FIELDS, f"failures[{i}]")
    if (measurement := result["measurement"]) is not None:
        check_session(measurement, measurement_fields, "measurement")
        for i, row in enumerate(measurement["rows"]):
            fields = {"recipe": str, "error": str} if "error" in row else dict(row_fields)
            _check_fields(row, fields, f"measurement.rows[{i}]")


def check_session(
    session: Result,
    fields: Mapping[str, Any],
    where: str,
    versions: Mapping[str, Any] | None = None,
) -> None:
    """Checks what a file says about a command; `versions` are those of more libraries."""
    _check_fields(session, dict(fields), where)
    _check_fields(session["machine"], _MACHINE_FIELDS, f"{where}.machine")
    own = _VERSION_FIELDS | {"timm": str, "pytorch_lightning": str | None} | dict(versions or {})
    _check_fields(session["versions"], own, f"{where}.versions")


def check_run_of(
    run: Result,
    where: str,
    *,
    final: Mapping[str, Any],
    best: Mapping[str, Any],
    columns: Iterable[str],
    more_fields: Mapping[str, Any] | None = None,
) -> None:
    """Checks a run that has these scores and these columns of history."""
    _check_fields(run, _RUN_FIELDS | dict(more_fields or {}), where)
    _check_fields(run["final"], dict(final), f"{where}.final")
    _check_fields(run["best"], dict(best), f"{where}.best")
    _check_fields(run["history"], dict.fromkeys(columns, list), f"{where}.history")
    told = run["history"]["epoch"]
    if not told or told[-1] != run["epochs"]:
        raise ValueError(f"{where}.history ends with epoch {told[-1:]} of {run['epochs']}")
    for name, column in run["history"].items():
        if len(column) != len(told):
            raise ValueError(f"{where}.history.{name} has {len(column)} of {len(told)} epochs")


def read_results_of(folder: Path, kind: str, check: Callable[[Result], None]) -> dict[str, Result]:
    """Every result file of a kind in a folder by its name, checked."""
    return read_checked(folder.glob(f"{kind}*.json"), check)


def runs_of(result: Result, names: Iterable[str]) -> dict[str, list[Result]]:
    """The runs of every recipe by seed; only those as long as most are, others do not compare."""
    lengths = Counter(run["epochs"] for run in result["runs"])
    epochs = max(lengths, key=lambda length: (lengths[length], length), default=0)
    runs = sorted(result["runs"], key=lambda run: run["seed"])
    names = dict.fromkeys([*names, *(run["recipe"] for run in runs)])
    return {
        name: [run for run in runs if (run["recipe"], run["epochs"]) == (name, epochs)]
        for name in names
    }


def flat(runs: Mapping[str, Sequence[Result]]) -> list[Result]:
    return [run for mine in runs.values() for run in mine]


def scaled(row: Result, field: str, unit: float) -> str:
    """A cell of what was measured."""
    if "error" in row:
        return "failed"
    return number(row[field] / unit) if row.get(field) is not None else NOT_YET


def samples_per_second(row: Result, batch: int) -> float:
    return 1e3 * batch / row["median_ms"]


def speed(row: Result, batch: int) -> str:
    return number(samples_per_second(row, batch)) if "median_ms" in row else scaled(row, "", 1)


def machines(result: Result) -> str:
    """The devices that the result is from."""
    abouts = [*result["sessions"], *filter(None, [result["measurement"]])]
    names = dict.fromkeys(about["machine"]["device_name"] for about in abouts)
    return ", ".join(names) or NOT_YET


def missing_runs(
    result: Result,
    runs: Mapping[str, Sequence[Result]],
    label: Callable[[str], str],
    *,
    speeds: bool = True,
) -> list[str]:
    """Runs that were asked for, or belong to the table, and are not there; speeds if asked for."""
    reasons = {(x["recipe"], x["seed"]): x["lines"][-1] for x in result["failures"]}
    lines = []
    for name, mine in runs.items():
        there = {run["seed"] for run in mine}
        for seed in result["seeds"] or [0]:
            reason = reasons.get((name, seed))
            if seed not in there:
                outcome = f"failed: {reason}" if reason else NOT_YET
                lines.append(f"- {label(name)}, seed {seed}: {outcome}")
    measured = {row["recipe"] for row in (result["measurement"] or {"rows": []})["rows"]}
    unmeasured = [label(name) for name in runs if name not in measured]
    if unmeasured and speeds:
        lines.append(f"- speed and memory of {', '.join(unmeasured)}: {NOT_YET}")
    return lines


def sources(name: str, result: Result, shape: str) -> list[str]:
    """How, when and where all of it was made; `shape` is that of what was measured."""
    lines = []
    for session in result["sessions"]:
        made = [run for run in result["runs"] if run["session"] == session["date"]]
        beside = max((run["beside"] for run in made), default=0)
        minutes = number(sum(run["seconds"] for run in made) / 60)
        lines += [f"Trained ({len(made)} runs, {minutes} minutes in all, up to {beside} others"]
        lines[-1] += f" beside a run): {about(name, session)}"
        lines += ["", f"    {session['command']}", ""]
    if (measurement := result["measurement"]) is not None:
        lines += [f"Measured ({shape}, {measurement['precision']}): {about(name, measurement)}"]
        lines += ["", f"    {measurement['command']}", ""]
        if (memory := measurement.get("memory")) is not None:
            lines += [f"Memory, by itself: {about(name, memory)}"]
            lines += ["", f"    {memory['command']}", ""]
    return lines[:-1]


def about(name: str, session: Result) -> str:
    return f"{session['machine']['device_name']}. {_circumstances(name, session)[2]}"
