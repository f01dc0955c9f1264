# SPDX-License-Identifier: Apache-2.0
"""The numbers on the first page: this package beside what one would use instead."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.result import stored, stored_rows, stored_value
from benchmarks.tables.table import number
from benchmarks.tables.views import value_of

FILE = Path(__file__).with_name("summary.yaml")
HEAD = ("| measured | this package | instead | on |", "| --- | ---: | --- | --- |")


def table(file: Path = FILE) -> str:
    """The table of summary.yaml; the better number of a line is bold."""
    return "\n".join([*HEAD, *(_line(entry) for entry in yaml.safe_load(file.read_text()))])


def _line(entry: Mapping[str, Any]) -> str:
    values = [_found(entry, entry[which]) for which in ("ours", "theirs")]
    texts = [_text(value, entry) for value in values]
    first, second = (float(str(value).split()[0]) for value in values)  # "6 of 15": 6
    if abs(first - second) > entry.get("margin", 0):
        best = int((first > second) != (entry.get("better") == "higher"))
        texts[best] = f"**{texts[best]}**"
    device = stored(entry["file"])["runs"][0]["machine"]["device_name"]
    return f"| {entry['what']} | {texts[0]} | {texts[1]} {entry['name']} | {device} |"


def _text(value: Any, entry: Mapping[str, Any]) -> str:
    if not isinstance(value, str):
        value = f"{value:.{entry['digits']}f}" if "digits" in entry else number(value)
    return f"{value} {entry['unit']}" if "unit" in entry else value


def _found(entry: Mapping[str, Any], case: Mapping[str, Any]) -> Any:
    """The value of the row whose case has these entries; the mean of rows that differ in seed."""
    file, value, kind = entry["file"], value_of(entry["value"]), entry.get("kind")
    if callable(value):
        return value(stored_rows(file, case, kind)[0])
    return stored_value(file, case, value, kind)
