# SPDX-License-Identifier: Apache-2.0
"""The tables and sentences of comparisons by training.

Columns of a table are a heading, a source and a format. Sources: `runs`; `final.X` and `best.X`,
scores of the last and of the best epoch; `last.X`, a column of the history at its end; `epochs.X`,
its mean but for the first epoch; `step.X`, of measured training steps. Formats: `count`,
`mean DIGITS`, `spread DIGITS` (the mean ± half of the range) and `number [UNIT]`.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.result import Result, Row
from benchmarks.tables.table import Column, View, number, outcome_of, shape, word
from benchmarks.tables.views import TRUTHS, circumstances, errors_of, matching_view
from benchmarks.tables.words import Other, gains, growth, verdict
from benchmarks.training.comparison import (
    PEAK,
    SYNTHETIC,
    Comparison,
    compared_runs,
    comparisons,
    rows_of,
    samples_per_second,
    scored_rows,
    short,
    steps_of,
)

NOT_YET = "not yet"
JUDGED = (SYNTHETIC, "scannet")  # sets whose order is put in words
JUDGE, DEGREES = "poselib", "10"  # by this AUC
RUN_COSTS = (("s per epoch", "epochs.seconds", "number"), ("peak MiB", f"epochs.{PEAK}", "number"))
STEP_COSTS = (("samples/s", "step.speed", "number"), ("MiB of a step", f"step.{PEAK}", "number"))

Runs = Mapping[str, Sequence[Row]]


def section(name: str, result: Result) -> str:
    """Heading, table, sentences, what is missing, pictures and circumstances of a result file."""
    comparison = comparisons()[result["kind"].partition("/")[2]]
    runs = compared_runs(comparison, result)
    trained = [run["machine"] for run in result["runs"] if "size" not in run["settings"]]
    devices = ", ".join(dict.fromkeys(machine["device_name"] for machine in trained))
    paragraphs = [
        [f"### {devices or NOT_YET}: `{name}.json`"],
        [_summary(comparison, runs)],
        _table(comparison, result, runs).markdown([{"case": {"recipe": name}} for name in runs]),
        *(matching_view(truth).markdown(pooled(comparison, result)) for truth in TRUTHS),
        *([line] for line in _sentences(comparison, result, runs)),
        *_missing(comparison, result, runs),
        *([f"![{words}]({file})"] for file, words in comparison.pictures.items() if _flat(runs)),
        *_sources(result),
    ]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _flat(runs: Runs) -> list[Row]:
    return [row for mine in runs.values() for row in mine]


def _summary(comparison: Comparison, runs: Runs) -> str:
    every = [row["case"] for row in _flat(runs)]
    if not every:
        return "No run has finished yet."
    seeds = ", ".join(map(str, sorted({case["seed"] for case in every})))
    data = ", ".join(sorted({case["data"] or "data of the recipe" for case in every}))
    what = f"synthetic scenes with textures of {data}" if comparison.data == "textures" else data
    told = f"Trained on {what} for {every[0]['epochs']} epochs, {len(every)} runs, seeds {seeds}."
    alone = max(map(len, runs.values())) == 1
    chance = " One seed each: how much of a difference is chance is not known." if alone else ""
    return f"{told} {comparison.note}{chance}"


# ---- the table


def _table(comparison: Comparison, result: Result, runs: Runs) -> View:
    steps = steps_of(result)
    columns = comparison.columns or [
        ("runs", "runs", "count"),
        *((heading, f"final.{short(metric)}", "spread 2")
          for metric, heading in comparison.scores.items()),
        ("best epoch", f"best.{short(comparison.score)}", "spread 2"),
        ("training loss", f"last.{comparison.losses[0]}", "spread 3"),
        *(STEP_COSTS if steps else RUN_COSTS),
    ]  # fmt: skip

    def text(source: str, form: str) -> Any:
        def cell(row: Row) -> str:
            name = row["case"]["recipe"]
            if source.startswith("step."):
                return _step_text(result, steps.get(name), source.partition(".")[2], form)
            return _text(_values(runs[name], source), form)

        return cell

    return View(
        [
            word("attention", "case.recipe", comparison.label),
            *(Column(heading, text(source, form), str) for heading, source, form in columns),
        ]
    )


def _values(runs: Sequence[Row], source: str) -> list[Any]:
    """What all runs have of a source."""
    what, _, name = source.partition(".")
    if what == "runs":
        return list(runs)
    if what in ("final", "best"):
        return [row["values"][what][name] for row in runs]
    columns = [row["details"]["history"].get(name, []) for row in runs]
    if what == "last":
        return [column[-1] for column in columns]
    found = [value for column in columns for value in column[1:] or column]
    return [value for value in found if value is not None]


def _text(values: Sequence[Any], form: str) -> str:
    what, _, digits = form.partition(" ")
    if what == "count":
        return str(len(values))
    if not values:
        return NOT_YET
    mean = fmean(values)
    if what == "number":
        return number(mean / float(digits or 1))
    half = (max(values) - min(values)) / 2
    spread = f" ± {half:.{digits}f}" if what == "spread" and len(values) > 1 else ""
    return f"{mean:.{digits}f}{spread}"


def _step_text(result: Result, row: Row | None, name: str, form: str) -> str:
    if row is None:
        return NOT_YET
    if "error" in row:
        return "failed"
    value = samples_per_second(result, row) if name == "speed" else row["values"].get(name)
    return _text([] if value is None else [value], form)


# ---- sentences


def _sentences(comparison: Comparison, result: Result, runs: Runs) -> list[str]:
    metric, digits = comparison.scores[comparison.score], comparison.digits
    scores = {
        name: fmean(_values(mine, f"final.{short(comparison.score)}"))
        for name, mine in runs.items()
        if mine
    }
    said = _verdicts_on_pairs(comparison, result) if comparison.weights else []
    if not comparison.weights and comparison.ours in scores:
        said = _verdict_on_runs(comparison, scores)
    if comparison.claim:
        said = [comparison.claim, *(said or ["Whether that holds here cannot be told yet."])]
    sentences = [" ".join(said)] if said else []
    pairs = {
        comparison.label(without).removesuffix(" without LePE"): (scores[without], scores[with_])
        for without, with_ in comparison.lepe.items()
        if {without, with_} <= scores.keys()
    }
    sentences += [gains(metric, pairs, digits)] if pairs else []
    if comparison.weights:
        metric = f"AUC@{DEGREES}° on {SYNTHETIC}"
        rows = pooled(comparison, result)
        scores = {r["case"]["recipe"]: area(r) for r in rows if r["case"]["set"] == SYNTHETIC}
    steps = {k: scores[name] for k, name in comparison.topk.items() if name in scores}
    sentences += [growth(metric, steps, comparison.noise, digits)] if len(steps) > 1 else []
    return sentences


def _verdict_on_runs(comparison: Comparison, scores: Mapping[str, float]) -> list[str]:
    """From means over seeds and the noise that is known."""
    ours, noise = scores[comparison.ours], comparison.noise
    others = [
        Other(comparison.label(name), scores[name], scores[name] - ours, noise)
        for name in comparison.baselines
        if name in scores
    ]
    if not others:
        return []
    metric = comparison.scores[comparison.score]
    said = verdict(comparison.label(comparison.ours), metric, ours, others, comparison.digits)
    absent = [comparison.label(name) for name in comparison.baselines if name not in scores]
    missing = [f"Not yet compared: {', '.join(absent)}."] if absent else []
    return [f"{said} (differences up to {noise} are too close to call).", *missing]


def _verdicts_on_pairs(comparison: Comparison, result: Result) -> list[str]:
    """From the scores of all pairs, and the standard error of a difference over these."""
    rows = {(r["case"]["set"], r["case"]["recipe"]): r for r in pooled(comparison, result)}
    said = []
    for set_ in JUDGED:
        if (ours := rows.get((set_, comparison.ours))) is None:
            continue
        others = []
        for name in comparison.baselines:
            if (row := rows.get((set_, name))) is not None:
                ahead, error = difference(row, ours)
                others.append(Other(comparison.label(name), area(row), ahead, 2 * error, error))
        metric = f"AUC@{DEGREES}° ({JUDGE})"
        label = f"On {set_} ({pairs_of(ours)} pairs) {comparison.label(comparison.ours)}"
        said.append(f"{verdict(label, metric, area(ours), others, comparison.digits)}.")
    rule = "± is the standard error of the difference over the same pairs, and two of them decide."
    return [*said, rule] if said else []


def area(row: Row, degrees: str = DEGREES) -> float:
    """AUC of a row, in percent."""
    areas: dict[str, float] = row["values"]["estimators"][JUDGE]["auc"]
    return areas[degrees]


def pairs_of(row: Row) -> int:
    """Pairs of the set, of which a pooled row has those of every seed."""
    return row["values"]["pairs"] // row["values"].get("seeds", 1)


def difference(first: Row, second: Row) -> tuple[float, float]:
    """By how many points of AUC the first is ahead, and the standard error of that over pairs."""
    shares = [_shares(row) for row in (first, second)]
    differences = [a - b for a, b in zip(*shares, strict=True)]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return fmean(differences), error


def _shares(row: Row) -> list[float]:
    """What each pair adds to the AUC, whose mean over pairs it is nearly; means over seeds."""
    largest, pairs = float(DEGREES), pairs_of(row)
    shares = [
        0.0 if error is None else 100 * max(0.0, 1 - error / largest)
        for error in errors_of(row, JUDGE)
    ]
    return [fmean(shares[i::pairs]) for i in range(pairs)]


def pooled(comparison: Comparison, result: Result) -> list[Row]:
    """The scores by set and variant, one row each: means over seeds, the pairs of all of them.

    Sets are in the order in which they were evaluated, variants in that of the table.
    """
    rows, found = scored_rows(result), []
    names = dict.fromkeys([*comparison.variants, *(row["case"]["recipe"] for row in rows)])
    for set_ in dict.fromkeys(row["case"]["set"] for row in rows):
        for name in names:
            key = {"set": set_, "recipe": name}
            if mine := [row for row in rows if key.items() <= row["case"].items()]:
                found.append({"case": key | {"method": comparison.label(name)}, **_pool(mine)})
    return found


def _pool(rows: Sequence[Row]) -> dict[str, Any]:
    every = [row["values"] for row in rows]
    estimators = {
        name: {"auc": {
            key: fmean(values["estimators"][name]["auc"][key] for values in every)
            for key in score["auc"]
        }}
        for name, score in every[0]["estimators"].items()
    }  # fmt: skip
    errors = {name: [e for row in rows for e in errors_of(row, name)] for name in estimators}
    means = ("matches", "precision", "median_seconds")
    values = {key: fmean(found[key] for found in every) for key in means}
    values |= {"truth": every[0]["truth"], "pairs": sum(found["pairs"] for found in every)}
    values |= {"seeds": len(rows), "estimators": estimators}
    return {"values": values, "details": {"errors": errors}}


# ---- what is missing, and where the rest is from


def _missing(comparison: Comparison, result: Result, runs: Runs) -> list[list[str]]:
    """Runs that were asked for or belong to the table, their scores and their speeds."""
    lines = []
    wanted = {s for run in result["runs"] for s in run["settings"].get("seeds", ())} or {0}
    failures = {
        (row["case"]["recipe"], row["case"]["seed"]): outcome_of(row).splitlines()
        for row in result["rows"]
        if row["kind"] == "run" and "error" in row
    }
    for name, mine in runs.items():
        for seed in sorted(wanted - {row["case"]["seed"] for row in mine}):
            last = failures.get((name, seed))
            outcome = NOT_YET if last is None else f"failed: {last[-1].removeprefix('failed: ')}"
            lines.append(f"- {comparison.label(name)}, seed {seed}: {outcome}")
    steps = steps_of(result)
    unmeasured = [comparison.label(name) for name in runs if name not in steps]
    if unmeasured and (steps or comparison.columns):
        lines.append(f"- speed and memory of {', '.join(unmeasured)}: {NOT_YET}")
    if comparison.weights:
        scored = {(r["case"]["recipe"], r["case"]["seed"]) for r in scored_rows(result)}
        keys = [(row["case"]["recipe"], row["case"]["seed"]) for row in _flat(runs)]
        for name, seed in (key for key in keys if key not in scored):
            lines.append(f"- scores of {comparison.label(name)}, seed {seed}: {NOT_YET}")
    return [["Missing:"], lines] if lines else []


def _sources(result: Result) -> list[list[str]]:
    """How, when and where all of it was made, training first."""
    paragraphs = []
    for kind, words in (("run", _trained), ("step", _measured), ("memory", _memory),
                        ("score", _scored)):  # fmt: skip
        for i, run in enumerate(result["runs"]):
            if made := [row for row in rows_of(result, kind) if row["run"] == i]:
                where = f"{run['machine']['device_name']}. {circumstances(run)}"
                paragraphs += [[f"{words(run, made, result)}: {where}"], [f"    {run['command']}"]]
    return paragraphs


def _trained(run: Result, rows: Sequence[Row], result: Result) -> str:
    beside = max(row["values"]["beside"] for row in rows)
    minutes = number(sum(row["values"]["seconds"] for row in rows) / 60)
    runs = f"{len(rows)} runs, {minutes} minutes in all"
    return f"Trained ({runs}, up to {beside} others beside a run)"


def _measured(run: Result, rows: Sequence[Row], result: Result) -> str:
    settings = run["settings"]
    image = f" of {shape(settings['image'])}" if "image" in settings else ""
    samples = f"{settings['batch']} samples{image}"
    return f"Measured (training steps of {samples}, {settings['precision']})"


def _memory(run: Result, rows: Sequence[Row], result: Result) -> str:
    return "Memory, by itself"


def _scored(run: Result, rows: Sequence[Row], result: Result) -> str:
    scenes = run["settings"]["synthetic"]
    stored = [row["details"].get("weights") for row in rows_of(result, "run")]
    sizes = [weights["bytes"] for weights in stored if weights]
    weights = f", weights in float16, up to {number(max(sizes) / 2**20)} MiB" if sizes else ""
    return (
        f"Scored on a CPU ({SYNTHETIC}: {scenes['pairs']} pairs of {scenes['height']} x "
        f"{scenes['width']} of seed {scenes['seed']}, textures of "
        f"{scenes['textures'] or 'their own'}; others with a longer side of at most "
        f"{run['settings']['size']} pixels){weights}"
    )
