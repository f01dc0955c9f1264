# SPDX-License-Identifier: Apache-2.0
"""The tables of results of `speed` and `quality`; those with fixed columns are in views.yaml."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.result import FIGURES, OUT_OF_MEMORY, THRESHOLDS, Result, Row, deviation
from benchmarks.tables.table import Column, View, name_of, number, outcome_of, words

FILE = Path(__file__).with_name("views.yaml")
NOT_MEASURED = "Not measured yet."
CHECKSUM = 12  # characters that are shown of one
DETECTOR_ATTENTIONS = {
    "held": "spatial reduction (PVTv2), scores held",
    "sr": "spatial reduction, fused",
    "quadtree": "QuadTree-B, K 32",
}
STEREO_NETWORKS = {
    "explicit": "full attention, scores held",
    "full": "full attention, fused",
    "quadtree": "QuadTree-B",
}
# Of the paper, at 960x540: STTR, features at 1/3; QuadTree-B, features at 1/2
STEREO_PAPER = {"explicit-3": "490 GFLOPs, 8507 MB", "quadtree-2": "254 GFLOPs, 5381 MB"}
ESTIMATORS = {"opencv": "OpenCV", "poselib": "poselib"}
TRUTHS = {"pose": ("Poses", "°"), "homography": ("Homographies", " px")}


# ---- values and formats of the columns in views.yaml


def spread(row: Row) -> str | None:
    """Quartiles of a time."""
    quartiles = [row.get("values", {}).get(key) for key in ("q25_ms", "q75_ms")]
    return None if None in quartiles else " - ".join(map(number, quartiles))


def baseline(row: Row) -> Mapping[str, Any]:
    """What tells the row of the baseline."""
    if "baseline" in row["case"]:
        return {"model": row["case"]["baseline"], "baseline": None}
    return {"model": row["values"]["baseline"]}


def stereo_paper(row: Row) -> str | None:
    """The paper's figures, beside the forward pass; it does not say of which pass they are."""
    shown = row["case"]["image"] == [960, 540] and row["case"]["pass"] == "forward"
    return STEREO_PAPER.get(row["case"]["network"]) if shown and "error" not in row else None


def code_params(row: Row) -> str | None:
    """Whether the official code builds as many parameters."""
    values = row["values"]
    figure = values["published"].get("code_params")
    if figure is None:
        return "not found" if values["baseline"] else None
    same = figure["value"] == values["params"]
    return "the same" if same else number(figure["value"] / 1e6)


def published(name: str, row: Row) -> str:
    """A published figure, how far ours is above it, and the key of its source."""
    figure = row["values"]["published"].get(name)
    if figure is None:
        return "not found"
    away = deviation(row["values"], name)
    shown = str(figure["value"]) if away is None else f"{figure['value']} ({100 * away:+.1f} %)"
    return f"{shown} [{row['sources'].index(figure['source']) + 1}]"


def shape(sides: Sequence[int]) -> str:
    """Of a tensor, or (height, width)."""
    return " x ".join(map(str, sides))


def _network(name: str) -> str:
    kind, _, stride = name.partition("-")
    return f"{STEREO_NETWORKS[kind]}, 1/{stride}"


VALUES: dict[str, Callable[[Row], Any]] = {
    "spread": spread,
    "baseline": baseline,
    "batch_of_images": lambda row: "{batch} of {image[0]}x{image[1]}".format(**row["case"]),
    "stereo_paper": stereo_paper,
    "code_params": code_params,
    **{f"published_{name}": partial(published, name) for name in FIGURES},
}
WORDS: dict[str, Callable[[Any], str]] = {  # formats of text, which is aligned to the left
    "text": str,
    "size": lambda image: "x".join(map(str, image)),
    "shape": shape,
    "attention": lambda name: DETECTOR_ATTENTIONS.get(name, name),
    "network": _network,
}
NUMBERS: dict[str, Callable[[Any], str]] = {
    "number": number,
    "string": str,
    "times": lambda value: f"{number(value)}x",
    "share": lambda value: f"{value:.2f}x",
    "1e6": lambda value: number(value / 1e6),
    "1e9": lambda value: number(value / 1e9),
    ".0f": "{:.0f}".format,
    ".1f": "{:.1f}".format,
    ".2f": "{:.2f}".format,
}


@cache
def stored_views() -> dict[str, list[View]]:
    """The views of views.yaml."""
    content = yaml.safe_load(FILE.read_text())
    return {kind: [_view(**fields) for fields in views] for kind, views in content.items()}


def _view(
    columns: Sequence[Sequence[Any]],
    where: Mapping[str, Any] | None = None,
    each: Mapping[str, Sequence[str]] | None = None,
    **fields: Any,
) -> View:
    case = dict(where or {})
    return View(
        [column(*fields) for fields in columns],
        each=next(iter(each.items())) if each else None,
        rows=lambda rows: [row for row in rows if case.items() <= row["case"].items()],
        **fields,
    )


def column(
    heading: str, value: str, form: Any = "number", options: Mapping[str, Any] | None = None
) -> Column:
    """A column as in views.yaml."""
    options = {key: _function(option) for key, option in (options or {}).items()}
    text = str(form) in WORDS
    formats = WORDS if text else NUMBERS
    return Column(heading, _function(value), formats[str(form)], words=text, **options)


def _function(value: Any) -> Any:
    return VALUES[value[1:]] if isinstance(value, str) and value.startswith("=") else value


# ---- tables whose columns depend on their rows


def _ops(rows: Sequence[Row]) -> list[Column]:
    """Time and memory of every implementation, then their speed relative to full attention."""
    names = dict.fromkeys(row["case"]["implementation"] for row in rows)
    ofs = {name: {"implementation": name} for name in names}
    columns = words("case dtype mode")
    for name, of in ofs.items():
        columns += [column(f"{name} ms", "values.median_ms", "number", {"of": of}),
                    column(f"{name} MiB", "values.peak_mib", "number", {"of": of})]  # fmt: skip
    for name in (name for name in ofs if "sdpa" in ofs and name != "sdpa"):
        more = {"of": ofs[name], "relative": ofs["sdpa"], "inverse": True}
        columns.append(column(f"{name} vs sdpa", "values.median_ms", "times", more))
    return columns


def matching_view(truth: str) -> View:
    """Matches and what two estimators make of them, of poses or of homographies."""
    title, unit = TRUTHS[truth]
    thresholds = THRESHOLDS[truth]
    columns = words("set method")
    columns += [column("matches", "values.matches", ".0f"),
                column("correct %", "values.precision", ".1f")]  # fmt: skip
    for name, label in ESTIMATORS.items():
        areas = f"{label} AUC@{'/'.join(thresholds)}{unit}"
        columns += [Column(areas, f"values.estimators.{name}.auc", _areas)]
        within = f"{label} within {thresholds[-1]}{unit}"
        columns += [Column(within, partial(_within, name, float(thresholds[-1])), str)]
    columns.append(column("s per pair", "values.median_seconds"))
    chosen = lambda rows: [row for row in rows if row["values"]["truth"] == truth]  # noqa: E731
    return View(columns, title=title, rows=chosen)


def _areas(areas: Mapping[str, float]) -> str:
    return " / ".join(f"{area:.1f}" for area in areas.values())


def _within(estimator: str, largest: float, row: Row) -> str:
    errors = errors_of(row, estimator)
    return f"{sum(e is not None and e < largest for e in errors)} of {len(errors)}"


def errors_of(row: Row, estimator: str) -> list[float | None]:
    """Of all pairs; None for failures."""
    details = row["details"]
    if "errors" in details:
        return details["errors"][estimator]
    return [pair["errors"][estimator] for pair in details["pairs"]]


def _pairs(rows: Sequence[Row]) -> list[Row]:
    """A row for every pair and method."""
    return [{"case": {"pair": pair["name"], **row["case"]}, "values": pair["scores"]}
            for row in rows for pair in row["details"]["pairs"]]  # fmt: skip


def _pair_columns(rows: Sequence[Row]) -> list[Column]:
    columns = words("pair")
    for method in dict.fromkeys(row["case"]["method"] for row in rows):
        for name, title in (("epe", "EPE px"), ("bad3", "bad-3 %"), ("d1", "D1 %")):
            of = {"of": {"method": method}}
            columns.append(column(f"{method} {title}", f"values.{name}_all", ".2f", of))
    return columns


OPS = View(_ops, by=("case", "dtype", "mode"), each=("pass", ("forward", "forward+backward")))
VIEWS = {"speed/ops": [OPS], "quality/matching": [matching_view(truth) for truth in TRUTHS]}
PAIRS = View(_pair_columns, by=("pair",), rows=_pairs)


# ---- sections


def views_of(result: Result) -> list[View]:
    """The tables of a result."""
    kind = result["kind"]
    return [
        *VIEWS.get(kind, stored_views().get(kind, [])),
        *([PAIRS] if kind == "quality/stereo" else []),
    ]


def text(result: Result) -> str:
    """All tables of a result, for a terminal."""
    rows = _rows(result)
    tables = [view.text(rows) for view in views_of(result) if view.rows(rows)]
    return "\n\n".join(filter(None, [*tables, "\n".join(_not_measured(rows))]))


def section(name: str, result: Result) -> str:
    """Heading, circumstances, tables and what was not measured, of one result file."""
    rows = _rows(result)
    lines = [f"### {result['runs'][0]['machine']['device_name']}: `{name}.json`"]
    for run in result["runs"]:
        lines += ["", circumstances(run), "", f"    {run['command']}"]
        lines += [line for about in _settings(run["settings"]) for line in ("", about)]
    for view in views_of(result):
        if table := view.markdown(rows):
            notes = _notes(view.rows(rows))
            lines += ["", *table, *(["", *notes] if notes else [])]
    if missing := _not_measured(rows):
        lines += ["", "Not measured:", "", *missing]
    if sources := _sources(result):
        lines += ["", "Published figures are from:", ""]
        lines += [f"{i}. {source}" for i, source in enumerate(sources, 1)]
    return "\n".join(lines)


def _sources(result: Result) -> list[str]:
    found = [row.get("values", {}).get("published", {}) for row in result["rows"]]
    figures = [figures[name] for figures in found for name in FIGURES if name in figures]
    return list(dict.fromkeys(figure["source"] for figure in figures))


def _rows(result: Result) -> list[Row]:
    """The rows with the sources of published figures, which cells refer to."""
    sources = _sources(result)
    return [row | {"sources": sources} for row in result["rows"]]


def _notes(rows: Sequence[Row]) -> list[str]:
    """What is to be said about published figures."""
    lines = []
    for row in (row for row in rows if "note" in row.get("values", {})):
        detector, text = row["values"].get("detector", {}), row["values"]["note"] or ""
        if (found := detector.get("macs_at_published_image")) is not None:
            text += (
                f" Counted at {shape(detector['published_image'])}: {number(found / 1e9)} GMACs."
            )
        if text:
            lines.append(f"- {row['case']['model']}: {text.strip()}")
    return lines


def circumstances(run: Result) -> str:
    """Machine, versions, date and commit of a command."""
    machine = run["machine"]
    variant = f"Variant {run['settings']['variant']}. " if "variant" in run["settings"] else ""
    software = ", ".join(f"{key} {value}" for key, value in run["versions"].items() if value)
    commit = f", commit {run['commit'][:CHECKSUM]}" if run["commit"] else ""
    return (
        f"{variant}CPU {machine['cpu']}, {machine['cores']} cores, {machine['threads']} used, load "
        f"{number(machine['load'])} before the run. {software}. {run['date'][:10]}{commit}."
    )


def _settings(settings: Mapping[str, Any]) -> list[str]:
    """What a reader has to know of the settings, a paragraph each."""
    limit, methods = settings.get("memory_gib"), settings.get("methods", {})
    memory = [] if limit is None else [f"PyTorch was given {number(limit)} GiB of the GPU."]
    return memory + ["\n".join(f"- {name}: {_said(m)}" for name, m in methods.items())] * bool(
        methods
    )


def _said(settings: Mapping[str, Any]) -> str:
    """Settings in words; of checksums the first characters."""
    shown = {
        key.replace("_", " "): value[:CHECKSUM] if key.endswith("sha256") else value
        for key, value in settings.items()
        if value is not None
    }
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _not_measured(rows: Sequence[Row]) -> list[str]:
    """Rows without values, but for those whose memory did not suffice, which tables show."""
    missing = [row for row in rows if "error" in row or "skipped" in row]
    missing = [row for row in missing if row.get("error") != OUT_OF_MEMORY]
    return [f"- {name_of(row['case'])}: {outcome_of(row)}" for row in missing]
