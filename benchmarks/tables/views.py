# SPDX-License-Identifier: Apache-2.0
"""The tables of every kind of result of `speed` and `quality`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.result import (
    FIGURES,
    OUT_OF_MEMORY,
    PASSES,
    STAGES,
    TASKS,
    THRESHOLDS,
    Result,
    Row,
    deviation,
)
from benchmarks.tables.table import (
    Column,
    View,
    fixed,
    name_of,
    number,
    outcome_of,
    scaled,
    shape,
    size,
    spread,
    times,
    word,
    words,
)

NOT_MEASURED = "Not measured yet."
CHECKSUM = 12  # characters that are shown of one

MS, MIB = "values.median_ms", "values.peak_mib"
TIME = [Column("ms", MS, outcome=True), Column("q25 - q75", spread, str)]
GMACS = [
    Column("GMACs", "values.macs", scaled(1e9)),
    Column("of it attention", "values.attention_macs", scaled(1e9)),
]


# ---- speed


def _ops(rows: Sequence[Row]) -> list[Column]:
    """Time and memory of every implementation, then their speed relative to full attention."""
    names = dict.fromkeys(row["case"]["implementation"] for row in rows)
    ofs = {name: {"implementation": name} for name in names}
    columns = words("case dtype mode")
    for name, of in ofs.items():
        columns += [Column(f"{name} ms", MS, of=of), Column(f"{name} MiB", MIB, of=of)]
    for name in names if "sdpa" in names else ():
        if name != "sdpa":
            more = {"of": ofs[name], "relative": ofs["sdpa"], "inverse": True}
            columns.append(Column(f"{name} vs sdpa", MS, times, **more))
    return columns


def _baseline(row: Row) -> Mapping[str, Any]:
    if "baseline" in row["case"]:
        return {"model": row["case"]["baseline"], "baseline": None}
    return {"model": row["values"]["baseline"]}


BACKBONES = [
    word("images", "case.images", shape),
    *words("mode precision model"),
    Column("ms", MS),
    Column("MiB", MIB),
    *words("baseline"),
    Column("speed", MS, times, relative=_baseline, inverse=True),
    Column("memory", MIB, times, relative=_baseline),
]
DETECTOR_ATTENTIONS = {
    "held": "spatial reduction (PVTv2), scores held",
    "sr": "spatial reduction, fused",
    "quadtree": "QuadTree-B, K 32",
}


def _shares(path: str) -> list[Column]:
    return [
        Column(f"of {name}", path, lambda value: f"{value:.2f}x", relative={"attention": base})
        for base, name in (("held", "held"), ("sr", "fused"))
    ]


DETECTORS = [
    word("images", "case", lambda case: f"{case['batch']} of {size(case['image'])}"),
    *words("part precision mode"),
    word("attention", "case.attention", lambda name: DETECTOR_ATTENTIONS.get(name, name)),
    *TIME,
    *_shares(MS),
    Column("peak MiB", MIB),
    *_shares(MIB),
]
_MATCHER = [word("image", "case.image", size), *words("model precision attention")]
_STAGES = [Column(stage, f"values.stages_ms.{stage}") for stage in STAGES]
MATCHER_TIMES = [
    *_MATCHER,
    Column("median", MS, outcome=True),
    TIME[1],
    *_STAGES[:2],
    Column("of it attention", "values.stages_ms.attention"),
    *_STAGES[2:],
]
MATCHER_MEMORY = [
    *_MATCHER,
    Column("whole", MIB, outcome=True),
    *(Column(stage, f"values.stages_mib.{stage}") for stage in STAGES),
]
STEREO_NETWORKS = {
    "explicit": "full attention, scores held",
    "full": "full attention, fused",
    "quadtree": "QuadTree-B",
}
# Of the paper, at 960x540: STTR, features at 1/3; QuadTree-B, features at 1/2
STEREO_PAPER = {"explicit-3": "490 GFLOPs, 8507 MB", "quadtree-2": "254 GFLOPs, 5381 MB"}


def _stereo_network(name: str) -> str:
    kind, _, stride = name.partition("-")
    return f"{STEREO_NETWORKS[kind]}, 1/{stride}"


def _stereo_paper(row: Row) -> str | None:
    """The paper's figures, beside the forward pass; it does not say of which pass they are."""
    at = (row["case"]["image"], row["case"]["pass"])
    shown = at == ([960, 540], PASSES[0]) and "error" not in row
    return STEREO_PAPER.get(row["case"]["network"]) if shown else None


STEREO_COSTS = [
    word("image", "case.image", size),
    *words("pass precision"),
    word("network and features", "case.network", _stereo_network),
    *GMACS,
    *TIME,
    Column("peak MiB", MIB),
    Column("paper", _stereo_paper, str),
]
SCENES = [
    *words("part"),
    *TIME,
    Column("host ms", "values.host_ms"),
    Column("pairs/s", "values.pairs_per_second"),
    Column("peak MiB", MIB),
]


# ---- counts


def counts_views(result: Result) -> list[View]:
    """A table of classifiers and one of backbones."""
    views, sources = [], _sources(result)
    for task in TASKS:
        if mine := [row for row in result["rows"] if row["case"]["task"] == task]:
            title = f"{task.capitalize()}, {shape(mine[0]['values']['image'])}"
            columns = _count_columns(task, sources)
            views.append(View(columns, title=title, rows=lambda _, mine=mine: mine,
                              notes=_count_notes))  # fmt: skip
    return views


def _sources(result: Result) -> list[str]:
    figures = [row["values"]["published"].get(name) for row in result["rows"] for name in FIGURES]
    return list(dict.fromkeys(figure["source"] for figure in figures if figure))


def _count_columns(task: str, sources: Sequence[str]) -> list[Column]:
    whole = task == TASKS[1]  # published figures are then of a RetinaNet
    texts = [_published(name, sources) for name in FIGURES[1:]]
    counted = [("RetinaNet params M", "params", 1e6), ("GMACs", "macs", 1e9)]
    ours = [Column(h, f"values.detector.{key}", scaled(unit)) for h, key, unit in counted]
    return [
        *words("model"),
        Column("K", "values.topk", str),
        Column("params M", "values.params", scaled(1e6)),
        Column("official code", _code_params, str),
        *GMACS,
        Column("vs baseline", "values.macs", times, relative=_baseline),
        *(ours[:1] if whole else []),
        Column("published M", texts[0], str),
        *(ours[1:] if whole else []),
        Column("published G", texts[1], str),
        Column("box AP" if whole else "top-1", texts[2], str),
    ]


def _code_params(row: Row) -> str | None:
    values = row["values"]
    figure = values["published"].get("code_params")
    if figure is None:
        return "not found" if values["baseline"] else None
    same = figure["value"] == values["params"]
    return "the same" if same else number(figure["value"] / 1e6)


def _published(name: str, sources: Sequence[str]) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        figure = row["values"]["published"].get(name)
        if figure is None:
            return "not found"
        away = deviation(row["values"], name)
        shown = str(figure["value"]) if away is None else f"{figure['value']} ({100 * away:+.1f} %)"
        return f"{shown} [{sources.index(figure['source']) + 1}]"

    return text


def _count_notes(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        detector, text = row["values"].get("detector", {}), row["values"]["note"] or ""
        if (found := detector.get("macs_at_published_image")) is not None:
            at = shape(detector["published_image"])
            text += f" Counted at {at}: {number(found / 1e9)} GMACs."
        if text:
            lines.append(f"- {row['case']['model']}: {text.strip()}")
    return lines


# ---- quality

ESTIMATORS = {"opencv": "OpenCV", "poselib": "poselib"}
TRUTHS = {"pose": ("Poses", "°"), "homography": ("Homographies", " px")}
STEREO_COLUMNS = {"epe": "EPE px", "bad3": "bad-3 %", "d1": "D1 %"}


def matching_view(truth: str) -> View:
    """Matches and what two estimators make of them, of poses or of homographies."""
    title, unit = TRUTHS[truth]
    thresholds = THRESHOLDS[truth]
    columns = [
        *words("set method"),
        Column("matches", "values.matches", fixed(0)),
        Column("correct %", "values.precision", fixed(1)),
    ]
    for name, label in ESTIMATORS.items():
        areas = f"{label} AUC@{'/'.join(thresholds)}{unit}"
        columns += [Column(areas, f"values.estimators.{name}.auc", _areas)]
        within = f"{label} within {thresholds[-1]}{unit}"
        columns += [Column(within, _within(name, float(thresholds[-1])), str)]
    columns.append(Column("s per pair", "values.median_seconds"))
    return View(
        columns,
        title=title,
        rows=lambda rows: [row for row in rows if row["values"]["truth"] == truth],
    )


def _areas(areas: Mapping[str, float]) -> str:
    return " / ".join(f"{area:.1f}" for area in areas.values())


def _within(estimator: str, largest: float) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        errors = errors_of(row, estimator)
        within = sum(error is not None and error < largest for error in errors)
        return f"{within} of {len(errors)}"

    return text


def errors_of(row: Row, estimator: str) -> list[float | None]:
    """Of all pairs; None for failures."""
    details = row["details"]
    if "errors" in details:
        return details["errors"][estimator]
    return [pair["errors"][estimator] for pair in details["pairs"]]


STEREO_MEANS = [
    *words("method"),
    *(Column(f"{title}, {region}", f"values.mean.{name}_{key}", fixed(2))
      for key, region in (("noc", "not occluded"), ("all", "all"))
      for name, title in STEREO_COLUMNS.items()),
    Column("occlusion IoU", "values.mean.occlusion_iou", fixed(2)),
    Column("s per pair", "values.median_seconds"),
]  # fmt: skip


def _pairs(rows: Sequence[Row]) -> list[Row]:
    """A row for every pair and method."""
    return [{"case": {"pair": pair["name"], **row["case"]}, "values": pair["scores"]}
            for row in rows for pair in row["details"]["pairs"]]  # fmt: skip


def _pair_columns(rows: Sequence[Row]) -> list[Column]:
    columns = words("pair")
    for method in dict.fromkeys(row["case"]["method"] for row in rows):
        for name, title in STEREO_COLUMNS.items():
            path, of = f"values.{name}_all", {"method": method}
            columns.append(Column(f"{method} {title}", path, fixed(2), of=of))
    return columns


# ---- sections

VIEWS: dict[str, list[View] | Callable[[Result], list[View]]] = {
    "speed/ops": [View(_ops, by=("case", "dtype", "mode"),
                       each=("pass", ("forward", "forward+backward")))],
    "speed/counts": counts_views,
    "speed/backbones": [View(BACKBONES, by=("task", "mode", "model"), each=("pass", PASSES))],
    "speed/detectors": [View(DETECTORS)],
    "speed/matchers": [View(MATCHER_TIMES, title="Milliseconds of a pair"),
                       View(MATCHER_MEMORY, title="Peak memory in MiB")],
    "speed/stereo": [View(STEREO_COSTS)],
    "speed/scenes": [View(SCENES)],
    "quality/matching": [matching_view(truth) for truth in TRUTHS],
    "quality/stereo": [View(STEREO_MEANS), View(_pair_columns, by=("pair",), rows=_pairs)],
}  # fmt: skip


def views_of(result: Result) -> list[View]:
    """The tables of a result."""
    views = VIEWS[result["kind"]]
    return views(result) if callable(views) else views


def text(result: Result) -> str:
    """All tables of a result, for a terminal."""
    tables = [view.text(result["rows"]) for view in views_of(result) if view.rows(result["rows"])]
    missing = "\n".join(_not_measured(result["rows"]))
    return "\n\n".join(filter(None, [*tables, missing]))


def section(name: str, result: Result) -> str:
    """Heading, circumstances, tables and what was not measured, of one result file."""
    rows = result["rows"]
    lines = [f"### {result['runs'][0]['machine']['device_name']}: `{name}.json`"]
    for run in result["runs"]:
        lines += ["", circumstances(run), "", f"    {run['command']}"]
        lines += [line for about in _settings(run["settings"]) for line in ("", about)]
    for view in views_of(result):
        lines += ["", *view.markdown(rows)]
    if missing := _not_measured(rows):
        lines += ["", "Not measured:", "", *missing]
    if result["kind"] == "speed/counts":
        lines += ["", "Published figures are from:", ""]
        lines += [f"{i}. {source}" for i, source in enumerate(_sources(result), 1)]
    return "\n".join(lines).rstrip()


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
    paragraphs = []
    if settings.get("memory_gib") is not None:
        paragraphs.append(f"PyTorch was given {number(settings['memory_gib'])} GiB of the GPU.")
    methods = [f"- {name}: {_said(method)}" for name, method in settings.get("methods", {}).items()]
    return paragraphs + (["\n".join(methods)] if methods else [])


def _said(settings: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in settings.items() if value is not None}
    for key in shown:
        if key.endswith("sha256"):
            shown[key] = shown[key][:CHECKSUM]
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items())


def _not_measured(rows: Sequence[Row]) -> list[str]:
    """Rows without values, but for those whose memory did not suffice, which tables show."""
    missing = [row for row in rows if "error" in row or "skipped" in row]
    missing = [row for row in missing if row.get("error") != OUT_OF_MEMORY]
    return [f"- {name_of(row['case'])}: {outcome_of(row)}" for row in missing]
