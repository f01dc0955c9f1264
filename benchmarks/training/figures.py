# SPDX-License-Identifier: Apache-2.0
"""Pictures from a result file of a comparison by training."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.result import THRESHOLDS, Result
from benchmarks.tables.table import find
from benchmarks.tables.training import JUDGED, pairs_of, pooled
from benchmarks.tables.views import ESTIMATORS
from benchmarks.training import comparison as compared
from benchmarks.training.comparison import SIFT, Comparison, short

# Told apart by colour-blind readers too; forms of one attention share a colour and differ in dashes
COLOURS = ("#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#999999", "#0072B2", "#000000")
OURS, SPEED = "#D00000", "#56B4E9"
DASHES = ("-", "--", ":", "-.")
BY_DEGREES = {"5": "#56B4E9", "10": "#0072B2", "20": "#000000"}
MARKERS = {"poselib": "o", "opencv": "x"}


def draw(comparison: Comparison, result: Result, folder: Path) -> list[Path]:
    """Draws the pictures of a comparison for which the result has numbers; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in comparison.pictures:
        make = topk if "topk" in name else areas if "auc" in name else curves
        if (figure := make(comparison, result)) is not None:
            figure.savefig(folder / name, dpi=130)
            written.append(folder / name)
    return written


def styles(comparison: Comparison, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and dash by variant: ours in red, others by family."""
    ours = [name for name in names if name.startswith(comparison.ours)]
    others = [name for name in names if name not in ours]
    families = [name.removesuffix("-lepe") for name in (*comparison.baselines, *others)]
    families = list(dict.fromkeys(families))
    found = {name: (OURS, DASHES[i % len(DASHES)]) for i, name in enumerate(reversed(ours))}
    for name in others:
        colour = COLOURS[families.index(name.removesuffix("-lepe")) % len(COLOURS)]
        found[name] = (colour, "--" if name.endswith("-lepe") else "-")
    return found


def curves(comparison: Comparison, result: Result) -> Figure | None:
    """Metrics over epochs: a thin line per seed, a thick one for their mean; None without runs."""
    runs = compared.compared_runs(comparison, result)
    other_k = [name for name in comparison.topk.values() if name != comparison.ours]
    hidden = other_k if comparison.lepe else []  # there are enough lines without them
    histories = {
        name: [row["details"]["history"] for row in mine]
        for name, mine in runs.items()
        if mine and name not in hidden
    }
    if not histories:
        return None
    every = [history for mine in histories.values() for history in mine]
    panels = [metric for metric in comparison.panels if all(metric in h for h in every)]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    style = styles(comparison, list(histories))
    for axes, metric in zip(places, panels, strict=True):
        for name, mine in histories.items():
            colour, dash = style[name]
            epochs, columns = mine[0]["epoch"], [history[metric] for history in mine]
            for column in columns if len(columns) > 1 else []:
                axes.plot(epochs, column, color=colour, linestyle=dash, linewidth=0.6, alpha=0.5)
            means = [fmean(values) for values in zip(*columns, strict=True)]
            marker = "." if len(epochs) == 1 else None  # one point has no line
            axes.plot(epochs, means, marker=marker, color=colour, linestyle=dash, linewidth=2,
                      label=comparison.label(name))  # fmt: skip
        axes.set(title=comparison.panels[metric], xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    lines = places[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right center", frameon=False)
    return figure


def topk(comparison: Comparison, result: Result) -> Figure | None:
    """Score and training speed over the number of cells kept per query; None without runs."""
    runs, name = compared.compared_runs(comparison, result), short(comparison.score)
    scores = {
        k: [row["values"]["final"][name] for row in runs[variant]]
        for k, variant in comparison.topk.items()
        if runs[variant]
    }
    if not scores:
        return None
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    left = figure.subplots()
    left.plot(list(scores), [fmean(found) for found in scores.values()], "o-", color=OURS)
    every = [(k, score) for k, found in scores.items() for score in found]
    left.plot(*zip(*every, strict=True), "x", color=OURS, alpha=0.5)
    left.set_xscale("log", base=2)
    left.set_xticks(list(comparison.topk), labels=list(map(str, comparison.topk)))
    left.set(xlabel="K, cells kept per query and level")
    left.set_ylabel(f"{comparison.panels[comparison.score]} (crosses: seeds)", color=OURS)
    left.grid(alpha=0.3)
    steps = compared.steps_of(result)
    rows = {k: steps.get(variant, {}) for k, variant in comparison.topk.items()}
    rows = {k: row for k, row in rows.items() if "median_ms" in row.get("values", {})}
    if rows:
        right = left.twinx()
        speeds = [compared.samples_per_second(result, row) for row in rows.values()]
        right.plot(list(rows), speeds, "s--", color=SPEED, linewidth=2)
        right.set_ylabel("training samples/s", color=SPEED)
        right.set_ylim(bottom=0)
    return figure


def areas(comparison: Comparison, result: Result) -> Figure | None:
    """AUC of poses: a picture per set, a row per attention, a colour per threshold."""
    rows = pooled(comparison, result)
    sets = [name for name in JUDGED if find(rows, {"set": name})]
    if not sets:
        return None
    names = [name for name in (SIFT, *comparison.variants) if find(rows, {"recipe": name})]
    figure = Figure(figsize=(5.2 * len(sets), 1.4 + 0.42 * len(names)), layout="constrained")
    places = figure.subplots(1, len(sets), squeeze=False, sharey=True)[0]
    for axes, set_ in zip(places, sets, strict=True):
        found = [(i, find(rows, {"set": set_, "recipe": name})) for i, name in enumerate(names)]
        mine = {i: row["values"]["estimators"] for i, row in found if row}
        for degrees in THRESHOLDS["pose"]:
            for name, marker in MARKERS.items():
                shown = [scores[name]["auc"][degrees] for scores in mine.values()]
                text = f"AUC@{degrees}°, {ESTIMATORS[name]}"
                colour = BY_DEGREES[degrees]
                axes.plot(shown, list(mine), marker, color=colour, label=text, clip_on=False)
        axes.set_yticks(range(len(names)), labels=[comparison.label(name) for name in names])
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        pairs = next(pairs_of(row) for _, row in found if row)
        axes.set(title=f"{set_}, {pairs} pairs", xlabel="AUC, %")
    lines = places[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=len(BY_DEGREES), frameon=False)
    return figure
