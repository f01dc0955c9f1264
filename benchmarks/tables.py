# SPDX-License-Identifier: Apache-2.0
"""Tables from result files: `python -m benchmarks.tables` brings those in the docs up to date.

A target file holds blocks between `<!-- generated: NAME -->` and `<!-- end generated -->`. NAME is
the name of a result file without its ending, "results" for all files about attention alone,
"model-times" for all times of whole models, "attentions" for all trainings with them, "matching"
and "stereo" for comparisons on real pairs, "match-attentions" for all trainings of matchers,
"matchers", "stereo-costs" and "detectors" for what these networks cost, or the name of one of
`benchmarks.comparisons`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = (
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "matching.md",
    ROOT / "docs" / "models.md",
    ROOT / "docs" / "results" / "attentions.md",
    ROOT / "docs" / "results" / "matching-attentions.md",
    ROOT / "docs" / "results" / "stereo-attentions.md",
    ROOT / "docs" / "results" / "dense-attentions.md",
    ROOT / "docs" / "detection.md",
    ROOT / "docs" / "stereo.md",
)
PASSES = ("forward", "forward+backward")
COUNTS, TIMES = "model-counts", "model-times"  # kinds of result files about whole models
ATTENTIONS = "attentions"  # how names of files begin that `benchmarks.attention_tables` reads
MATCHING = "matching"  # and `benchmarks.matching_tables`
MATCH_ATTENTIONS = "match-attentions"  # and `benchmarks.match_attention_tables`
MATCHERS = "matchers"  # and `benchmarks.matcher_tables`
STEREO = "stereo"  # and `benchmarks.stereo_tables`
STEREO_COSTS = "stereo-costs"  # and `benchmarks.stereo_cost_tables`
DETECTORS = "detectors"  # and `benchmarks.detector_tables`
OUT_OF_MEMORY = "out of memory"
TASKS = ("classification", "backbone")
MODEL_PASSES = ("forward", "training")
FIGURES = ("code_params", "params_m", "gmacs", "score")  # what may be published of a model
LARGEST_UNEXPLAINED = 0.05  # deviation from a published figure

Row = dict[str, Any]

_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end generated -->)", re.DOTALL)
_RESULT_FIELDS = {
    "schema": int, "command": str, "date": str, "commit": str | None, "device": str,
    "variant": str, "machine": dict, "versions": dict, "complete": bool, "rows": list,
}  # fmt: skip
_MACHINE_FIELDS = {
    "device_name": str,
    "cpu": str,
    "cores": int | None,
    "threads": int,
    "load": float | None,
}
_VERSION_FIELDS = {
    "python": str, "torch": str, "cuda": str | None, "triton": str | None, "numba": str | None,
    "quadtree_attention": str,
}  # fmt: skip
_ROW_FIELDS = {
    "case": str, "implementation": str, "backend": str | None, "dtype": str, "pass": str,
    "mode": str,
}  # fmt: skip
_MEASURED_FIELDS = {
    "median_ms": float, "q25_ms": float, "q75_ms": float, "repeats": int,
    "peak_mib": float | None,
}  # fmt: skip
_COUNT_FIELDS = {
    "model": str, "rival": str | None, "task": str, "image": list, "topk": int | None,
    "params": int, "macs": int, "attention_macs": int, "detector": dict | None,
    "published": dict, "note": str | None,
}  # fmt: skip
_DETECTOR_FIELDS = {
    "params": int, "macs": int, "published_image": list | None,
    "macs_at_published_image": int | None,
}  # fmt: skip
_UNITS = {"params": 1e6, "macs": 1e9}
_TIME_FIELDS = {
    "model": str, "rival": str | None, "task": str, "images": list, "pass": str, "mode": str,
    "precision": str,
}  # fmt: skip


def check_result(result: dict[str, Any]) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    kind = result.get("kind")
    fields, versions, check_row = _RESULT_FIELDS, _VERSION_FIELDS, _check_row
    if kind is not None:
        fields = {"kind": str} | {key: fields[key] for key in fields if key != "variant"}
        versions = versions | {"timm": str}
        check_row = _check_count if kind == COUNTS else _check_time
    _check_fields(result, fields, "result")
    if kind not in (None, COUNTS, TIMES):
        raise ValueError(f"kind is {kind!r}, expected {COUNTS!r} or {TIMES!r}")
    if result["schema"] != SCHEMA:
        raise ValueError(f"schema is {result['schema']}, this version reads {SCHEMA}")
    _check_fields(result["machine"], _MACHINE_FIELDS, "machine")
    _check_fields(result["versions"], versions, "versions")
    for number, row in enumerate(result["rows"]):
        check_row(row, f"rows[{number}]")


def _check_row(row: Row, where: str) -> None:
    _check_fields(row, _ROW_FIELDS | _outcome_fields(row), where)
    _check_choice(row, "pass", PASSES, where)


def _check_time(row: Row, where: str) -> None:
    _check_fields(row, _TIME_FIELDS | _outcome_fields(row), where)
    _check_choice(row, "pass", MODEL_PASSES, where)
    _check_choice(row, "task", TASKS, where)


def _check_count(row: Row, where: str) -> None:
    _check_fields(row, _COUNT_FIELDS, where)
    _check_choice(row, "task", TASKS, where)
    if row["detector"] is not None:
        _check_fields(row["detector"], _DETECTOR_FIELDS, f"{where}.detector")
    _check_fields(row["published"], dict.fromkeys(FIGURES, dict | None), f"{where}.published")
    for name, figure in row["published"].items():
        if figure is not None:
            fields = {"value": int | float, "source": str}
            _check_fields(figure, fields, f"{where}.published.{name}")
            far = abs(deviation(row, name) or 0) > LARGEST_UNEXPLAINED
            if far and row["note"] is None:
                raise ValueError(f"{where}.published.{name} is far from ours: a note must say why")


def _outcome_fields(row: Row) -> dict[str, Any]:
    return next(({key: str} for key in ("skipped", "error") if key in row), _MEASURED_FIELDS)


def _check_choice(row: Row, name: str, choices: Sequence[str], where: str) -> None:
    if row[name] not in choices:
        raise ValueError(f"{where}.{name} is {row[name]!r}, expected one of {choices}")


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Every result file of a folder by its name, checked."""
    others = (ATTENTIONS, MATCHING, MATCH_ATTENTIONS, MATCHERS, STEREO, DETECTORS)
    paths = (path for path in folder.glob("*.json") if not path.stem.startswith(others))
    return read_checked((p for p in paths if "-attentions--" not in p.stem), check_result)


def check_kind(result: dict[str, Any], kind: str, schema: int) -> None:
    """Raises `ValueError` if the result is of another kind or version."""
    if (result["kind"], result["schema"]) != (kind, schema):
        found = f"{result['kind']!r}, schema {result['schema']}"
        raise ValueError(f"kind is {found}, expected {kind!r}, schema {schema}")


def read_checked(
    paths: Iterable[Path], check: Callable[[dict[str, Any]], None]
) -> dict[str, dict[str, Any]]:
    """Result files by their names, in the order of these.

    Raises:
        ValueError: The check refuses one; the message begins with its name.
    """
    results = {}
    for path in sorted(paths):
        results[path.stem] = json.loads(path.read_text())
        try:
            check(results[path.stem])
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
    return results


def text_table(rows: Sequence[Row]) -> str:
    """One line per row, aligned, for a terminal."""
    head = ["case", "dtype", "pass", "mode", "implementation", "median ms", "q25 - q75", "runs"]
    lines = [[*head, "peak MiB", "vs sdpa"]]
    for row in rows:
        name = row["implementation"]
        if row["backend"] not in (None, name) and ":" not in name:
            name += f" ({row['backend']})"
        line = [row["case"], row["dtype"], row["pass"], row["mode"], name]
        if "median_ms" in row:
            spread = f"{number(row['q25_ms'])} - {number(row['q75_ms'])}"
            line += [number(row["median_ms"]), spread, str(row["repeats"])]
            line += [number(row["peak_mib"]), speed_up(rows, row)]
        else:
            line.append(outcome_text(row))
        lines.append(line)
    full = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    widths[:5] = [max(len(line[i]) for line in lines) for i in range(5)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def page_table(head: Sequence[str], cells: Sequence[Sequence[str]], words: int) -> list[str]:
    """A table for a page, whose first `words` columns are no numbers."""
    align = ["---"] * words + ["---:"] * (len(head) - words)
    return [_line(head), _line(align), *map(_line, cells)]


def page_of_rows(
    results: Mapping[str, dict[str, Any]],
    table: Callable[[Sequence[Row]], tuple[list[str], list[list[str]]]],
    labels: Callable[[Row], list[str]],
) -> str:
    """A section per result file: circumstances, a line per row, and what failed."""
    sections = []
    for name, result in results.items():
        rows = result["rows"]
        head, cells = table(rows)
        words = len(labels(rows[0])) if rows else 0
        lines = [*_circumstances(name, result), "", *page_table(head, cells, words)]
        failed = [row for row in rows if row.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY]
        notes = [f"- {', '.join(labels(row))}: failed: {row['error']}" for row in failed]
        sections.append("\n".join([*lines, "", *notes]).rstrip())
    return "\n\n".join(sections) or "Not measured yet."


def markdown_section(name: str, result: dict[str, Any]) -> str:
    """Heading, circumstances, table and what was not measured, of one result file."""
    kind, rows = result.get("kind"), result["rows"]
    if kind == COUNTS:
        body = count_tables(rows)
    elif kind == TIMES:
        body = [*time_table(rows), *_not_measured(rows, ("task", "model", "pass", "mode"))]
    else:
        keys = ("case", "implementation", "dtype", "pass", "mode")
        body = [*markdown_table(rows), *_not_measured(rows, keys)]
    return "\n".join([*_circumstances(name, result), "", *body])


def _circumstances(name: str, result: dict[str, Any]) -> list[str]:
    machine, versions = result["machine"], result["versions"]
    software = ", ".join(f"{key} {value}" for key, value in versions.items() if value)
    commit = f", commit {result['commit'][:12]}" if result["commit"] else ""
    variant = f"Variant {result['variant']}. " if "variant" in result else ""
    return [
        f"### {machine['device_name']}: `{name}.json`",
        "",
        f"{variant}CPU {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['threads']} used, load {number(machine['load'])} before the run. "
        f"{software}. {result['date'][:10]}{commit}.",
        "",
        f"    {result['command']}",
    ]


def _not_measured(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    missing = [row for row in rows if "median_ms" not in row]
    lines = ["", "Not measured:", ""] if missing else []
    for row in missing:
        lines.append(f"- {', '.join(row[key] for key in keys)}: {outcome_text(row)}")
    return lines


def markdown_table(rows: Sequence[Row]) -> list[str]:
    """One line per case, dtype and mode; each cell says forward / forward + backward."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    compared = [name for name in names if name != "sdpa"] if "sdpa" in names else []
    head = ["case", "dtype", "mode"]
    for name in names:
        head += [f"{name} ms", f"{name} MiB"]
    head += [f"{name} vs sdpa" for name in compared]
    lines = [_line(head), _line(["---"] * 3 + ["---:"] * (len(head) - 3))]
    for key in dict.fromkeys((row["case"], row["dtype"], row["mode"]) for row in rows):
        mine = [row for row in rows if (row["case"], row["dtype"], row["mode"]) == key]
        cells = list(key)
        for name in names:
            cells.append(_per_pass(_cell(row, "median_ms") for row in _passes(mine, name)))
            cells.append(_per_pass(_cell(row, "peak_mib") for row in _passes(mine, name)))
        for name in compared:
            cells.append(_per_pass(speed_up(mine, row) for row in _passes(mine, name)))
        lines.append(_line(cells))
    return lines


def count_tables(rows: Sequence[Row]) -> list[str]:
    """A table of classifiers, one of backbones, what is to be said of them, and the sources."""
    figures = [figure for row in rows for figure in row["published"].values() if figure]
    sources = list(dict.fromkeys(figure["source"] for figure in figures))
    lines = []
    for task in TASKS:
        mine = [row for row in rows if row["task"] == task]
        if mine:
            image = " x ".join(map(str, mine[0]["image"]))
            lines += [f"#### {task.capitalize()}, {image}", "", *_count_table(mine, sources)]
            lines += ["", *_notes(mine), ""]
    lines += ["Published figures are from:", ""]
    return lines + [f"{i}. {source}" for i, source in enumerate(sources, 1)]


def _count_table(rows: Sequence[Row], sources: Sequence[str]) -> list[str]:
    whole = rows[0]["task"] == "backbone"
    head = ["model", "K", "params M", "official code", "GMACs", "of it attention", "vs rival"]
    head += ["RetinaNet params M", "published M", "GMACs", "published G", "box AP"] if whole else []
    head += [] if whole else ["published M", "published G", "top-1"]
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for row in rows:
        cells = [row["model"], str(row["topk"] or "-"), number(row["params"] / 1e6)]
        cells += [_code_params(row), number(row["macs"] / 1e9), number(row["attention_macs"] / 1e9)]
        cells.append(_times_rival(rows, row, "macs"))
        params, macs, score = (_published(row, name, sources) for name in FIGURES[1:])
        if whole:
            detector = [number(row["detector"][key] / unit) for key, unit in _UNITS.items()]
            cells += [detector[0], params, detector[1], macs, score]
        else:
            cells += [params, macs, score]
        lines.append(_line(cells))
    return lines


def _code_params(row: Row) -> str:
    figure = row["published"]["code_params"]
    if figure is None:
        return "not found" if row["rival"] else "-"
    same = figure["value"] == row["params"]
    return "the same" if same else number(figure["value"] / 1e6)


def _published(row: Row, name: str, sources: Sequence[str]) -> str:
    figure = row["published"][name]
    if figure is None:
        return "not found"
    away = deviation(row, name)
    text = str(figure["value"]) if away is None else f"{figure['value']} ({100 * away:+.1f} %)"
    return f"{text} [{sources.index(figure['source']) + 1}]"


def deviation(row: Row, name: str) -> float | None:
    """How far our count is above the published one, as a part of that; None for a score."""
    whole = row["detector"] or row
    counted = {
        "code_params": row["params"],
        "params_m": whole["params"] / 1e6,
        "gmacs": whole["macs"] / 1e9,
    }
    return counted[name] / row["published"][name]["value"] - 1 if name in counted else None


def _notes(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        found = (row["detector"] or {}).get("macs_at_published_image")
        text = row["note"] or ""
        if found is not None:
            image = " x ".join(map(str, row["detector"]["published_image"]))
            text += f" Counted at {image}: {number(found / 1e9)} GMACs."
        if text:
            lines.append(f"- {row['model']}: {text.strip()}")
    return lines


def _times_rival(rows: Sequence[Row], row: Row, field: str, *, inverse: bool = False) -> str:
    """The value as a multiple of the rival's in the same rows, or the other way round."""
    rival = next((other for other in rows if other["model"] == row.get("rival")), {})
    ours, theirs = row.get(field), rival.get(field)
    if ours is None or theirs is None:
        return "-"
    return f"{number(theirs / ours if inverse else ours / theirs)}x"


def time_table(rows: Sequence[Row]) -> list[str]:
    """One line per task, mode and model; each cell says forward / training."""
    head = ["images", "mode", "precision", "model", "ms", "MiB", "rival", "speed", "memory"]
    lines = [_line(head), _line(["---"] * 4 + ["---:"] * 2 + ["---"] + ["---:"] * 2)]
    for key in dict.fromkeys((row["task"], row["mode"]) for row in rows):
        same = [row for row in rows if (row["task"], row["mode"]) == key]
        for model in dict.fromkeys(row["model"] for row in same):
            lines.append(_line(_time_cells(same, model)))
    return lines


def _time_cells(rows: Sequence[Row], model: str) -> list[str]:
    """The line of one model among the rows of its task and mode."""
    passes = [[row for row in rows if row["pass"] == name] for name in MODEL_PASSES]
    mine = [next((row for row in group if row["model"] == model), {}) for group in passes]
    both = list(zip(passes, mine, strict=True))
    first = next(row for row in mine if row)
    return [
        " x ".join(map(str, first["images"])),
        first["mode"],
        _per_pass(row.get("precision", "-") for row in mine),
        model,
        _per_pass(_cell(row, "median_ms") for row in mine),
        _per_pass(_cell(row, "peak_mib") for row in mine),
        first["rival"] or "-",
        _per_pass(_times_rival(group, row, "median_ms", inverse=True) for group, row in both),
        _per_pass(_times_rival(group, row, "peak_mib") for group, row in both),
    ]


def speed_up(rows: Sequence[Row], row: Row | None) -> str:
    """How many times as fast as sdpa of the same case, dtype, pass and mode; below 1 is slower."""
    if row is None or "median_ms" not in row or row["implementation"] == "sdpa":
        return "-"
    same = {key: row[key] for key in ("case", "dtype", "pass", "mode")} | {"implementation": "sdpa"}
    dense = next((other for other in rows if same.items() <= other.items()), {})
    return f"{number(dense['median_ms'] / row['median_ms'])}x" if "median_ms" in dense else "-"


def number(value: float | None) -> str:
    """About three digits, never an exponent."""
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f}"


def outcome_text(row: Row) -> str:
    """Why a row has no numbers."""
    return f"skipped: {row['skipped']}" if "skipped" in row else f"failed: {row['error']}"


def updated(
    text: str, results: dict[str, dict[str, Any]], more: Mapping[str, str] | None = None
) -> str:
    """The text of a target file with all its blocks generated anew; `more` blocks by name."""
    sections = {name: markdown_section(name, result) for name, result in results.items()}
    kinds = {name: result.get("kind") for name, result in results.items()}

    def of_kind(kind: str | None) -> str:
        return "\n\n".join(sections[name] for name in sections if kinds[name] == kind)

    blocks = sections | {"results": of_kind(None), TIMES: of_kind(TIMES) or "Not measured yet."}
    blocks |= more or {}

    def block(match: re.Match[str]) -> str:
        if match[2] not in blocks:
            raise ValueError(f"no result file for {match[0].splitlines()[0]}: {', '.join(blocks)}")
        return f"{match[1]}\n{blocks[match[2]]}\n\n{match[3]}"

    return _BLOCK.sub(block, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites the target files; with `--check`, says instead whether they are up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if outdated")
    check = parser.parse_args(argv).check
    from benchmarks import (  # built on this module
        attention_tables,
        comparison_tables,
        detector_tables,
        match_attention_tables,
        matcher_tables,
        matching_tables,
        stereo_cost_tables,
        stereo_tables,
    )

    outdated = []
    try:
        results = read_results()
        more = {
            ATTENTIONS: attention_tables.markdown(attention_tables.read_results(RESULTS)),
            MATCHING: matching_tables.markdown(matching_tables.read_results(RESULTS)),
            MATCHERS: matcher_tables.markdown(matcher_tables.read_results(RESULTS)),
            MATCH_ATTENTIONS: match_attention_tables.markdown(
                match_attention_tables.read_results(RESULTS)
            ),
            STEREO: stereo_tables.markdown(stereo_tables.read_results(RESULTS)),
            STEREO_COSTS: stereo_cost_tables.markdown(stereo_cost_tables.read_results(RESULTS)),
            DETECTORS: detector_tables.markdown(detector_tables.read_results(RESULTS)),
            **comparison_tables.all_markdown(RESULTS),
        }
        for path in TARGETS:
            text = path.read_text()
            new = updated(text, results, more)
            if new != text:
                outdated.append(path.relative_to(ROOT))
                if not check:
                    path.write_text(new)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    for name in outdated:
        print(f"{name} is out of date: run {parser.prog}" if check else f"updated {name}")
    return 1 if check and outdated else 0


def _check_fields(value: object, fields: dict[str, Any], where: str) -> None:
    if not isinstance(value, dict) or value.keys() != fields.keys():
        got = list(value) if isinstance(value, dict) else value
        raise ValueError(f"{where} must have the fields {list(fields)}, got {got}")
    for name, kind in fields.items():
        if not isinstance(value[name], kind):
            raise ValueError(f"{where}.{name} must be {kind}, got {value[name]!r}")


def _passes(rows: Sequence[Row], implementation: str) -> list[Row | None]:
    mine = {row["pass"]: row for row in rows if row["implementation"] == implementation}
    return [mine.get(name) for name in PASSES]


def _cell(row: Row | None, field: str) -> str:
    return "-" if row is None else number(row.get(field))


def _per_pass(cells: Iterable[str]) -> str:
    return " / ".join(cells)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
