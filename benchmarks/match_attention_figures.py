# SPDX-License-Identifier: Apache-2.0
"""Pictures from a result file of `benchmarks.match_attentions`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.attention_figures import curves, save
from benchmarks.attention_results import Result
from benchmarks.match_attention_tables import (
    AREAS,
    CURVES,
    JUDGED,
    LABELS,
    SIFT,
    compared_runs,
    label,
    pooled,
)
from benchmarks.matching_tables import ESTIMATORS, THRESHOLDS

# One colour per attention, told apart by colour-blind readers too; K is in the dash.
STYLES = {
    "linear": ("#999999", "-"),
    "full": ("#000000", "-"),
    "spatial-reduction": ("#E69F00", "-"),
    "quadtree-a": ("#009E73", "-"),
    "quadtree-b-k1": ("#D00000", ":"),
    "quadtree-b-k4": ("#D00000", "--"),
    "quadtree-b": ("#D00000", "-"),
}
OTHER = ("#56B4E9", "-")  # of a recipe that is none of these
PANELS = {"train/loss": "training loss", "val/fscore": "validation F-score, %"}
POSES = {"val/auc10": "validation AUC@10°, %"}  # where runs have it
COLOURS = {"5": "#56B4E9", "10": "#0072B2", "20": "#000000"}  # by degrees
MARKERS = {"poselib": "o", "opencv": "x"}


def draw_all(result: Result, folder: Path) -> list[Path]:
    """Draws what the result holds; returns the files written."""
    areas = draw_areas(pooled(result))
    return save({CURVES: draw_curves(compared_runs(result)), AREAS: areas}, folder)


def draw_curves(runs: Mapping[str, Sequence[Result]]) -> Figure | None:
    """Loss and F-score over epochs, and poses where all runs have them."""
    there = {name: mine for name, mine in runs.items() if mine}
    histories = [run["history"] for mine in there.values() for run in mine]
    poses = all("val/auc10" in history for history in histories)
    styles = {name: STYLES.get(name, OTHER) for name in there}
    return curves(there, panels=PANELS | (POSES if poses else {}), styles=styles, label=label)


def draw_areas(rows: Mapping[tuple[str, str], Result]) -> Figure | None:
    """AUC of poses by attention: a picture per set, a row per attention, a colour per threshold."""
    sets = [name for name in JUDGED if any(key[0] == name for key in rows)]
    if not sets:
        return None
    names = [name for name in (SIFT, *LABELS) if any((s, name) in rows for s in sets)]
    figure = Figure(figsize=(5.2 * len(sets), 1.4 + 0.42 * len(names)), layout="constrained")
    places = figure.subplots(1, len(sets), squeeze=False, sharey=True)[0]
    for axes, name in zip(places, sets, strict=True):
        mine = {recipe: row for (set_, recipe), row in rows.items() if set_ == name}
        _draw_set(axes, mine, names)
        pairs = next(row["pairs"] // row["seeds"] for row in mine.values())
        axes.set(title=f"{name}, {pairs} pairs", xlabel="AUC, %")
    lines = places[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=len(COLOURS), frameon=False)
    return figure


def _draw_set(axes: Axes, rows: Mapping[str, Result], names: Sequence[str]) -> None:
    there = [name for name in names if name in rows]
    places = [names.index(name) for name in there]
    for degrees in THRESHOLDS["pose"]:
        for estimator, marker in MARKERS.items():
            areas = [rows[name]["estimators"][estimator]["auc"][degrees] for name in there]
            text = f"AUC@{degrees}°, {ESTIMATORS[estimator]}"
            colour = COLOURS[degrees]
            axes.plot(areas, places, marker, color=colour, label=text, clip_on=False)
    axes.set_yticks(range(len(names)), labels=[label(name) for name in names])
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
