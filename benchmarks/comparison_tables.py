# SPDX-License-Identifier: Apache-2.0
"""Attentions compared by training in one network: what there is of that, and its tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks import attention_results
from benchmarks.attention_results import (
    NOT_MEASURED,
    NOT_YET,
    SESSION_FIELDS,
    STEP_FIELDS,
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
from benchmarks.attention_runs import Suite
from benchmarks.tables import number, page_table

MEASUREMENT_FIELDS = SESSION_FIELDS | {"batch": int, "precision": str, "rows": list}
PEAK = "peak_mib"  # a column of the history that runs on a GPU have
OURS = "quadtree-b"


@dataclass(frozen=True)
class Comparison:
    """Recipes that differ in the attention, and what is looked at in their runs.

    Attributes:
        name: How names of result files and pictures begin.
        task: What `quadtree train` trains, and the folder of the recipes.
        prefix: How the names of the recipes begin.
        labels: What each recipe is called, in the order of the table.
        scores: Heading by metric; the first tells the best epoch.
        noise: Difference of that score that says nothing.
    """

    name: str
    task: str
    prefix: str
    labels: Mapping[str, str]
    scores: Mapping[str, str]
    noise: float
    losses: Sequence[str] = field(default=("train/loss",))

    @property
    def score(self) -> str:
        return next(iter(self.scores))

    @property
    def suite(self) -> Suite:
        """How its runs are made and kept."""
        ours_first = sorted(self.labels, key=lambda name: name != OURS)
        return Suite(
            task=self.task,
            prefix=self.prefix,
            order=ours_first,
            metrics=(*self.losses, *self.scores),
            score=self.score,
            score_name=self.scores[self.score],
            empty_result=partial(attention_results.empty_result, self.name),
            check_result=partial(check_result, self),
            optional=(PEAK,),
        )

    def label(self, recipe: str) -> str:
        return self.labels.get(recipe, recipe)


COMPARISONS = {
    comparison.name: comparison
    for comparison in (
        Comparison(
            name="stereo-attentions",
            task="stereo",
            prefix="attention-",
            labels={
                "full": "full",
                "quadtree-a": "QuadTree-A",
                "quadtree-b": "QuadTree-B (K 6)",
            },
            scores={
                "val/good3": "within 3 px, %",
                "val/epe_all": "EPE, px",
                "val/epe_noc": "EPE visible, px",
                "val/occlusion_iou": "occlusion IoU",
                "val/occlusion_iou_both": "as STTR",
            },
            noise=0.3,
        ),
        Comparison(
            name="bccd-attentions",
            task="detect",
            prefix="bccd-retinanet-",
            labels={
                "sr": "spatial reduction (PVTv2)",
                "window": "shifted windows (Swin)",
                "focal": "focal",
                "quadtree-a": "QuadTree-A, K 32",
                "quadtree-b-k1": "QuadTree-B, K 1",
                "quadtree-b-k8": "QuadTree-B, K 8",
                "quadtree-b": "QuadTree-B, K 32",
            },
            scores={"val/ap": "AP", "val/ap50": "AP50", "val/ap75": "AP75"},
            noise=1.0,
        ),
        Comparison(
            name="nuclei-attentions",
            task="detect",
            prefix="nuclei-maskrcnn-",
            labels={"sr": "spatial reduction (PVTv2)", "quadtree-b": "QuadTree-B, K 32"},
            scores={"val/ap": "box AP", "val/ap50": "box AP50", "val/mask_ap": "mask AP"},
            noise=1.0,
        ),
        Comparison(
            name="camvid-attentions",
            task="segment",
            prefix="camvid11-semfpn-",
            labels={
                "sr": "spatial reduction (PVTv2)",
                "sr-lepe": "spatial reduction + LePE",
                "window": "shifted windows (Swin)",
                "window-lepe": "shifted windows + LePE",
                "quadtree-b-no-lepe": "QuadTree-B without LePE",
                "quadtree-b": "QuadTree-B (LePE, K 32)",
            },
            scores={"val/miou": "mIoU", "val/accuracy": "pixel accuracy, %"},
            noise=1.0,
        ),
    )
}


def check_result(comparison: Comparison, result: Result) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    check_common(
        result,
        comparison.name,
        check_run=partial(_check_run, comparison),
        measurement_fields=MEASUREMENT_FIELDS,
        row_fields=STEP_FIELDS,
    )


def _check_run(comparison: Comparison, run: Result, where: str) -> None:
    scores = [metric.removeprefix("val/") for metric in comparison.scores]
    columns = ["epoch", "seconds", *comparison.losses, *comparison.scores]
    columns += [PEAK] if PEAK in run.get("history", {}) else []
    check_run_of(
        run,
        where,
        final=dict.fromkeys(scores, float),
        best={"epoch": int, scores[0]: float},
        columns=columns,
    )


def read_results(comparison: Comparison, folder: Path) -> dict[str, Result]:
    """Every result file of a comparison in a folder by its name, checked."""
    return read_results_of(folder, comparison.name, partial(check_result, comparison))


def markdown(comparison: Comparison, results: Mapping[str, Result]) -> str:
    """The sections of all result files of a comparison."""
    sections = (_section(comparison, *item) for item in results.items())
    return "\n\n".join(sections) or NOT_MEASURED


def all_markdown(folder: Path) -> dict[str, str]:
    """What there is of every comparison, by its name."""
    return {name: markdown(c, read_results(c, folder)) for name, c in COMPARISONS.items()}


def runs_by_recipe(comparison: Comparison, result: Result) -> dict[str, list[Result]]:
    """The runs of every recipe by seed; only those as long as most are, others do not compare."""
    return runs_of(result, comparison.labels)


def _section(comparison: Comparison, name: str, result: Result) -> str:
    runs = runs_by_recipe(comparison, result)
    lines = [f"### {machines(result)}: `{name}.json`", "", *_table(comparison, runs, result), ""]
    lines += _verdict(comparison, runs)
    measured = result["measurement"] is not None
    if missing := missing_runs(result, runs, comparison.label, speeds=measured):
        lines += ["Missing:", "", *missing, ""]
    if flat(runs):
        lines += [f"![Loss and score over epochs]({comparison.name}.png)", ""]
    step = f"training steps of {result['measurement']['batch']} samples" if measured else ""
    return "\n".join([*lines, *sources(name, result, step)]).rstrip()


def _table(
    comparison: Comparison, runs: Mapping[str, Sequence[Result]], result: Result
) -> list[str]:
    epochs = max((run["epochs"] for run in flat(runs)), default=0)
    measured = result["measurement"]
    costs = ["s per epoch", "peak MiB"] if measured is None else ["samples/s", "MiB of a step"]
    head = ["attention", "runs", *comparison.scores.values(), "best epoch", "training loss", *costs]
    lines = [f"Means over seeds, ± half of their range, after {epochs} epochs.", ""]
    rows = []
    for name, mine in runs.items():
        cells = [comparison.label(name), str(len(mine))]
        cells += [spread(mine, lambda run, m=m: _final(run, m)) for m in comparison.scores]
        cells += [spread(mine, lambda run: run["best"][_short(comparison.score)])]
        cells += [spread(mine, lambda run: run["history"][comparison.losses[0]][-1], digits=3)]
        cells += _costs_of_runs(mine) if measured is None else _costs_of_steps(name, measured)
        rows.append(cells)
    return [*lines, *page_table(head, rows, 1)]


def _costs_of_runs(runs: Sequence[Result]) -> list[str]:
    return [_mean_of(runs, "seconds"), _mean_of(runs, PEAK)]


def _costs_of_steps(recipe: str, measured: Result) -> list[str]:
    """Training steps by themselves, where nothing else ran."""
    row = next((row for row in measured["rows"] if row["recipe"] == recipe), {})
    return [speed(row, measured["batch"]), scaled(row, PEAK, 1)]


def spread(runs: Sequence[Result], value: Callable[[Result], float], digits: int = 2) -> str:
    """Mean of what runs have, and half of the range."""
    if not runs:
        return NOT_YET
    values = [value(run) for run in runs]
    text = f"{fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {(max(values) - min(values)) / 2:.{digits}f}"


def _final(run: Result, metric: str) -> float:
    return run["final"][_short(metric)]


def _mean_of(runs: Sequence[Result], column: str) -> str:
    """Of all epochs but the first, which sets things up."""
    values = [
        value
        for run in runs
        for value in run["history"].get(column, [])[1:] or run["history"].get(column, [])
        if value is not None
    ]
    return number(fmean(values)) if values else NOT_YET


def _verdict(comparison: Comparison, runs: Mapping[str, Sequence[Result]]) -> list[str]:
    """Who is ahead of QuadTree-B, and by so little that it says nothing."""
    means = {
        name: fmean(_final(run, comparison.score) for run in mine)
        for name, mine in runs.items()
        if mine
    }
    if OURS not in means or len(means) < 2:
        return []
    ours, heading = means.pop(OURS), comparison.scores[comparison.score]
    words = {name: f"{comparison.label(name)} ({mean:.2f})" for name, mean in means.items()}
    ahead = [words[name] for name, mean in means.items() if mean >= ours]
    text = f"{comparison.label(OURS)} has {heading} {ours:.2f}; "
    text += f"not behind it: {', '.join(ahead)}." if ahead else "all others are behind it."
    near = [words[name] for name, mean in means.items() if abs(mean - ours) <= comparison.noise]
    if near:
        text += f" Within {comparison.noise}, too close to call: {', '.join(near)}."
    if max(map(len, runs.values())) == 1:
        text += " One seed each: how much of it is chance is not known."
    return [text, ""]


def _short(metric: str) -> str:
    return metric.removeprefix("val/")
