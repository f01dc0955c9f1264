# SPDX-License-Identifier: Apache-2.0
"""The table that compares attentions, from the result files of `benchmarks.attentions`."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.tables import (
    _MACHINE_FIELDS,
    _VERSION_FIELDS,
    ATTENTIONS,
    SCHEMA,
    _check_fields,
    _circumstances,
    _line,
    number,
)

LABELS = {  # in the order of the table
    "sr": "spatial reduction (PVTv2)",
    "sr-lepe": "spatial reduction + LePE",
    "window": "shifted windows (Swin)",
    "window-lepe": "shifted windows + LePE",
    "focal": "focal",
    "focal-lepe": "focal + LePE",
    "linear": "linear",
    "quadtree-a": "QuadTree-A",
    "quadtree-b-no-lepe": "QuadTree-B without LePE",
    "quadtree-b": "QuadTree-B (LePE, K 8)",
    "quadtree-b-k1": "QuadTree-B, K 1",
    "quadtree-b-k4": "QuadTree-B, K 4",
    "quadtree-b-k16": "QuadTree-B, K 16",
}
TOPK = {1: "quadtree-b-k1", 4: "quadtree-b-k4", 8: "quadtree-b", 16: "quadtree-b-k16"}
OURS = "quadtree-b"
LEPE = {  # without: with
    "sr": "sr-lepe",
    "window": "window-lepe",
    "focal": "focal-lepe",
    "quadtree-b-no-lepe": OURS,
}
COMPARED = tuple(name for name in LABELS if name == OURS or name not in TOPK.values())
RIVALS = tuple(name for name in COMPARED if not name.startswith(OURS))
METRICS = ("train/loss", "val/loss", "val/top1", "val/top5")
ORDER = (  # in which they are trained: the most important first
    "quadtree-b", "sr", "window", "quadtree-a", "focal", "linear", "sr-lepe", "window-lepe",
    "focal-lepe", "quadtree-b-no-lepe", "quadtree-b-k1", "quadtree-b-k4", "quadtree-b-k16",
)  # fmt: skip

Result = dict[str, Any]

NOT_YET = "not yet"
NOISE = 1.5  # points: the standard error of 65 to 70 % right out of 1,000 images

_RESULT_FIELDS = {
    "kind": str, "schema": int, "seeds": list, "sessions": list, "runs": list, "failures": list,
    "measurement": dict | None,
}  # fmt: skip
_SESSION_FIELDS = {
    "command": str, "date": str, "commit": str | None, "device": str, "machine": dict,
    "versions": dict,
}  # fmt: skip
_KEY_FIELDS = {"recipe": str, "seed": int, "epochs": int, "fingerprint": str}
_RUN_FIELDS = _KEY_FIELDS | {
    "data": str | None, "seconds": float, "beside": int, "final": dict, "best": dict,
    "history": dict, "session": str,
}  # fmt: skip
_FAILURE_FIELDS = _KEY_FIELDS | {"lines": list, "session": str}
_FINAL_FIELDS = {"loss": float, "top1": float, "top5": float}
_BEST_FIELDS = {"epoch": int, "top1": float}
_MEASUREMENT_FIELDS = _SESSION_FIELDS | {
    "batch": int, "image": int, "precision": str, "rows": list,
}  # fmt: skip
_ROW_FIELDS = {
    "recipe": str, "params": int, "macs": int, "median_ms": float, "q25_ms": float,
    "q75_ms": float, "repeats": int, "peak_mib": float | None,
}  # fmt: skip


def empty_result() -> Result:
    """A result without runs."""
    lists: Result = {"seeds": [], "sessions": [], "runs": [], "failures": []}
    return {"kind": ATTENTIONS, "schema": SCHEMA, **lists, "measurement": None}


def check_result(result: Result) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    _check_fields(result, _RESULT_FIELDS, "result")
    if (result["kind"], result["schema"]) != (ATTENTIONS, SCHEMA):
        found = f"{result['kind']!r}, schema {result['schema']}"
        raise ValueError(f"kind is {found}, expected {ATTENTIONS!r}, schema {SCHEMA}")
    for i, session in enumerate(result["sessions"]):
        _check_session(session, _SESSION_FIELDS, f"sessions[{i}]")
    for i, run in enumerate(result["runs"]):
        _check_run(run, f"runs[{i}]")
    for i, failure in enumerate(result["failures"]):
        _check_fields(failure, _FAILURE_FIELDS, f"failures[{i}]")
    if (measurement := result["measurement"]) is not None:
        _check_session(measurement, _MEASUREMENT_FIELDS, "measurement")
        for i, row in enumerate(measurement["rows"]):
            fields = {"recipe": str, "error": str} if "error" in row else _ROW_FIELDS
            _check_fields(row, fields, f"measurement.rows[{i}]")


def _check_session(session: Result, fields: dict[str, Any], where: str) -> None:
    _check_fields(session, fields, where)
    _check_fields(session["machine"], _MACHINE_FIELDS, f"{where}.machine")
    versions = _VERSION_FIELDS | {"timm": str, "pytorch_lightning": str | None}
    _check_fields(session["versions"], versions, f"{where}.versions")


def _check_run(run: Result, where: str) -> None:
    _check_fields(run, _RUN_FIELDS, where)
    _check_fields(run["final"], _FINAL_FIELDS, f"{where}.final")
    _check_fields(run["best"], _BEST_FIELDS, f"{where}.best")
    columns = dict.fromkeys(("epoch", "seconds", *METRICS), list)
    _check_fields(run["history"], columns, f"{where}.history")
    for name, column in run["history"].items():
        if len(column) != run["epochs"]:
            raise ValueError(f"{where}.history.{name} has {len(column)} of {run['epochs']} epochs")


def read_results(folder: Path) -> dict[str, Result]:
    """Every result file about attentions in a folder by its name, checked."""
    results = {}
    for path in sorted(folder.glob(f"{ATTENTIONS}*.json")):
        results[path.stem] = json.loads(path.read_text())
        try:
            check_result(results[path.stem])
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
    return results


def markdown(results: dict[str, Result]) -> str:
    """The sections of all result files."""
    return "\n\n".join(_section(*item) for item in results.items()) or "Not measured yet."


def _section(name: str, result: Result) -> str:
    runs = compared_runs(result)
    lines = [f"### {_machine(result)}: `{name}.json`", "", *_summary(runs), ""]
    lines += [*_table(result, runs), "", *_order(runs), *_lepe(runs), *_growth(runs)]
    lines += [*_missing(result, runs), *_pictures(runs)]
    return "\n".join([*lines, *_sources(name, result)])


def compared_runs(result: Result) -> dict[str, list[Result]]:
    """The runs of every recipe by seed; only those as long as most are, others do not compare."""
    lengths = Counter(run["epochs"] for run in result["runs"])
    epochs = max(lengths, key=lambda length: (lengths[length], length), default=0)
    runs = sorted(result["runs"], key=lambda run: run["seed"])
    names = dict.fromkeys([*LABELS, *(run["recipe"] for run in runs)])
    return {
        name: [run for run in runs if (run["recipe"], run["epochs"]) == (name, epochs)]
        for name in names
    }


def top1(runs: Sequence[Result], when: str = "final") -> float | None:
    """Mean over seeds, of the last epoch or of each run's best."""
    return fmean(run[when]["top1"] for run in runs) if runs else None


def label(name: str) -> str:
    return LABELS.get(name, name)


def _machine(result: Result) -> str:
    abouts = [*result["sessions"], *filter(None, [result["measurement"]])]
    names = dict.fromkeys(about["machine"]["device_name"] for about in abouts)
    return ", ".join(names) or NOT_YET


def _summary(runs: dict[str, list[Result]]) -> list[str]:
    every = _flat(runs)
    if not every:
        return ["No run has finished yet."]
    seeds = sorted({run["seed"] for run in every})
    data = ", ".join(sorted({run["data"] or "data of the recipe" for run in every}))
    return [
        f"Trained on {data} for {every[0]['epochs']} epochs, {len(every)} runs, seeds "
        f"{', '.join(map(str, seeds))}. Top-1 is the mean over the seeds in the column before it, "
        "± half the distance between the lowest and the highest. 1,000 validation images give "
        f"about ±{NOISE} points of sampling noise on top, which more seeds do not reduce.",
    ]


def _table(result: Result, runs: dict[str, list[Result]]) -> list[str]:
    measurement = result["measurement"] or {"rows": [], "batch": 0}
    rows = {row["recipe"]: row for row in measurement["rows"]}
    head = ["attention", "params M", "GMACs", "seeds", "top-1", "best epoch's", "loss"]
    head += ["images/s", "MiB"]
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for name, mine in runs.items():
        row = rows.get(name, {})
        cells = [label(name), _scaled(row, "params", 1e6), _scaled(row, "macs", 1e9)]
        cells += [str(len(mine)), _spread(mine, "final"), _spread(mine, "best"), _loss(mine)]
        cells += [_speed(row, measurement["batch"]), _scaled(row, "peak_mib", 1)]
        lines.append(_line(cells))
    return lines


def _loss(runs: Sequence[Result]) -> str:
    """Mean of the training loss of the last epoch."""
    losses = [run["history"]["train/loss"][-1] for run in runs]
    return f"{fmean(losses):.3f}" if losses else NOT_YET


def _scaled(row: Result, field: str, unit: float) -> str:
    if "error" in row:
        return "failed"
    return number(row[field] / unit) if row.get(field) is not None else NOT_YET


def _speed(row: Result, batch: int) -> str:
    return number(images_per_second(row, batch)) if "median_ms" in row else _scaled(row, "", 1)


def images_per_second(row: Result, batch: int) -> float:
    return 1e3 * batch / row["median_ms"]


def _spread(runs: Sequence[Result], when: str) -> str:
    if not runs:
        return NOT_YET
    values = [run[when]["top1"] for run in runs]
    spread = f" ± {(max(values) - min(values)) / 2:.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{spread}"


def _order(runs: dict[str, list[Result]]) -> list[str]:
    """What the runs say about the paper's order, and no more than that."""
    scores = {name: score for name in RIVALS if (score := top1(runs[name])) is not None}
    ours = top1(runs[OURS])
    claim = "The paper finds QuadTree-B ahead of the other attentions."
    if ours is None or not scores:
        return [f"{claim} Whether that holds here cannot be told yet.", ""]
    rivals = sorted(scores, key=lambda name: -scores[name])
    ahead = [name for name in rivals if scores[name] >= ours]
    if ahead:
        verdict = f"That does not hold here: not behind its {ours:.1f} are {_list(ahead, scores)}."
    else:
        next_best = _list(rivals[:1], scores)
        verdict = f"That holds here: it has {ours:.1f}, the next is {next_best}."
    near = [name for name in rivals if abs(scores[name] - ours) <= NOISE]
    noise = f"Within {NOISE} points of it, too close to call: {_list(near, scores)}."
    absent = [label(name) for name in RIVALS if not runs[name]]
    missing = f"Not yet compared: {', '.join(absent)}."
    said = [claim, verdict, *([noise] if near else []), *([missing] if absent else [])]
    return [" ".join(said), ""]


def _list(names: Iterable[str], scores: dict[str, float]) -> str:
    return ", ".join(f"{label(name)} ({scores[name]:.1f})" for name in names)


def _lepe(runs: dict[str, list[Result]]) -> list[str]:
    """What the position encoding brings to each attention that was trained with and without."""
    gains = []
    for without, with_ in LEPE.items():
        before, after = top1(runs[without]), top1(runs[with_])
        if before is not None and after is not None:
            name = label(without).removesuffix(" without LePE")
            gains.append(f"{name} {after - before:+.1f}")
    return [f"Points of top-1 that LePE adds: {', '.join(gains)}.", ""] if gains else []


def _growth(runs: dict[str, list[Result]]) -> list[str]:
    """What keeping more cells brings."""
    scores = {k: score for k, name in TOPK.items() if (score := top1(runs[name])) is not None}
    if len(scores) < 2:
        return []
    values = list(scores.values())
    rises = all(a < b for a, b in pairwise(values))
    text = ", ".join(f"K {k}: {score:.1f}" for k, score in scores.items())
    what = "rises with every step of K" if rises else "does not rise with every step of K"
    close = max(values) - min(values) <= NOISE
    doubt = f", and all are within {NOISE} points" if close else ""
    return [f"Cells kept per query: top-1 {what}{doubt} ({text}).", ""]


def _missing(result: Result, runs: dict[str, list[Result]]) -> list[str]:
    """Runs that were asked for, or belong to the table, and are not there."""
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
    if unmeasured:
        lines.append(f"- speed and memory of {', '.join(unmeasured)}: {NOT_YET}")
    return ["Missing:", "", *lines, ""] if lines else []


def _pictures(runs: dict[str, list[Result]]) -> list[str]:
    if not _flat(runs):
        return []
    lines = ["![Loss and accuracy over epochs](attentions-curves.png)", ""]
    if any(runs[name] for name in TOPK.values()):
        lines += ["![Accuracy and speed over K](attentions-topk.png)", ""]
    return lines


def _sources(name: str, result: Result) -> list[str]:
    """How, when and where all of it was made."""
    lines = []
    for session in result["sessions"]:
        made = [run for run in result["runs"] if run["session"] == session["date"]]
        beside = max((run["beside"] for run in made), default=0)
        minutes = number(sum(run["seconds"] for run in made) / 60)
        lines += [f"Trained ({len(made)} runs, {minutes} minutes in all, up to {beside} others"]
        lines[-1] += f" beside a run): {_about(name, session)}"
        lines += ["", f"    {session['command']}", ""]
    if (measurement := result["measurement"]) is not None:
        shape = f"{measurement['batch']} x 3 x {measurement['image']} x {measurement['image']}"
        lines += [f"Measured ({shape}, {measurement['precision']}): {_about(name, measurement)}"]
        lines += ["", f"    {measurement['command']}", ""]
    return lines[:-1]


def _about(name: str, session: Result) -> str:
    return f"{session['machine']['device_name']}. {_circumstances(name, session)[2]}"


def _flat(runs: dict[str, list[Result]]) -> list[Result]:
    return [run for mine in runs.values() for run in mine]
