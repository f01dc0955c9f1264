# SPDX-License-Identifier: Apache-2.0
"""Result files: one schema, its checker and its writer.

    {"schema": 2, "kind": "speed/detectors", "complete": true,
     "runs": [{"date", "command", "commit", "machine", "versions", "settings"}],
     "rows": [{"run": 0, "case": {...}, "values": {...}, "details": {...}},
              {"run": 0, "case": {...}, "error": "out of memory"}]}

A run is one command; a file that grows over several commands has several. `case` says what was
measured, `values` what was found; long lists, such as histories, are `details`. A row without a
result says why: `error`, or `skipped`. Rows of a comparison by training are of several kinds, and
name theirs: `kind`. kinds.yaml declares what rows of every kind hold.
"""

import json
import os
import platform
import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, reduce
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from quadtree_attention.cli.machine import cpu_name, installed_version
from quadtree_attention.files import make_folder, write_whole

SCHEMA = 2
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OUT_OF_MEMORY = "out of memory"
LARGEST_UNEXPLAINED = 0.05  # deviation from a published figure
TASKS = ("classification", "backbone")
PASSES = ("forward", "training")
STAGES = ("CNN", "transformer", "coarse matching", "fine")  # of the matcher
THRESHOLDS = {"pose": ("5", "10", "20"), "homography": ("3", "5", "10")}  # degrees, pixels
FIGURES = ("code_params", "params_m", "gmacs", "score")  # what may be published of a model
FOLDERS = ("data", "textures", "work", "weights")  # options that hold a folder of this machine

Row = dict[str, Any]
Result = dict[str, Any]

_FLAT = re.compile(r'[\[{](?:[^"\[\]{}]|"(?:[^"\\]|\\.)*")*[\]}]')  # nothing nested, in JSON
_PATH = re.compile(r"(?<![\w:/.])(?:/[\w.+@-]+)+/?")


class ResultFileError(ValueError):
    """A file that is no result, or a result of another kind."""


TYPES = {
    "str": str, "int": int, "float": float, "bool": bool, "dict": dict, "null": type(None),
}  # fmt: skip
KINDS: dict[str, Any] = yaml.safe_load((ROOT / "benchmarks" / "kinds.yaml").read_text())
_RESULT, _ = KINDS.pop("result"), KINDS.pop("shared")
ROW_KINDS = "run|step|memory|score"  # of "training/NAME"


def suites(group: str) -> list[str]:
    """The suites of a group, "speed" or "quality"."""
    return [kind.removeprefix(f"{group}/") for kind in KINDS if kind.startswith(f"{group}/")]


def check(result: Any, kind: str | None = None) -> None:
    """Checks a result, of a kind if that is given.

    Raises:
        ValueError: A key is missing or unknown, or a value is not of its type.
    """
    if isinstance(result, dict) and result.get("schema") != SCHEMA:
        raise ValueError(f"schema is {result.get('schema')!r}, this version reads {SCHEMA}")
    check_value(result, _RESULT, "result")
    if kind is not None and result["kind"] != kind:
        raise ValueError(f"kind is {result['kind']!r}, expected {kind!r}")
    if result["kind"] not in KINDS and not result["kind"].startswith("training/"):
        raise ValueError(f"kind is {result['kind']!r}, expected one of {', '.join(KINDS)}")
    for i, row in enumerate(result["rows"]):
        _check_row(result, row, f"rows[{i}]")


def _check_row(result: Result, row: Row, where: str) -> None:
    name = result["kind"]
    if name not in KINDS:
        check_value(row.get("kind"), ROW_KINDS, f"{where}.kind")
        name = f"training/{row['kind']}"
    kind = KINDS[name]
    check_value(row.get("case"), kind["case"], f"{where}.case")
    if not isinstance(row.get("run"), int) or not 0 <= row["run"] < len(result["runs"]):
        raise ValueError(f"{where}.run must be one of {len(result['runs'])} runs, got {row}")
    settings = result["runs"][row["run"]]["settings"]
    check_value(settings, kind.get("settings", {}), f"runs[{row['run']}].settings")
    values, expected = row.get("values", {}), kind["values"]
    outcome = next((key for key in ("error", "skipped") if key in row), None)
    if outcome is not None:  # such a row may hold a part of the values
        check_value(row[outcome], "str", f"{where}.{outcome}")
        expected = {key: expected[key] for key in expected if key.strip("()") in values}
    check_value(values, expected, f"{where}.values")
    if outcome is None:
        check_value(row.get("details", {}), kind.get("details", {}), f"{where}.details")
        CHECKS.get(name, lambda row, where: None)(row, where)


def check_value(value: Any, spec: Any, where: str) -> None:
    """Raises `ValueError` if a value is not as a specification of kinds.yaml says."""
    if isinstance(spec, dict):
        known = {key.strip("()"): key for key in spec}
        needed = {key for key in spec if key in known}
        if not isinstance(value, dict) or not needed <= value.keys() <= known.keys():
            got = list(value) if isinstance(value, dict) else value
            raise ValueError(f"{where} must have the keys {sorted(known)}, got {got}")
        for key, inner in value.items():
            check_value(inner, spec[known[key]], f"{where}.{key}")
    elif isinstance(spec, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r}")
        for i, element in enumerate(value):
            check_value(element, spec[0], f"{where}[{i}]")
    elif not any(
        isinstance(value, TYPES[x]) if x in TYPES else value == x for x in spec.split("|")
    ):
        raise ValueError(f"{where} must be {spec}, got {value!r}")


def deviation(values: Mapping[str, Any], name: str) -> float | None:
    """How far our count is above the published one, as a part of that; None for a score."""
    whole = values.get("detector", values)
    counted = {"code_params": values["params"], "params_m": whole["params"] / 1e6,
               "gmacs": whole["macs"] / 1e9}  # fmt: skip
    return counted[name] / values["published"][name]["value"] - 1 if name in counted else None


def _check_counts(row: Row, where: str) -> None:
    for name in row["values"]["published"]:
        far = abs(deviation(row["values"], name) or 0) > LARGEST_UNEXPLAINED
        if far and row["values"]["note"] is None:
            raise ValueError(f"{where}.published.{name} is far from ours: a note must say why")


def _check_pairs(row: Row, where: str) -> None:
    values, details = row["values"], row["details"]
    for name, score in values.get("estimators", {}).items():
        areas = dict.fromkeys(THRESHOLDS[values["truth"]], "float")
        check_value(score["auc"], areas, f"{where}.{name}.auc")
    for name, pairs in details.get("errors", {"pairs": details.get("pairs")}).items():
        _check_length(pairs, values["pairs"], f"{where}.details.{name}", "pairs")


def _check_history(row: Row, where: str) -> None:
    history, epochs = row["details"]["history"], row["case"]["epochs"]
    told = history.get("epoch", [])
    if told[-1:] != [epochs]:
        raise ValueError(f"{where}.history ends with epoch {told[-1:]} of {epochs}")
    for name, column in history.items():
        _check_length(column, len(told), f"{where}.history.{name}", "epochs")


def _check_length(found: Sequence[Any], expected: int, where: str, what: str) -> None:
    if len(found) != expected:
        raise ValueError(f"{where} has {len(found)} {what} of {expected}")


CHECKS: dict[str, Callable[[Row, str], None]] = {  # beyond types
    "speed/counts": _check_counts,
    "quality/matching": _check_pairs,
    "quality/stereo": _check_pairs,
    "training/run": _check_history,
    "training/score": _check_pairs,
}


# ---- files


def path_of(kind: str, device: str) -> Path:
    """Where results of a kind go by default."""
    return RESULTS / f"{kind}--{slug(device)}.json"


def slug(text: str) -> str:
    """A name for a file: lower case, words joined by "-"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read(path: Path, kind: str | None = None) -> Result:
    """A checked result file.

    Raises:
        ResultFileError: It is something else.
    """
    try:
        result = json.loads(path.read_text())
        check(result, kind)
    except ValueError as error:
        raise ResultFileError(f"{path} is not a result file: {error}") from error
    return result


@cache
def stored(name: str) -> Result:
    """A committed result file, by its path below `results` without the suffix."""
    return read(RESULTS / f"{name}.json")


def stored_rows(name: str, case: Mapping[str, Any], kind: str | None = None) -> list[Row]:
    """Rows of a committed file whose case has these entries: one, or several that differ in seed.

    Raises:
        ResultFileError: There are none with values, or others.
    """
    rows = [
        row
        for row in stored(name)["rows"]
        if case.items() <= row["case"].items() and "values" in row
        and kind in (None, row.get("kind"))
    ]  # fmt: skip
    if len({str(row["case"] | {"seed": None}) for row in rows}) != 1:
        raise ResultFileError(f"{name}.json has {len(rows)} rows of {dict(case)}, expected one")
    return rows


def stored_value(file: str, case: Mapping[str, Any], path: str, kind: str | None = None) -> float:
    """The value at a path, such as "values.median_ms"; the mean of rows that differ in seed."""
    rows = stored_rows(file, case, kind)
    return fmean(reduce(lambda found, key: found[key], path.split("."), row) for row in rows)


def read_all(kind: str, folder: Path | None = None) -> dict[str, Result]:
    """All result files of a kind, by their paths in the folder without the suffix."""
    folder = folder or RESULTS
    paths = sorted(folder.glob(f"{kind}--*.json")) + sorted(folder.glob(f"{kind}.json"))
    return {str(path.relative_to(folder).with_suffix("")): read(path, kind) for path in paths}


class ResultFile:
    """A result file that is written again with every change.

    Args:
        path: Of the file.
        kind: Of the result.
        grows: Whether it keeps what earlier commands have found. It is then read again before every
            change, so that commands may take turns. Otherwise rows are collected in `path` with
            ".partial" appended until the result is complete.
    """

    def __init__(self, path: Path, kind: str, *, grows: bool = False) -> None:
        self.path, self.kind, self.grows = path, kind, grows
        self.run: Result = {}
        self._result: Result = {"schema": SCHEMA, "kind": kind, "complete": True}
        self._result |= {"runs": [], "rows": []}
        self.read()  # a file of another kind is refused before any work

    def begin(self, run: Result) -> None:
        """Rows that are added from now on are of this run."""
        self.run = run

    def read(self) -> Result:
        """The content so far."""
        if self.grows and self.path.exists():
            return read(self.path, self.kind)
        return self._result

    def add(
        self,
        *rows: Row,
        replaces: Callable[[Row], bool] = lambda row: False,
        complete: bool = True,
    ) -> None:
        """Appends rows of this run, without those they replace. Runs without rows are removed."""
        result = self.read()
        runs = [*result["runs"], *([] if self.run in result["runs"] else [self.run])]
        kept = [row for row in result["rows"] if not replaces(row)]
        found = [*kept, *({"run": runs.index(self.run)} | row for row in rows)]
        used = sorted({row["run"] for row in found})
        result = result | {"complete": complete, "runs": [runs[i] for i in used]}
        result["rows"] = [row | {"run": used.index(row["run"])} for row in found]
        check(result, self.kind)
        make_folder(self.path.parent)
        partial = self.path.with_name(f"{self.path.name}.partial")
        path = self.path if complete or self.grows else partial
        write_whole(path, dumps(result).encode())
        if path == self.path:
            partial.unlink(missing_ok=True)
        self._result = result


def dumps(value: Any) -> str:
    """JSON in which every dict and every list without others inside is on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    lines = _FLAT.sub(lambda match: re.sub(r"\n *", "", match[0].replace(",\n", ", \n")), text)
    return f"{lines}\n"


# ---- what a result says about a command


def describe(
    argv: Sequence[str], options: Namespace, *, libraries: Iterable[str] = (), **settings: Any
) -> Result:
    """A run: how, when and where a command was run, and the settings that all its rows share.

    `options` are the parsed ones, with `device` and `threads`; `libraries` are distributions whose
    versions matter.
    """
    import torch

    import quadtree_attention

    arguments = (_portable(argument, options) for argument in argv)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "commit": git_commit(),
        "machine": {
            "device": options.device,
            "device_name": device_name(options.device),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": options.threads,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda if options.device == "cuda" else None,
            "triton": version_of("triton"),
            "numba": version_of("numba"),
            "quadtree_attention": quadtree_attention.__version__,
            **{name: version_of(name) for name in libraries},
        },
        "settings": settings,
    }


def _portable(argument: str, options: Namespace) -> str:
    """An argument without paths of this machine: folders by their last name."""
    flag, equals, value = argument.rpartition("=") if argument[:2] == "--" else ("", "", argument)
    folders = [str(getattr(options, name, None)) for name in FOLDERS]
    if value in folders:
        value = Path(value).resolve().name
    elif Path(value).is_absolute() and Path(value).is_relative_to(ROOT):
        value = str(Path(value).relative_to(ROOT))
    return flag + equals + hide_paths(value)


def hide_paths(text: str) -> str:
    """The text with the last names of absolute paths in their place."""
    return _PATH.sub(lambda match: Path(match[0]).name, text)


def device_name(device: str) -> str:
    """What the device calls itself."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else cpu_name()


def git_commit() -> str | None:
    """The commit of this checkout, with "-dirty" if files differ from it; None if unknown."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() or None


def version_of(name: str) -> str | None:
    """Version of a distribution, None if it is not installed."""
    if name == "opencv":  # several distributions provide it
        import cv2

        return str(cv2.__version__)
    return installed_version(name)


def one_line_of(error: BaseException) -> str:
    """Type and message of an error in one line, without paths of this machine."""
    return hide_paths(f"{type(error).__name__}: {error}".splitlines()[0][:500])
