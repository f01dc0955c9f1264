# SPDX-License-Identifier: Apache-2.0
"""The tables that compare attentions in a matcher, from files of `benchmarks.match_attentions`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from benchmarks import attention_results
from benchmarks.attention_results import (
    NOT_MEASURED,
    NOT_YET,
    SESSION_FIELDS,
    STEP_FIELDS,
    Result,
    about,
    check_common,
    check_run_of,
    check_session,
    flat,
    machines,
    missing_runs,
    read_results_of,
    runs_of,
    scaled,
    sources,
    speed,
)
from benchmarks.matching_tables import (
    _ESTIMATOR_FIELDS,
    ESTIMATORS,
    KINDS,
    THRESHOLDS,
    _markdown_table,
    text_table,
)
from benchmarks.tables import MATCH_ATTENTIONS, _check_choice, _check_fields, _line, number

LABELS = {  # in the order of the tables
    "linear": "linear (LoFTR)",
    "full": "full",
    "spatial-reduction": "spatial reduction (8 x 8)",
    "quadtree-a": "QuadTree-A (K 8)",
    "quadtree-b-k1": "QuadTree-B, K 1",
    "quadtree-b-k4": "QuadTree-B, K 4",
    "quadtree-b": "QuadTree-B (K 8)",
}
SIFT = "sift"  # stands beside them, and is not trained
TOPK = {1: "quadtree-b-k1", 4: "quadtree-b-k4", 8: "quadtree-b"}
OURS = "quadtree-b"
RIVALS = tuple(name for name in LABELS if not name.startswith(OURS))
ORDER = (  # in which they are trained: the most important first
    "quadtree-b", "linear", "spatial-reduction", "quadtree-a", "quadtree-b-k1", "quadtree-b-k4",
    "full",
)  # fmt: skip
METRICS = ("train/loss", "train/coarse", "train/fine", "val/fscore", "val/matches")
OPTIONAL = ("val/precision", "val/auc5", "val/auc10", "val/auc20")  # not every machine has them
SYNTHETIC = "synthetic"
JUDGED = (SYNTHETIC, "scannet")  # sets whose order is put in words
JUDGE, DEGREES = "poselib", "10"  # by this AUC
CURVES, AREAS = "match-attentions-curves.png", "match-attentions-auc.png"

_FINAL_FIELDS = {"fscore": float, "matches": float}
_BEST_FIELDS = {"epoch": int, "fscore": float}
_WEIGHTS_FIELDS = {"sha256": str, "bytes": int, "epoch": int}
_MEASUREMENT_FIELDS = SESSION_FIELDS | {
    "batch": int, "image": list, "precision": str, "rows": list,
}  # fmt: skip
_EVALUATION_FIELDS = SESSION_FIELDS | {"size": int, "synthetic": dict, "rows": list}
_SYNTHETIC_FIELDS = {
    "pairs": int, "seed": int, "height": int, "width": int, "textures": str | None,
}  # fmt: skip
_ROW_FIELDS = {
    "recipe": str, "seed": int | None, "weights": str | None, "set": str, "kind": str,
    "pairs": int, "missing": int, "matches": float, "precision": float, "median_seconds": float,
    "estimators": dict, "errors": dict,
}  # fmt: skip


def empty_result() -> Result:
    """A result without runs."""
    return attention_results.empty_result(MATCH_ATTENTIONS) | {"evaluation": None}


def check_result(result: Result) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    check_common(
        result,
        MATCH_ATTENTIONS,
        check_run=_check_run,
        more_fields={"evaluation": dict | None},
        measurement_fields=_MEASUREMENT_FIELDS,
        row_fields=STEP_FIELDS,
    )
    if (evaluation := result["evaluation"]) is not None:
        versions = {"opencv": str, "poselib": str | None}
        check_session(evaluation, _EVALUATION_FIELDS, "evaluation", versions)
        _check_fields(evaluation["synthetic"], _SYNTHETIC_FIELDS, "evaluation.synthetic")
        for i, row in enumerate(evaluation["rows"]):
            _check_row(row, f"evaluation.rows[{i}]")


def _check_run(run: Result, where: str) -> None:
    there = [name for name in OPTIONAL if name in run.get("history", {})]
    final = {name.removeprefix("val/"): float | None for name in there}
    check_run_of(
        run,
        where,
        final=_FINAL_FIELDS | final,
        best=_BEST_FIELDS,
        columns=("epoch", "seconds", *METRICS, *there),
        more_fields={"weights": dict | None},
    )
    if run["weights"] is not None:
        _check_fields(run["weights"], _WEIGHTS_FIELDS, f"{where}.weights")


def _check_row(row: Result, where: str) -> None:
    _check_fields(row, _ROW_FIELDS, where)
    _check_choice(row, "kind", list(KINDS), where)
    _check_fields(row["estimators"], dict.fromkeys(ESTIMATORS, dict), f"{where}.estimators")
    areas = dict.fromkeys(THRESHOLDS[row["kind"]], float)
    for name, score in row["estimators"].items():
        _check_fields(score, _ESTIMATOR_FIELDS, f"{where}.{name}")
        _check_fields(score["auc"], areas, f"{where}.{name}.auc")
    _check_fields(row["errors"], dict.fromkeys(ESTIMATORS, list), f"{where}.errors")
    for name, errors in row["errors"].items():
        if len(errors) != row["pairs"]:
            raise ValueError(f"{where}.errors.{name} has {len(errors)} pairs of {row['pairs']}")


def read_results(folder: Path) -> dict[str, Result]:
    """Every result file about attentions in a matcher in a folder by its name, checked."""
    return read_results_of(folder, MATCH_ATTENTIONS, check_result)


def markdown(results: Mapping[str, Result]) -> str:
    """The sections of all result files."""
    return "\n\n".join(_section(*item) for item in results.items()) or NOT_MEASURED


def _section(name: str, result: Result) -> str:
    runs = compared_runs(result)
    lines = [f"### {machines(result)}: `{name}.json`", "", *_summary(runs), ""]
    lines += [*_training_table(result, runs), "", *_scores(result), *_verdicts(result)]
    lines += [*_growth(result), *_missing(result, runs), *_pictures(result, runs)]
    return "\n".join([*lines, *_sources(name, result)])


def compared_runs(result: Result) -> dict[str, list[Result]]:
    """The runs of every recipe by seed; only those as long as most are, others do not compare."""
    return runs_of(result, LABELS)


def label(name: str) -> str:
    return "SIFT" if name == SIFT else LABELS.get(name, name)


def _summary(runs: Mapping[str, Sequence[Result]]) -> list[str]:
    every = flat(runs)
    if not every:
        return ["No run has finished yet."]
    seeds = sorted({run["seed"] for run in every})
    data = ", ".join(sorted({run["data"] or "procedural textures" for run in every}))
    return [
        f"Trained on synthetic scenes with textures of {data} for {every[0]['epochs']} epochs, "
        f"{len(every)} runs, seeds {', '.join(map(str, seeds))}. Loss is that of training, F-score "
        "and matches are those of validation scenes, all of the last epoch, means over seeds.",
    ]


def _training_table(result: Result, runs: Mapping[str, Sequence[Result]]) -> list[str]:
    measurement = result["measurement"] or {"rows": [], "batch": 0}
    rows = {row["recipe"]: row for row in measurement["rows"]}
    head = ["attention", "params M", "seeds", "loss", "F-score %", "matches", "pairs/s", "MiB"]
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for name, mine in runs.items():
        row = rows.get(name, {})
        finals = [run["history"]["train/loss"][-1] for run in mine]
        cells = [label(name), scaled(row, "params", 1e6), str(len(mine)), _mean(finals, 3)]
        cells += [_mean([run["final"]["fscore"] for run in mine], 1)]
        cells += [_mean([run["final"]["matches"] for run in mine], 0)]
        cells += [speed(row, measurement["batch"]), scaled(row, "peak_mib", 1)]
        lines.append(_line(cells))
    return lines


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f}" if values else NOT_YET


def scored_rows(result: Result) -> list[Result]:
    """The scores of the runs that are there, and of SIFT; of a run that was made again, none."""
    current = {run["weights"]["sha256"] for run in result["runs"] if run["weights"]} | {None}
    rows = (result["evaluation"] or {"rows": []})["rows"]
    return [row for row in rows if row["weights"] in current]


def pooled(result: Result) -> dict[tuple[str, str], Result]:
    """The scores by set and recipe, one row each: means over seeds, the pairs of all of them.

    Sets are in the order in which they were evaluated, recipes in that of the table.
    """
    rows = scored_rows(result)
    found: dict[tuple[str, str], Result] = {}
    for set_ in dict.fromkeys(row["set"] for row in rows):
        for name in dict.fromkeys([*LABELS, *(row["recipe"] for row in rows)]):
            if mine := [row for row in rows if (row["set"], row["recipe"]) == (set_, name)]:
                found[set_, name] = _pool(mine)
    return found


def _pool(rows: Sequence[Result]) -> Result:
    first, means = rows[0], ("matches", "precision", "median_seconds")
    estimators = {}
    for name, score in first["estimators"].items():
        every = [row["estimators"][name]["auc"] for row in rows]
        areas = {key: fmean(auc[key] for auc in every) for key in score["auc"]}
        estimators[name] = {"auc": areas}
    errors = {
        name: [error for row in rows for error in row["errors"][name]] for name in first["errors"]
    }
    return {
        "set": first["set"],
        "kind": first["kind"],
        "method": label(first["recipe"]),
        "pairs": sum(row["pairs"] for row in rows),
        "seeds": len(rows),
        "estimators": estimators,
        "errors": errors,
        "details": [{"errors": dict(zip(errors, each, strict=True))}
                    for each in zip(*errors.values(), strict=True)],
        **{key: fmean(row[key] for row in rows) for key in means},
    }  # fmt: skip


def _scores(result: Result) -> list[str]:
    rows, lines = list(pooled(result).values()), []
    for kind, title in KINDS.items():
        if mine := [row for row in rows if row["kind"] == kind]:
            lines += [f"#### {title}", "", *_markdown_table(kind, mine), ""]
    return lines


def _verdicts(result: Result) -> list[str]:
    """What the scores say about the paper's order, and no more than that."""
    rows = pooled(result)
    lines = ["The paper finds QuadTree-B ahead of linear attention and of spatial reduction."]
    for set_ in JUDGED:
        if (set_, OURS) in rows:
            lines.append(_verdict(set_, rows))
    if len(lines) == 1:
        lines.append("Whether that holds here cannot be told yet.")
    return [" ".join(lines), ""]


def _verdict(set_: str, rows: Mapping[tuple[str, str], Result]) -> str:
    """Who is ahead of and behind QuadTree-B by more than two standard errors of the difference."""
    ours = rows[set_, OURS]
    groups: dict[str, list[str]] = {"behind it": [], "too close to call": [], "ahead of it": []}
    for name in RIVALS:
        if (row := rows.get((set_, name))) is not None:
            mean, error = difference(ours, row)
            group = "behind it" if mean > 2 * error else "ahead of it" if mean < -2 * error else ""
            text = f"{label(name)} ({area(row):.1f}, {-mean:+.1f} ± {error:.1f})"
            groups[group or "too close to call"].append(text)
    said = "; ".join(f"{group}: {', '.join(names) or 'none'}" for group, names in groups.items())
    pairs = ours["pairs"] // ours["seeds"]
    return (
        f"On {set_} ({pairs} pairs, AUC@{DEGREES}° with {JUDGE}) it has {area(ours):.1f}; {said} "
        "(± is the standard error of the difference over the same pairs, and two of them decide)."
    )


def area(row: Result, degrees: str = DEGREES) -> float:
    """AUC of a row, in percent."""
    areas: dict[str, float] = row["estimators"][JUDGE]["auc"]
    return areas[degrees]


def difference(first: Result, second: Result) -> tuple[float, float]:
    """By how many points of AUC the first is ahead, and the standard error of that over pairs."""
    shares = [_shares(row) for row in (first, second)]
    differences = [a - b for a, b in zip(*shares, strict=True)]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return fmean(differences), error


def _shares(row: Result) -> list[float]:
    """What each pair adds to the AUC, whose mean over pairs it is nearly; means over seeds."""
    largest = float(DEGREES)
    shares = [
        0.0 if error is None else 100 * max(0.0, 1 - error / largest)
        for error in row["errors"][JUDGE]
    ]
    pairs = len(shares) // row["seeds"]
    return [fmean(shares[i::pairs]) for i in range(pairs)]


def _growth(result: Result) -> list[str]:
    """What keeping more cells brings."""
    rows = pooled(result)
    scores = {k: area(row) for k, name in TOPK.items() if (row := rows.get((SYNTHETIC, name)))}
    if len(scores) < 2:
        return []
    rises = all(a < b for a, b in pairwise(scores.values()))
    text = ", ".join(f"K {k}: {score:.1f}" for k, score in scores.items())
    what = "rises with every step of K" if rises else "does not rise with every step of K"
    return [f"Cells kept per query: AUC@{DEGREES}° on {SYNTHETIC} {what} ({text}).", ""]


def _missing(result: Result, runs: Mapping[str, Sequence[Result]]) -> list[str]:
    lines = missing_runs(result, runs, label)
    scored = {(row["recipe"], row["seed"]) for row in scored_rows(result)}
    unscored = [run for run in flat(runs) if (run["recipe"], run["seed"]) not in scored]
    names = (f"{label(run['recipe'])}, seed {run['seed']}" for run in unscored)
    lines += [f"- scores of {name}: {NOT_YET}" for name in names]
    return ["Missing:", "", *lines, ""] if lines else []


def _pictures(result: Result, runs: Mapping[str, Sequence[Result]]) -> list[str]:
    lines = [f"![Loss and F-score over epochs]({CURVES})", ""] if flat(runs) else []
    return lines + ([f"![AUC by attention]({AREAS})", ""] if pooled(result) else [])


def _sources(name: str, result: Result) -> list[str]:
    measured = result["measurement"] or {"batch": 0, "image": [0, 0]}
    height, width = measured["image"]
    lines = sources(name, result, f"{measured['batch']} pairs of {height} x {width}")
    if (evaluation := result["evaluation"]) is None:
        return lines
    scenes, weights = evaluation["synthetic"], _weights(result)
    lines += [""] if lines else []
    lines += [
        f"Scored on a CPU ({SYNTHETIC}: {scenes['pairs']} pairs of {scenes['height']} x "
        f"{scenes['width']} of seed {scenes['seed']}, textures of "
        f"{scenes['textures'] or 'their own'}; others with a longer side of at most "
        f"{evaluation['size']} pixels){weights}: {about(name, evaluation)}",
    ]
    return [*lines, "", f"    {evaluation['command']}"]


def _weights(result: Result) -> str:
    stored = [run["weights"] for run in result["runs"] if run["weights"] is not None]
    sizes = [weights["bytes"] for weights in stored]
    return f", weights in float16, up to {number(max(sizes) / 2**20)} MiB" if sizes else ""


def text_scores(rows: Iterable[Result]) -> str:
    """The scores of rows, aligned, for a terminal."""
    return text_table([_pool([row]) for row in rows])
