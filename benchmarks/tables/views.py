# SPDX-License-Identifier: Apache-2.0
"""The tables of results that views.yaml declares: values, formats, and the sections of a page."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.result import FIGURES, OUT_OF_MEMORY, Result, Row, deviation
from benchmarks.tables.table import Column, View, fold, name_of, number, outcome_of

FILE = Path(__file__).with_name("views.yaml")
NOT_MEASURED = "Not measured yet."
PROVENANCE = "Machine, versions, command"
CHECKSUM = 12  # characters that are shown of one
# Of the paper, at 960x540: STTR, features at 1/3; QuadTree-B, features at 1/2
STEREO_PAPER = {"explicit-3": "490 GFLOPs, 8507 MB", "quadtree-2": "254 GFLOPs, 5381 MB"}
ESTIMATORS = {"opencv": "OpenCV", "poselib": "poselib"}


# ---- values and formats of the columns in views.yaml


def spread(row: Row) -> str | None:
    """Quartiles of a time."""
    quartiles = [row.get("values", {}).get(key) for key in ("q25_ms", "q75_ms")]
    return None if None in quartiles else " - ".join(map(number, quartiles))


def baseline(row: Row) -> Mapping[str, Any]:
    """Entries of the case that identify the row of the baseline."""
    if "baseline" in row["case"]:
        return {"model": row["case"]["baseline"], "baseline": None}
    return {"model": row["values"]["baseline"]}


def stereo_paper(row: Row) -> str | None:
    """The paper's figures, shown with the forward pass; the paper does not state the pass."""
    shown = row["case"]["image"] == [960, 540] and row["case"]["pass"] == "forward"
    return STEREO_PAPER.get(row["case"]["network"]) if shown and "error" not in row else None


def code_params(row: Row) -> str | None:
    """Comparison of the number of parameters with the official code."""
    values = row["values"]
    figure = values["published"].get("code_params")
    if figure is None:
        return "not found" if values["baseline"] else None
    same = figure["value"] == values["params"]
    return "the same" if same else number(figure["value"] / 1e6)


def published(name: str, row: Row) -> str:
    """A published figure, the relative difference of ours, and the number of its source."""
    figure = row["values"]["published"].get(name)
    if figure is None:
        return "not found"
    away = deviation(row["values"], name)
    shown = str(figure["value"]) if away is None else f"{figure['value']} ({100 * away:+.1f} %)"
    return f"{shown} [{row['sources'].index(figure['source']) + 1}]"


def within(estimator: str, largest: str, row: Row) -> str:
    """Number of pairs with an error below a limit."""
    errors = errors_of(row, estimator)
    return f"{sum(e is not None and e < float(largest) for e in errors)} of {len(errors)}"


def errors_of(row: Row, estimator: str) -> list[float | None]:
    """Errors of all pairs; None for failures."""
    details = row["details"]
    if "errors" in details:
        return details["errors"][estimator]
    return [pair["errors"][estimator] for pair in details["pairs"]]


def pairs(rows: Sequence[Row]) -> list[Row]:
    """One row per pair and method."""
    return [{"case": {"pair": pair["name"], **row["case"]}, "values": pair["scores"]}
            for row in rows for pair in row["details"]["pairs"]]  # fmt: skip


def mass(row: Row) -> str:
    """Mass that K was calibrated for."""
    value = row["case"]["mass"]
    return "fixed K" if value is None else f"{value:g}"


def seconds_per_pair(row: Row) -> float:
    return row["values"]["median_ms"] / 1e3 / row["case"]["pairs"]


def shape(sides: Sequence[int]) -> str:
    """Text of the shape of a tensor or image (height, width)."""
    return " x ".join(map(str, sides))


VALUES: dict[str, Callable[..., Any]] = {  # of words after the name, if there are any, and of a row
    "spread": spread,
    "baseline": baseline,
    "batch_of_images": lambda row: "{batch} of {image[0]}x{image[1]}".format(**row["case"]),
    "stereo_paper": stereo_paper,
    "code_params": code_params,
    "published": published,
    "within": within,
    "pairs": pairs,
    "mass": mass,
    "seconds_per_pair": seconds_per_pair,
}
WORDS: dict[str, Callable[[Any], str]] = {  # formats of text, which is aligned to the left
    "text": str,
    "size": lambda image: "x".join(map(str, image)),
    "shape": shape,
    "listed": lambda values: ", ".join(map(str, values)) or "none",
}
NUMBERS: dict[str, Callable[[Any], str]] = {
    "number": number,
    "string": str,
    "times": lambda value: f"{number(value)}x",
    "share": lambda value: f"{value:.2f}x",
    "1e6": lambda value: number(value / 1e6),
    "1e9": lambda value: number(value / 1e9),
    "areas": lambda areas: " / ".join(f"{area:.1f}" for area in areas.values()),
    **{digits: f"{{:{digits}}}".format for digits in (".0f", ".1f", ".2f", ".3f")},
    "means": lambda values: ", ".join(f"{value:.1f}" for value in values),
}
LIMITS: dict[str, Callable[[Any], str]] = {  # settings that change what the tables mean
    "variant": "Variant {}.".format,
    "memory_gib": lambda limit: f"PyTorch was given {number(limit)} GiB of the GPU.",
    "error": '"calibrated" is K for an error of {:g}.'.format,
}


@cache
def stored_views() -> dict[str, list[View]]:
    """The views of views.yaml, by kind."""
    content = yaml.safe_load(FILE.read_text())
    for fields in (fields for views in content.values() for fields in views):
        fields["columns"] = partial(_columns, fields["columns"])
        if "rows" in fields:
            fields["rows"] = VALUES[fields["rows"]]
    return {kind: [View(**fields) for fields in views] for kind, views in content.items()}


def _columns(declared: Sequence[Any], rows: Sequence[Row]) -> list[Column]:
    """The columns of views.yaml; those of `for` once for every value of a key of the case."""
    columns = []
    for fields in declared:
        if not isinstance(fields, dict):
            columns.append(column(*fields))
            continue
        key, base = fields["for"], fields.get("relative")
        values = dict.fromkeys(row["case"][key] for row in rows)
        for value in (v for v in values if base is None or (base in values and v != base)):
            for heading, path, form, *more in fields["columns"]:
                options = {"of": {key: value}, **(more[0] if more else {})}
                columns.append(column(heading.format(value), path, form, options))
    return columns


def column(
    heading: str, value: str, form: Any = "number", options: Mapping[str, Any] | None = None
) -> Column:
    """A column as in views.yaml."""
    options = {key: value_of(option) for key, option in (options or {}).items()}
    if isinstance(form, dict):  # words by value
        return Column(heading, value, lambda name: form.get(name, name), words=True, **options)
    text = str(form) in WORDS
    formats = WORDS if text else NUMBERS
    return Column(heading, value_of(value), formats[str(form)], words=text, **options)


def value_of(value: Any) -> Any:
    """A path as it is; the function of a row that "=NAME WORDS" calls."""
    if not isinstance(value, str) or not value.startswith("="):
        return value
    name, *arguments = value[1:].split()
    return partial(VALUES[name], *arguments) if arguments else VALUES[name]


# ---- sections


def text(result: Result) -> str:
    """All tables of a result, for a terminal."""
    rows = _rows(result)
    views = stored_views().get(result["kind"], [])
    tables = [view.text(rows) for view in views if view.of(rows)]
    return "\n\n".join(filter(None, [*tables, "\n".join(_not_measured(rows))]))


def section(name: str, result: Result) -> str:
    """Section of a result file: heading, tables, missing rows and, folded, provenance."""
    rows = _rows(result)
    lines = [heading(name, result["runs"][0])]
    calibrated = {row["run"] for row in rows if row["case"].get("attention") == "calibrated"}
    limits = [
        said(setting)
        for i, run in enumerate(result["runs"])
        for name, said in LIMITS.items()
        if (setting := run["settings"].get(name)) and (name != "error" or i in calibrated)
    ]
    lines += [line for about in dict.fromkeys(limits) for line in ("", about)]
    for view in stored_views().get(result["kind"], []):
        if table := view.markdown(rows):
            notes = _notes(view.of(rows))
            lines += ["", *table, *(["", *notes] if notes else [])]
    if missing := _not_measured(rows):
        lines += ["", "Not measured:", "", *missing]
    if sources := _sources(result):
        lines += ["", "Published figures are from:", ""]
        lines += [f"{i}. {source}" for i, source in enumerate(sources, 1)]
    return "\n".join([*lines, "", *fold(PROVENANCE, _provenance(name, result))])


def heading(name: str, run: Result) -> str:
    """Heading of a result file: its device, and the rest of its name."""
    device = run["machine"]["device_name"]
    words = name.partition("--")[2].removeprefix(re.sub(r"\W+", "-", device.lower())).strip("-")
    return f"### {device}, {words.replace('-', ' ')}" if words else f"### {device}"


def _provenance(name: str, result: Result) -> list[str]:
    """Result file, and machine, versions, command and settings of every run."""
    lines = [f"`benchmarks/results/{name}.json`"]
    for run in result["runs"]:
        lines += ["", circumstances(run), "", f"    {run['command']}"]
        if methods := run["settings"].get("methods"):
            lines += ["", *(f"- {name}: {_said(method)}" for name, method in methods.items())]
    return lines


def _sources(result: Result) -> list[str]:
    found = [row.get("values", {}).get("published", {}) for row in result["rows"]]
    figures = [figures[name] for figures in found for name in FIGURES if name in figures]
    return list(dict.fromkeys(figure["source"] for figure in figures))


def _rows(result: Result) -> list[Row]:
    """Adds the list of sources that the cells of published figures refer to."""
    sources = _sources(result)
    return [row | {"sources": sources} for row in result["rows"]]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Notes about published figures."""
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
    software = ", ".join(f"{key} {value}" for key, value in run["versions"].items() if value)
    commit = f", commit {run['commit'][:CHECKSUM]}" if run["commit"] else ""
    return (
        f"CPU {machine['cpu']}, {machine['cores']} cores, {machine['threads']} used, load "
        f"{number(machine['load'])} before the run. {software}. {run['date'][:10]}{commit}."
    )


def _said(settings: Mapping[str, Any]) -> str:
    """Settings as text; checksums are abbreviated."""
    shown = {
        key.replace("_", " "): value[:CHECKSUM] if key.endswith("sha256") else value
        for key, value in settings.items()
        if value is not None
    }
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _not_measured(rows: Sequence[Row]) -> list[str]:
    """Rows without values, except out-of-memory rows, which the tables show."""
    missing = [row for row in rows if "error" in row or "skipped" in row]
    missing = [row for row in missing if row.get("error") != OUT_OF_MEMORY]
    return [f"- {name_of(row['case'])}: {outcome_of(row)}" for row in missing]
