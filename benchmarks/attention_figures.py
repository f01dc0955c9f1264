# SPDX-License-Identifier: Apache-2.0
"""Pictures from a result file of `benchmarks.attentions`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.attention_results import Result, samples_per_second
from benchmarks.attention_tables import COMPARED, TOPK, compared_runs, label, top1

# One colour per attention, told apart by colour-blind readers too; its second form is dashed.
STYLES = {
    "sr": ("#E69F00", "-"),
    "sr-lepe": ("#E69F00", "--"),
    "window": ("#56B4E9", "-"),
    "window-lepe": ("#56B4E9", "--"),
    "focal": ("#CC79A7", "-"),
    "focal-lepe": ("#CC79A7", "--"),
    "linear": ("#999999", "-"),
    "quadtree-a": ("#009E73", "-"),
    "quadtree-b": ("#D00000", "-"),
    "quadtree-b-no-lepe": ("#D00000", "--"),
}
PANELS = {"train/loss": "training loss", "val/top1": "validation top-1, %"}
ACCURACY, SPEED = "#D00000", "#56B4E9"


def draw_all(result: Result, folder: Path) -> list[Path]:
    """Draws what the result holds; returns the files written."""
    runs = compared_runs(result)
    pictures = {
        "attentions-curves.png": draw_curves(runs),
        "attentions-topk.png": draw_topk(runs, result["measurement"]),
    }
    return save(pictures, folder)


def save(pictures: Mapping[str, Figure | None], folder: Path) -> list[Path]:
    """Writes the pictures that there are by their names; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in pictures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=130)
            written.append(folder / name)
    return written


def draw_curves(runs: dict[str, list[Result]]) -> Figure | None:
    """Loss and accuracy over epochs."""
    there = {name: runs[name] for name in COMPARED if runs[name]}
    return curves(there, panels=PANELS, styles=STYLES, label=label)


def curves(
    runs: Mapping[str, Sequence[Result]],
    *,
    panels: Mapping[str, str],
    styles: Mapping[str, tuple[str, str]],
    label: Callable[[str], str],
) -> Figure | None:
    """Metrics over epochs: a thin line per seed, a thick one for their mean; None without runs.

    Args:
        runs: At least one for each attention.
        panels: Title by metric, one picture for each.
        styles: Colour and dash by attention.
        label: What to call an attention.
    """
    if not runs:
        return None
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (metric, title) in zip(places, panels.items(), strict=True):
        for name, mine in runs.items():
            columns = [run["history"] for run in mine]
            _draw_runs(axes, columns, metric, style=styles[name], text=label(name))
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    lines = places[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right center", frameon=False)
    return figure


def _draw_runs(
    axes: Axes, histories: Sequence[Result], metric: str, *, style: tuple[str, str], text: str
) -> None:
    colour, dash = style
    epochs = histories[0]["epoch"]
    columns = [history[metric] for history in histories]
    means = [sum(values) / len(values) for values in zip(*columns, strict=True)]
    if len(columns) > 1:
        for column in columns:
            axes.plot(epochs, column, color=colour, linestyle=dash, linewidth=0.6, alpha=0.5)
    marker = "." if len(epochs) == 1 else None  # one point has no line
    axes.plot(epochs, means, marker=marker, color=colour, linestyle=dash, linewidth=2, label=text)


def draw_topk(runs: dict[str, list[Result]], measurement: Result | None) -> Figure | None:
    """Accuracy and training speed over the number of cells kept per query."""
    scores = {k: score for k, name in TOPK.items() if (score := top1(runs[name])) is not None}
    if not scores:
        return None
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    left = figure.subplots()
    left.plot(*_points(scores), "o-", color=ACCURACY, linewidth=2)
    every = [(k, run["final"]["top1"]) for k in scores for run in runs[TOPK[k]]]
    left.plot(*zip(*every, strict=True), "x", color=ACCURACY, alpha=0.5)
    left.set_xscale("log", base=2)
    left.set_xticks(list(TOPK), labels=list(map(str, TOPK)))
    left.set(xlabel="K, cells kept per query and level")
    left.set_ylabel("validation top-1, % (crosses: seeds)", color=ACCURACY)
    left.grid(alpha=0.3)
    speeds = _speeds(measurement)
    if speeds:
        right = left.twinx()
        right.plot(*_points(speeds), "s--", color=SPEED, linewidth=2)
        right.set_ylabel("training images/s", color=SPEED)
        right.set_ylim(bottom=0)
    return figure


def _speeds(measurement: Result | None) -> dict[int, float]:
    if measurement is None:
        return {}
    rows = {row["recipe"]: row for row in measurement["rows"] if "median_ms" in row}
    batch = measurement["batch"]
    there = {k: rows[name] for k, name in TOPK.items() if name in rows}
    return {k: samples_per_second(row, batch) for k, row in there.items()}


def _points(values: dict[int, float]) -> tuple[Any, Any]:
    return tuple(values), tuple(values.values())
