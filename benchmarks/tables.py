# SPDX-License-Identifier: Apache-2.0
"""Tables from result files: `python -m benchmarks.tables` brings those in the docs up to date.

A target file holds blocks between `<!-- generated: NAME -->` and `<!-- end generated -->`. NAME is
the name of a result file without its ending, or "results" for all of them.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = (ROOT / "docs" / "benchmarks.md",)
PASSES = ("forward", "forward+backward")

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


def check_result(result: dict[str, Any]) -> None:
    """Checks the fields of a result file.

    Raises:
        ValueError: A field is missing, unknown, or not of its type.
    """
    _check_fields(result, _RESULT_FIELDS, "result")
    if result["schema"] != SCHEMA:
        raise ValueError(f"schema is {result['schema']}, this version reads {SCHEMA}")
    _check_fields(result["machine"], _MACHINE_FIELDS, "machine")
    _check_fields(result["versions"], _VERSION_FIELDS, "versions")
    for number, row in enumerate(result["rows"]):
        outcome = next(({key: str} for key in ("skipped", "error") if key in row), _MEASURED_FIELDS)
        _check_fields(row, _ROW_FIELDS | outcome, f"rows[{number}]")
        if row["pass"] not in PASSES:
            raise ValueError(f"rows[{number}].pass is {row['pass']!r}, expected one of {PASSES}")


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Every result file of a folder by its name, checked."""
    results = {}
    for path in sorted(folder.glob("*.json")):
        results[path.stem] = json.loads(path.read_text())
        try:
            check_result(results[path.stem])
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


def markdown_section(name: str, result: dict[str, Any]) -> str:
    """Heading, circumstances, table and what was not measured, of one result file."""
    machine, versions = result["machine"], result["versions"]
    software = ", ".join(f"{key} {value}" for key, value in versions.items() if value)
    commit = f", commit {result['commit'][:12]}" if result["commit"] else ""
    lines = [
        f"### {machine['device_name']}: `{name}.json`",
        "",
        f"Variant {result['variant']}. CPU {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['threads']} used, load {number(machine['load'])} before the run. "
        f"{software}. {result['date'][:10]}{commit}.",
        "",
        f"    {result['command']}",
        "",
        *markdown_table(result["rows"]),
    ]
    missing = [row for row in result["rows"] if "median_ms" not in row]
    if missing:
        lines += ["", "Not measured:", ""]
    for row in missing:
        who = f"{row['implementation']}, {row['dtype']}, {row['pass']}, {row['mode']}"
        lines.append(f"- {row['case']}, {who}: {outcome_text(row)}")
    return "\n".join(lines)


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


def updated(text: str, results: dict[str, dict[str, Any]]) -> str:
    """The text of a target file with all its blocks generated anew."""
    sections = {name: markdown_section(name, result) for name, result in results.items()}
    blocks = sections | {"results": "\n\n".join(sections.values())}

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
    outdated = []
    try:
        results = read_results()
        for path in TARGETS:
            text = path.read_text()
            new = updated(text, results)
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
