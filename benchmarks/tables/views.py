# SPDX-License-Identifier: Apache-2.0
"""The tables of every kind of result of `speed` and `quality`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.result import (
    FIGURES,
    OUT_OF_MEMORY,
    PASSES,
    STAGES,
    STEREO_SCORES,
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
)

NOT_MEASURED = "Not measured yet."
CHECKSUM = 12  # characters that are shown of one

MS, MIB = "values.median_ms", "values.peak_mib"
GMACS = [Column("GMACs", "values.macs", scaled(1e9)),
         Column("of it attention", "values.attention_macs", scaled(1e9))]  # fmt: skip


def where(**case: Any) -> Callable[[Sequence[Row]], list[Row]]:
    """Rows with these entries in their case."""
    return lambda rows: [row for row in rows if case.items() <= row["case"].items()]


# ---- speed


def _ops(rows: Sequence[Row]) -> list[Column]:
    """Time and memory of every implementation, then their speed relative to full attention."""
    names = list(dict.fromkeys(row["case"]["implementation"] for row in rows))
    columns = [word(key, f"case.{key}") for key in ("case", "dtype", "mode")]
    for name in names:
        of = {"implementation": name}
        columns += [Column(f"{name} ms", MS, of=of), Column(f"{name} MiB", MIB, of=of)]
    base = {"implementation": "sdpa"}
    return columns + [
        Column(f"{name} vs sdpa", MS, times, of={"implementation": name}, relative=base,
               inverse=True)
        for name in names if "sdpa" in names and name != "sdpa"
    ]  # fmt: skip


def _baseline(row: Row) -> Mapping[str, Any]:
    name = row["case"].get("baseline", row.get("values", {}).get("baseline"))
    entries: dict[str, Any] = {"model": name}
    return entries | ({"baseline": None} if "baseline" in row["case"] else {})


BACKBONES = [
    word("images", "case.images", shape),
    word("mode", "case.mode"),
    word("precision", "case.precision"),
    word("model", "case.model"),
    Column("ms", MS),
    Column("MiB", MIB),
    word("baseline", "case.baseline"),
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


def _detector_images(row: Row) -> str:
    return f"{row['case']['batch']} of {size(row['case']['image'])}"


DETECTORS = [
    word("images", _detector_images),
    *(word(key, f"case.{key}") for key in ("part", "precision", "mode")),
    word("attention", "case.attention", lambda name: DETECTOR_ATTENTIONS.get(name, name)),
    Column("ms", MS, outcome=True),
    Column("q25 - q75", spread, str),
    *_shares(MS),
    Column("peak MiB", MIB),
    *_shares(MIB),
]
_MATCHER = [
    word("image", "case.image", size),
    *(word(key, f"case.{key}") for key in ("model", "precision", "attention")),
]
MATCHER_TIMES = [
    *_MATCHER,
    Column("median", MS, outcome=True),
    Column("q25 - q75", spread, str),
    *(Column(stage, f"values.stages_ms.{stage}") for stage in STAGES[:2]),
    Column("of it attention", "values.stages_ms.attention"),
    *(Column(stage, f"values.stages_ms.{stage}") for stage in STAGES[2:]),
]
MATCHER_MEMORY = [
    *_MATCHER,
    Column("whole", MIB, outcome=True),
    *(Column(stage, f"values.stages_mib.{stage}") for stage in STAGES),
]
STEREO_NETWORKS = {
    f"{name}-{stride}": f"{words}, 1/{stride}"
    for stride in (3, 2)
    for name, words in (
        ("explicit", "full attention, scores held"),
        ("full", "full attention, fused"),
        ("quadtree", "QuadTree-B"),
    )
}
# Of the paper, at 960x540: STTR, features at 1/3; QuadTree-B, features at 1/2
STEREO_PAPER = {
    "explicit-3": "490 GFLOPs, 8507 MB",
    "quadtree-2": "254 GFLOPs, 5381 MB",
}


def _stereo_paper(row: Row) -> str | None:
    """The paper's figures, beside the forward pass; it does not say of which pass they are."""
    at = (row["case"]["image"], row["case"]["pass"])
    shown = at == ([960, 540], PASSES[0]) and "error" not in row
    return STEREO_PAPER.get(row["case"]["network"]) if shown else None


STEREO_COSTS = [
    word("image", "case.image", size),
    word("pass", "case.pass"),
    word("precision", "case.precision"),
    word("network and features", "case.network", lambda name: STEREO_NETWORKS.get(name, name)),
    *GMACS,
    Column("ms", MS, outcome=True),
    Column("q25 - q75", spread, str),
    Column("peak MiB", MIB),
    Column("paper", _stereo_paper, str),
]
SCENES = [
    word("part", "case.part"),
    Column("ms", MS, outcome=True),
    Column("q25 - q75", spread, str),
    Column("host ms", "values.host_ms"),
    Column("pairs/s", "values.pairs_per_second"),
    Column("peak MiB", MIB),
]


# ---- counts


def counts_views(result: Result) -> list[View]:
    """A table of classifiers and one of backbones."""
    sources = _sources(result)
    return [
        View(
            columns=_count_columns(task, sources),
            title=f"{task.capitalize()}, {shape(rows[0]['values']['image'])}",
            rows=where(task=task),
            notes=_count_notes,
        )
        for task in TASKS
        if (rows := where(task=task)(result["rows"]))
    ]


def _sources(result: Result) -> list[str]:
    figures = [row["values"]["published"].get(name) for row in result["rows"] for name in FIGURES]
    return list(dict.fromkeys(figure["source"] for figure in figures if figure))


def _count_columns(task: str, sources: Sequence[str]) -> list[Column]:
    params, macs, score = (_published(name, sources) for name in FIGURES[1:])
    columns = [
        word("model", "case.model"),
        Column("K", "values.topk", str),
        Column("params M", "values.params", scaled(1e6)),
        Column("official code", _code_params, str),
        *GMACS,
        Column("vs baseline", "values.macs", times, relative=_baseline),
    ]
    if task == TASKS[0]:
        return [
            *columns,
            Column("published M", params, str),
            Column("published G", macs, str),
            Column("top-1", score, str),
        ]
    return [
        *columns,
        Column("RetinaNet params M", "values.detector.params", scaled(1000000.0)),
        Column("published M", params, str),
        Column("GMACs", "values.detector.macs", scaled(1000000000.0)),
        Column("published G", macs, str),
        Column("box AP", score, str),
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
        word("set", "case.set"),
        word("method", "case.method"),
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
    word("method", "case.method"),
    *(Column(f"{title}, {words}", f"values.mean.{name}_{region}", fixed(2))
      for region, words in (("noc", "not occluded"), ("all", "all"))
      for name, title in STEREO_COLUMNS.items()),
    Column("occlusion IoU", f"values.mean.{STEREO_SCORES[-2]}", fixed(2)),
    Column("s per pair", "values.median_seconds"),
]  # fmt: skip


def _pairs(rows: Sequence[Row]) -> list[Row]:
    """A row for every pair and method."""
    return [
        {"case": {"pair": pair["name"], **row["case"]}, "values": pair["scores"]}
        for row in rows
        for pair in row["details"]["pairs"]
    ]


def _pair_columns(rows: Sequence[Row]) -> list[Column]:
    methods = dict.fromkeys(row["case"]["method"] for row in rows)
    return [word("pair", "case.pair")] + [
        Column(f"{method} {title}", f"values.{name}_all", fixed(2), of={"method": method})
        for method in methods
        for name, title in STEREO_COLUMNS.items()
    ]


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
