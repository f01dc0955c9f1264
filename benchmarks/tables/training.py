# SPDX-License-Identifier: Apache-2.0
"""The tables and sentences of comparisons by training.

Columns of a table are a heading, a source and a format. Sources: `runs`; `final.X` and `best.X`,
scores of the last and of the best epoch; `last.X`, a column of the history at its end; `epochs.X`,
its mean but for the first epoch; `step.X`, of measured training steps. Formats: `count`,
`mean DIGITS`, `spread DIGITS` (the mean ± half of the range) and `number [UNIT]`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.result import Result, Row
from benchmarks.tables import words
from benchmarks.tables.table import Column, View, find, fold, number
from benchmarks.tables.views import PROVENANCE, circumstances, errors_of, shape, stored_views
from benchmarks.training import comparison as compared
from benchmarks.training.comparison import PEAK, SYNTHETIC, Comparison, rows_of, short
from benchmarks.training.differences import ERRORS, Difference, difference

NOT_YET = "not yet"
JUDGED = (SYNTHETIC, "scannet")  # sets with a sentence about their order
JUDGE, DEGREES = "poselib", "10"  # the AUC that the sentence uses
RUN_COSTS = (("s per epoch", "epochs.seconds", "number"), ("peak MiB", f"epochs.{PEAK}", "number"))
STEP_COSTS = (("samples/s", "step.speed", "number"), ("MiB of a step", f"step.{PEAK}", "number"))

Runs = Mapping[str, Sequence[Row]]


def section(name: str, result: Result) -> str:
    """Section of a result file: heading, table, sentences, missing runs, pictures, provenance."""
    comparison = compared.comparisons()[result["kind"].partition("/")[2]]
    runs = compared.compared_runs(comparison, result)
    trained = [run["machine"] for run in result["runs"] if "size" not in run["settings"]]
    devices = ", ".join(dict.fromkeys(machine["device_name"] for machine in trained))
    pictures = comparison.pictures if any(runs.values()) else {}
    scores = pooled(comparison, result)
    paragraphs = [
        [f"### {devices or NOT_YET}"],
        [_summary(comparison, runs)],
        _table(comparison, result, runs).markdown([{"case": {"recipe": name}} for name in runs]),
        *_paired_tables(comparison, runs),
        *(view.markdown(scores) for view in stored_views()["quality/matching"]),
        *([sentence] for sentence in _sentences(comparison, result, runs)),
        *_missing(comparison, result, runs),
        *([f"![{about}]({file})"] for file, about in pictures.items()),
        fold(PROVENANCE, _sources(name, result)),
    ]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _summary(comparison: Comparison, runs: Runs) -> str:
    every = [row["case"] for mine in runs.values() for row in mine]
    if not every:
        return "No run has finished yet."
    seeds = ", ".join(map(str, sorted({case["seed"] for case in every})))
    data = ", ".join(sorted({case["data"] or "data of the recipe" for case in every}))
    what = f"synthetic scenes with textures of {data}" if comparison.data == "textures" else data
    text = f"Trained on {what} for {every[0]['epochs']} epochs, {len(every)} runs, seeds {seeds}."
    alone = max(map(len, runs.values())) == 1
    chance = " One seed each: the variance between seeds is unknown." if alone else ""
    return f"{text} {comparison.note}{chance}"


# ---- the table


def _table(comparison: Comparison, result: Result, runs: Runs) -> View:
    steps = compared.steps_of(result)
    scores = [(title, f"final.{short(m)}", "spread 2") for m, title in comparison.scores.items()]
    best = ("best epoch", f"best.{short(comparison.score)}", "spread 2")
    loss = ("training loss", f"last.{comparison.losses[0]}", "spread 3")
    costs = STEP_COSTS if steps else RUN_COSTS
    columns = comparison.columns or [("runs", "runs", "count"), *scores, best, loss, *costs]

    def cell(source: str, form: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            name, step = row["case"]["recipe"], steps.get(row["case"]["recipe"], {})
            if source.startswith("step.") and "error" in step:
                return "failed"
            return _text(_values(result, runs[name], step, source), form)

        return text

    shown = [Column(title, cell(source, form), str) for title, source, form in columns]
    lines = [{"case": {"recipe": name}} for name in runs]
    shown = [c for c in shown if any(c.value(line) != NOT_YET for line in lines)] or shown
    return View([Column("attention", "case.recipe", comparison.label, words=True), *shown])


def _values(result: Result, runs: Sequence[Row], step: Row, source: str) -> list[Any]:
    """Values of a source in all runs, or in a measured step."""
    what, _, name = source.partition(".")
    if what == "step":
        speed = name == "speed" and step
        value = compared.samples_per_second(result, step) if speed else None
        found = [value if speed else step.get("values", {}).get(name)]
    elif what == "runs":
        found = list(runs)
    elif what in ("final", "best"):
        found = [row["values"][what][name] for row in runs]
    else:
        columns = [row["details"]["history"].get(name, []) for row in runs]
        last = what == "last"
        found = [v for column in columns for v in (column[-1:] if last else column[1:] or column)]
    return [value for value in found if value is not None]


def _text(values: Sequence[Any], form: str) -> str:
    what, _, digits = form.partition(" ")
    if what == "count":
        return str(len(values))
    if not values:
        return NOT_YET
    if what == "number":
        return number(fmean(values) / float(digits or 1))
    half = (max(values) - min(values)) / 2
    spread = f" ± {half:.{digits}f}" if what == "spread" and len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


# ---- sentences


def _sentences(comparison: Comparison, result: Result, runs: Runs) -> list[str]:
    metric, digits = comparison.scores[comparison.score], comparison.digits
    scores = _means(runs, comparison.score)
    rows = pooled(comparison, result)
    said = _verdict_on_runs(comparison, scores)
    if comparison.paired:
        said = _verdicts_on_images(comparison, runs)
    if comparison.weights:
        said = _verdicts_on_pairs(comparison, rows)
    if comparison.claim:
        said = [comparison.claim, *(said or ["There are not enough runs to test this yet."])]
    sentences = [" ".join(said)] if said else []
    pairs = {
        comparison.label(without).removesuffix(" without LePE"): (scores[without], scores[with_])
        for without, with_ in comparison.lepe.items()
        if {without, with_} <= scores.keys()
    }
    sentences += [words.gains(metric, pairs, digits)] if pairs else []
    if comparison.weights:
        metric = f"AUC@{DEGREES}° on {SYNTHETIC}"
        scores = {r["case"]["recipe"]: area(r) for r in rows if r["case"]["set"] == SYNTHETIC}
    steps = {k: scores[variant] for k, variant in comparison.topk.items() if variant in scores}
    if len(steps) > 1:
        sentences.append(words.growth(metric, steps, comparison.noise, digits))
    return sentences


def _means(runs: Runs, metric: str) -> dict[str, float]:
    """Mean of a final score over seeds, by variant."""
    finals = {k: [row["values"]["final"][short(metric)] for row in runs[k]] for k in runs}
    return {name: fmean(values) for name, values in finals.items() if values}


def _verdict(
    comparison: Comparison,
    title: str,
    scores: Mapping[str, float],
    leads: Mapping[str, tuple[float, ...]],
    where: str = "",
) -> str:
    """Sentence about ours and others, by their lead, its margin and, if known, its error."""
    others = [words.Other(comparison.label(k), scores[k], *lead) for k, lead in leads.items()]
    label = f"{where}{comparison.label(comparison.ours)}"
    return words.verdict(label, title, scores[comparison.ours], others, comparison.digits)


def _verdict_on_runs(comparison: Comparison, scores: Mapping[str, float]) -> list[str]:
    """Verdict by means over seeds and the known noise."""
    there = [name for name in comparison.baselines if name in scores]
    if comparison.ours not in scores or not there:
        return []
    ours, noise = scores[comparison.ours], comparison.noise
    leads = {name: (scores[name] - ours, noise) for name in there}
    said = _verdict(comparison, comparison.scores[comparison.score], scores, leads)
    absent = [comparison.label(name) for name in comparison.baselines if name not in there]
    missing = [f"Not yet compared: {', '.join(absent)}."] if absent else []
    return [f"{said} (differences up to {noise} are too close to call).", *missing]


def _differences(comparison: Comparison, runs: Runs, metric: str) -> dict[str, Difference]:
    """Advantage of every other variant over ours."""
    ours, sign = runs.get(comparison.ours, []), comparison.sign(metric)
    found = {name: difference(runs[name], ours, short(metric), sign) for name in runs}
    return {name: d for name, d in found.items() if d is not None and name != comparison.ours}


def _verdicts_on_images(comparison: Comparison, runs: Runs) -> list[str]:
    """Verdicts by differences on the same images and seeds, for the first two scores."""
    said = []
    for metric, title in list(comparison.scores.items())[:2]:
        found = _differences(comparison, runs, metric)
        leads = {name: (d.ahead, ERRORS * d.error, d.error) for name, d in found.items()}
        if leads:
            said.append(f"{_verdict(comparison, title, _means(runs, metric), leads)}.")
    rule = "± is the standard error over seeds and images; the threshold is two standard errors."
    return [*said, rule] if said else []


def _paired_tables(comparison: Comparison, runs: Runs) -> list[list[str]]:
    """One table per score (the first two), one line per other attention."""
    tables = []
    for metric, title in list(comparison.scores.items())[:2] if comparison.paired else []:
        lines = [f"| {title}: better than {comparison.label(comparison.ours)} by | difference | "
                 "s.e. images | s.e. seeds | seeds | significant | images and seeds needed |",
                 "| --- | ---: | ---: | ---: | ---: | --- | ---: |"]  # fmt: skip
        for name, d in _differences(comparison, runs, metric).items():
            digits = comparison.digits + 1
            errors = f"{d.images:.{digits}f} | {d.seeds:.{digits}f} | {d.count}"
            more = "-" if d.is_clear else f"{number(d.more)} times" if d.count > 1 else "unknown"
            lines.append(f"| {comparison.label(name)} | {d.ahead:+.{digits}f} | {errors} | "
                         f"{'yes' if d.is_clear else 'no'} | {more} |")  # fmt: skip
        tables += [lines] if len(lines) > 2 else []
    return tables


def _verdicts_on_pairs(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Verdicts by the scores of all pairs and the standard error of their difference."""
    said = []
    for set_ in JUDGED:
        found = {row["case"]["recipe"]: row for row in rows if row["case"]["set"] == set_}
        if (ours := found.get(comparison.ours)) is None:
            continue
        there = [name for name in comparison.baselines if name in found]
        differences = {name: auc_difference(found[name], ours) for name in there}
        leads = {name: (ahead, 2 * error, error) for name, (ahead, error) in differences.items()}
        scores = {name: area(row) for name, row in found.items()}
        where = f"On {set_} ({pairs_of(ours)} pairs) "
        said.append(f"{_verdict(comparison, f'AUC@{DEGREES}° ({JUDGE})', scores, leads, where)}.")
    rule = "± is the standard error over the same pairs; the threshold is two standard errors."
    return [*said, rule] if said else []


def area(row: Row) -> float:
    """AUC of a row, in percent."""
    areas: dict[str, float] = row["values"]["estimators"][JUDGE]["auc"]
    return areas[DEGREES]


def pairs_of(row: Row) -> int:
    """Number of pairs of the set; a pooled row counts them once per seed."""
    return row["values"]["pairs"] // row["values"]["seeds"]


def auc_difference(first: Row, second: Row) -> tuple[float, float]:
    """Difference in AUC points (first minus second) and its standard error over pairs.

    The contribution of a pair, whose mean over pairs is nearly the AUC, is averaged over seeds.
    """
    shares = []
    for row in (first, second):
        errors, pairs = errors_of(row, JUDGE), pairs_of(row)
        found = [0.0 if e is None else 100 * max(0.0, 1 - e / float(DEGREES)) for e in errors]
        shares.append([fmean(found[i::pairs]) for i in range(pairs)])
    differences = [a - b for a, b in zip(*shares, strict=True)]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return fmean(differences), error


def pooled(comparison: Comparison, result: Result) -> list[Row]:
    """One row per set and variant: scores averaged over seeds, errors of all their pairs.

    Sets are in the order in which they were evaluated, variants in that of the table.
    """
    rows, found = compared.scored_rows(result), []
    names = dict.fromkeys([*comparison.variants, *(row["case"]["recipe"] for row in rows)])
    for set_ in dict.fromkeys(row["case"]["set"] for row in rows):
        for name in names:
            key = {"set": set_, "recipe": name}
            if mine := [row for row in rows if key.items() <= row["case"].items()]:
                found.append({"case": key | {"method": comparison.label(name)}, **_pool(mine)})
    return found


def _pool(rows: Sequence[Row]) -> dict[str, Any]:
    every = [row["values"] for row in rows]
    estimators: dict[str, Any] = {}
    for name, score in every[0]["estimators"].items():
        areas = [values["estimators"][name]["auc"] for values in every]
        estimators[name] = {"auc": {key: fmean(auc[key] for auc in areas) for key in score["auc"]}}
    errors = {name: [e for row in rows for e in errors_of(row, name)] for name in estimators}
    means = ("matches", "precision", "median_seconds")
    values = {key: fmean(found[key] for found in every) for key in means}
    values |= {"truth": every[0]["truth"], "pairs": sum(found["pairs"] for found in every)}
    values |= {"seeds": len(rows), "estimators": estimators}
    return {"values": values, "details": {"errors": errors}}


# ---- missing runs and provenance


def _missing(comparison: Comparison, result: Result, runs: Runs) -> list[list[str]]:
    """Requested runs, scores and speeds without a result."""
    lines = []
    wanted = {s for run in result["runs"] for s in run["settings"].get("seeds", ())} or {0}
    failed = [row for row in result["rows"] if row["kind"] == "run" and "error" in row]
    for name, mine in runs.items():
        for seed in sorted(wanted - {row["case"]["seed"] for row in mine}):
            row = find(failed, {"recipe": name, "seed": seed})
            outcome = f"failed: {row['error'].splitlines()[-1]}" if row else NOT_YET
            lines.append(f"- {comparison.label(name)}, seed {seed}: {outcome}")
    steps = compared.steps_of(result)
    unmeasured = [comparison.label(name) for name in runs if name not in steps]
    if unmeasured and (steps or comparison.columns):
        lines.append(f"- speed and memory of {', '.join(unmeasured)}: {NOT_YET}")
    scored = compared.scored_rows(result)
    for row in (row for mine in runs.values() for row in mine if comparison.weights):
        key = {name: row["case"][name] for name in ("recipe", "seed")}
        if find(scored, key) is None:
            label = comparison.label(key["recipe"])
            lines.append(f"- scores of {label}, seed {key['seed']}: {NOT_YET}")
    return [["Missing:"], lines] if lines else []


def _sources(name: str, result: Result) -> list[str]:
    """Result file, commands, dates and machines, training first."""
    lines = [f"`benchmarks/results/{name}.json`"]
    for kind, said in SAID.items():
        for i, run in enumerate(result["runs"]):
            if made := [row for row in rows_of(result, kind) if row["run"] == i]:
                where = f"{run['machine']['device_name']}. {circumstances(run)}"
                lines += ["", f"{said(run, made, result)}: {where}", "", f"    {run['command']}"]
    return lines


def _trained(run: Result, rows: Sequence[Row], result: Result) -> str:
    beside = max(row["values"]["beside"] for row in rows)
    minutes = number(sum(row["values"]["seconds"] for row in rows) / 60)
    runs = f"{len(rows)} runs, {minutes} minutes in all"
    return f"Trained ({runs}, up to {beside} other runs at the same time)"


def _measured(run: Result, rows: Sequence[Row], result: Result) -> str:
    settings = run["settings"]
    image = f" of {shape(settings['image'])}" if "image" in settings else ""
    samples = f"{settings['batch']} samples{image}"
    return f"Measured (training steps of {samples}, {settings['precision']})"


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


SAID = {"run": _trained, "step": _measured, "memory": lambda *_: "Memory",
        "score": _scored}  # fmt: skip
