# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/paper.md: the paper's numbers of rows.yaml beside ours.

A row is "reproduced" if our number has the digits that the paper prints, "differs" if it has not,
"ready" if a recipe would train it, and "unknowable" where what the paper counted is not public.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml

from benchmarks.result import ROOT, ResultFileError, stored_value

ROWS = ROOT / "benchmarks" / "paper" / "rows.yaml"
STATES = ("reproduced", "ready", "differs", "unknowable")
COUNT = "python -m benchmarks paper count"
SCALES = {"params": 1e6}  # of counts; others are in G
HEAD = "| number | paper | ours | state | same quantity? | why different | command |"


def page() -> str:
    """All tables, after a summary."""
    sections = yaml.safe_load(ROWS.read_text())
    cells = {part["section"]: [cells_of(row) for row in part["rows"]] for part in sections}
    lines = [f"| part of the paper | {' | '.join(STATES)} | in short |",
             f"| --- |{' ---: |' * len(STATES)} --- |"]  # fmt: skip
    for part in sections:
        found = Counter(row[3] for row in cells[part["section"]])
        counts = " | ".join(str(found[state] or "-") for state in STATES)
        lines.append(f"| {part['section']} | {counts} | {part['short']} |")
    for part in sections:
        lines += ["", f"## {part['section']}", "", *([part["note"], ""] if part["note"] else [])]
        lines += [HEAD, "| --- | ---: | ---: | --- | --- | --- | --- |"]
        for row in cells[part["section"]]:
            marked = [f"**{cell}**" if cell in ("differs", "unknowable") else cell for cell in row]
            lines.append(f"| {' | '.join(marked)} |")
    return "\n".join(lines)


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """The cells of a line.

    Raises:
        ResultFileError: Nothing of ours stands beside the paper's number.
    """
    paper, why = row["paper"], row.get("why", "")
    same, command = row.get("same", "yes"), row.get("command", COUNT)
    if "count" in row or "measured" in row:
        paper, ours = _numbers(row, paper)
    elif "growth" in row:
        ours = f"{_growth(**row['growth']):.1f}"
    elif "recipe" in row:
        ours = _near(**row["near"]) if "near" in row else "not trained"
        same = "no, other data" if "near" in row else "yes, once trained"
        command = train_command(row)
    elif "ours" in row and "status" in row:
        ours = row["ours"]
    else:
        raise ResultFileError(f"nothing of ours beside {row['what']!r}: give it a count or recipe")
    state = row.get("status") or ("reproduced" if ours == paper else "differs")
    if "status" not in row and ("recipe" in row or row.get("unknowable")):
        state = "ready" if "recipe" in row else "unknowable"
    command = command if command == "-" else f"`{command}`"
    return [row["what"], paper, ours, state, same, why, command]


def _numbers(row: Mapping[str, Any], paper: str) -> tuple[str, str]:
    """The paper's number, from its formula if it has one, and ours with as many digits."""
    wanted = row.get("measured", {"file": "paper/count", "case": row.get("count")})
    key, percent = f"values.{row['value']}", " %" if paper.endswith("%") else ""
    value = stored_value(**wanted, path=key)
    scale = row.get("scale") or SCALES.get(row["value"], 1e9)
    if "formula" in row:
        formula = f"values.{row['formula']}"
        paper = f"{stored_value(**wanted, path=formula) / scale:.3f}"
    if "of" in row:
        scale = stored_value(wanted["file"], row["of"], key) / (100 if percent else 1)
    (number,) = re.findall(r"\d+\.?\d*", paper)
    return paper, f"{value / scale:.{len(number.partition('.')[2])}f}{percent}"


def train_command(row: Mapping[str, Any]) -> str:
    """What trains a row: recipe and variants."""
    task = row["recipe"].partition("/")[0]
    config = f"--config recipes/{row['recipe']}.yaml --variant {row['variant']}"
    return f"quadtree train {task} {config}"


def _near(file: str, recipe: str, score: str, words: str) -> str:
    """Our mean over seeds on other data."""
    mean = stored_value(file, {"recipe": recipe}, f"values.final.{score}", "run")
    return f"not trained; {mean:.{2 if mean < 10 else 1}f} ({words})"


def _growth(file: str, to: str, implementation: str, **start: str) -> float:
    """Time of a case relative to another."""
    shared = {"implementation": implementation, "pass": "forward"}
    later, before = (
        stored_value(file, {"case": case} | shared, "values.median_ms")
        for case in (to, start["from"])
    )
    return later / before
