# SPDX-License-Identifier: Apache-2.0
"""Pictures from a result file of a comparison by training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.result import THRESHOLDS, Result, Row
from benchmarks.tables.table import find
from benchmarks.tables.training import JUDGED, pairs_of, pooled
from benchmarks.tables.views import ESTIMATORS
from benchmarks.training.comparison import (
    SIFT,
    Comparison,
    compared_runs,
    samples_per_second,
    short,
    steps_of,
)

# Told apart by colour-blind readers too; forms of one attention share a colour and differ in dashes
COLOURS = ("#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#999999", "#0072B2", "#000000")
OURS = "#D00000"
DASHES = ("-", "--", ":", "-.")
SPEED = "#56B4E9"
BY_DEGREES = {"5": "#56B4E9", "10": "#0072B2", "20": "#000000"}
MARKERS = {"poselib": "o", "opencv": "x"}


def draw(comparison: Comparison, result: Result, folder: Path) -> list[Path]:
    """Draws the pictures of a comparison for which the result has numbers; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in comparison.pictures:
        make = topk if "topk" in name else areas if "auc" in name else curves
        figure = make(comparison, result)
        if figure is not None:
            figure.savefig(folder / name, dpi=130)
            written.append(folder / name)
    return written


def styles(comparison: Comparison, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and dash by variant: ours in red, others by family."""
    ours = [name for name in names if name.startswith(comparison.ours)]
    families = [name.removesuffix("-lepe") for name in comparison.baselines]
    families = list(dict.fromkeys([*families, *(n for n in names if n not in ours)]))
    found = {name: (OURS, DASHES[i % len(DASHES)]) for i, name in enumerate(reversed(ours))}
    for name in (name for name in names if name not in ours):
        colour = COLOURS[families.index(name.removesuffix("-lepe")) % len(COLOURS)]
        found[name] = (colour, "--" if name.endswith("-lepe") else "-")
    return found


def curves(comparison: Comparison, result: Result) -> Figure | None:
    """Metrics over epochs: a thin line per seed, a thick one for their mean; None without runs."""
    runs = compared_runs(comparison, result)
    other_k = [name for name in comparison.topk.values() if name != comparison.ours]
    shown = other_k if "quadtree-b-no-lepe" in comparison.variants else []  # enough lines without
    runs = {name: mine for name, mine in runs.items() if mine and name not in shown}
    histories = [row["details"]["history"] for mine in runs.values() for row in mine]
    panels = {metric: title for metric, title in comparison.panels.items()
              if all(metric in history for history in histories)}  # fmt: skip
    if not runs:
        return None
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    style = styles(comparison, list(runs))
    for axes, (metric, title) in zip(places, panels.items(), strict=True):
        for name, mine in runs.items():
            columns = [row["details"]["history"] for row in mine]
            _draw_runs(axes, columns, metric, style=style[name], text=comparison.label(name))
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    lines = places[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right center", frameon=False)
    return figure


def _draw_runs(
    axes: Axes, histories: Sequence[Mapping[str, list[float]]], metric: str, *,
    style: tuple[str, str], text: str,
) -> None:  # fmt: skip
    colour, dash = style
    epochs = histories[0]["epoch"]
    columns = [history[metric] for history in histories]
    means = [sum(values) / len(values) for values in zip(*columns, strict=True)]
    if len(columns) > 1:
        for column in columns:
            axes.plot(epochs, column, color=colour, linestyle=dash, linewidth=0.6, alpha=0.5)
    marker = "." if len(epochs) == 1 else None  # one point has no line
    axes.plot(epochs, means, marker=marker, color=colour, linestyle=dash, linewidth=2, label=text)


def topk(comparison: Comparison, result: Result) -> Figure | None:
    """Score and training speed over the number of cells kept per query; None without runs."""
    runs, name = compared_runs(comparison, result), short(comparison.score)
    points = [(k, [row["values"]["final"][name] for row in runs[variant]])
              for k, variant in comparison.topk.items() if runs[variant]]  # fmt: skip
    if not points:
        return None
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    left = figure.subplots()
    means = [sum(scores) / len(scores) for _, scores in points]
    left.plot([k for k, _ in points], means, "o-", color=OURS, linewidth=2)
    every = [(k, score) for k, scores in points for score in scores]
    left.plot(*zip(*every, strict=True), "x", color=OURS, alpha=0.5)
    left.set_xscale("log", base=2)
    left.set_xticks(list(comparison.topk), labels=list(map(str, comparison.topk)))
    left.set(xlabel="K, cells kept per query and level")
    title = comparison.panels[comparison.score]
    left.set_ylabel(f"{title} (crosses: seeds)", color=OURS)
    left.grid(alpha=0.3)
    steps = steps_of(result)
    rows = {
        k: steps[v]
        for k, v in comparison.topk.items()
        if "error" not in steps.get(v, {"error": ""})
    }
    if rows:
        right = left.twinx()
        speeds = [samples_per_second(result, row) for row in rows.values()]
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
    for axes, name in zip(places, sets, strict=True):
        mine = [row for row in rows if row["case"]["set"] == name]
        _draw_set(axes, mine, names, comparison)
        axes.set(title=f"{name}, {pairs_of(mine[0])} pairs", xlabel="AUC, %")
    lines = places[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=len(BY_DEGREES), frameon=False)
    return figure


def _draw_set(
    axes: Axes, rows: Sequence[Row], names: Sequence[str], comparison: Comparison
) -> None:
    places = [names.index(row["case"]["recipe"]) for row in rows]
    order = sorted(range(len(rows)), key=places.__getitem__)
    for degrees in THRESHOLDS["pose"]:
        for estimator, marker in MARKERS.items():
            found = [rows[i]["values"]["estimators"][estimator]["auc"][degrees] for i in order]
            text = f"AUC@{degrees}°, {ESTIMATORS[estimator]}"
            axes.plot(found, [places[i] for i in order], marker, color=BY_DEGREES[degrees],
                      label=text, clip_on=False)  # fmt: skip
    axes.set_yticks(range(len(names)), labels=[comparison.label(name) for name in names])
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
