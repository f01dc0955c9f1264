# SPDX-License-Identifier: Apache-2.0
"""The table that compares attentions, from the result files of `benchmarks.attentions`."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks import attention_results
from benchmarks.attention_results import (
    MEASUREMENT_FIELDS,
    NOT_MEASURED,
    NOT_YET,
    Result,
    check_common,
    check_run_of,
    flat,
    machines,
    missing_runs,
    read_results_of,
    runs_of,
    scaled,
    sources,
    speed,
)
from benchmarks.tables import ATTENTIONS, _line

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

NOISE = 1.5  # points: the standard error of 65 to 70 % right out of 1,000 images

_FINAL_FIELDS = {"loss": float, "top1": float, "top5": float}
_BEST_FIELDS = {"epoch": int, "top1": float}


def empty_result() -> Result:
    """A result without runs."""
    return attention_results.empty_result(ATTENTIONS)


def check_result(result: Result) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    fields = dict(MEASUREMENT_FIELDS)
    if "memory" in (result.get("measurement") or {}):  # measured by another command than the speed
        fields["memory"] = dict
    check_common(result, ATTENTIONS, check_run=_check_run, measurement_fields=fields)


def _check_run(run: Result, where: str) -> None:
    columns = ("epoch", "seconds", *METRICS)
    check_run_of(run, where, final=_FINAL_FIELDS, best=_BEST_FIELDS, columns=columns)


def read_results(folder: Path) -> dict[str, Result]:
    """Every result file about attentions in a folder by its name, checked."""
    return read_results_of(folder, ATTENTIONS, check_result)


def markdown(results: dict[str, Result]) -> str:
    """The sections of all result files."""
    return "\n\n".join(_section(*item) for item in results.items()) or NOT_MEASURED


def _section(name: str, result: Result) -> str:
    runs = compared_runs(result)
    lines = [f"### {machines(result)}: `{name}.json`", "", *_summary(runs), ""]
    lines += [*_table(result, runs), "", *_order(runs), *_lepe(runs), *_growth(runs)]
    lines += [*_missing(result, runs), *_pictures(runs)]
    return "\n".join([*lines, *_sources(name, result)])


def compared_runs(result: Result) -> dict[str, list[Result]]:
    """The runs of every recipe by seed; only those as long as most are, others do not compare."""
    return runs_of(result, LABELS)


def top1(runs: Sequence[Result], when: str = "final") -> float | None:
    """Mean over seeds, of the last epoch or of each run's best."""
    return fmean(run[when]["top1"] for run in runs) if runs else None


def label(name: str) -> str:
    return LABELS.get(name, name)


def _summary(runs: dict[str, list[Result]]) -> list[str]:
    every = flat(runs)
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
        cells = [label(name), scaled(row, "params", 1e6), scaled(row, "macs", 1e9)]
        cells += [str(len(mine)), _spread(mine, "final"), _spread(mine, "best"), _loss(mine)]
        cells += [speed(row, measurement["batch"]), scaled(row, "peak_mib", 1)]
        lines.append(_line(cells))
    return lines


def _loss(runs: Sequence[Result]) -> str:
    """Mean of the training loss of the last epoch."""
    losses = [run["history"]["train/loss"][-1] for run in runs]
    return f"{fmean(losses):.3f}" if losses else NOT_YET


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
    lines = missing_runs(result, runs, label)
    return ["Missing:", "", *lines, ""] if lines else []


def _pictures(runs: dict[str, list[Result]]) -> list[str]:
    if not flat(runs):
        return []
    lines = ["![Loss and accuracy over epochs](attentions-curves.png)", ""]
    if any(runs[name] for name in TOPK.values()):
        lines += ["![Accuracy and speed over K](attentions-topk.png)", ""]
    return lines


def _sources(name: str, result: Result) -> list[str]:
    measured = result["measurement"] or {"batch": 0, "image": 0}
    shape = f"{measured['batch']} x 3 x {measured['image']} x {measured['image']}"
    return sources(name, result, shape)
