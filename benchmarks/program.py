# SPDX-License-Identifier: Apache-2.0
"""What the benchmark programs share: options, what a result says about its run, and its file."""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch

import quadtree_attention
from benchmarks.tables import RESULTS, ROOT, SCHEMA


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def release_memory(device: str) -> None:
    """Lets no row start with the leftovers of another."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def describe_run(argv: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """All fields of a result but its rows."""
    return {
        "schema": SCHEMA,
        "command": shlex.join(["python", "-m", "benchmarks.run", *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "device": options.device,
        "variant": options.variant,
        "machine": {
            "device_name": device_name(options),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": options.threads,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if options.device == "cuda" else None,
            "triton": version_of("triton"),
            "numba": version_of("numba"),
            "quadtree_attention": quadtree_attention.__version__,
        },
    }


def describe_kind(
    kind: str, program: str, argv: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """The same of a result that says what it is about, by the program that made it."""
    about = describe_run(argv, argparse.Namespace(**vars(options), variant=None))
    del about["variant"]
    return {"kind": kind} | about | {"command": shlex.join([*shlex.split(program), *argv])}


def measure_rows(
    planned: Iterable[Any],
    measured: Callable[[Any], list[dict[str, Any]]],
    about: dict[str, Any],
    options: argparse.Namespace,
    *,
    check: Callable[[dict[str, Any]], None],
    one_line: Callable[[dict[str, Any]], str],
    text_table: Callable[[list[dict[str, Any]]], str] | None = None,
) -> int:
    """Measures one thing after the other, and writes what there is after each; the exit code.

    Args:
        planned: What to measure.
        measured: Makes rows of it: one, or several that are compared with each other.
        about: All fields of the result but its rows.
        options: Those with `device` and `out`.
        check: Raises for what is no result.
        one_line: A row in one line, for the progress.
        text_table: All rows, to print at the end; None: nothing.
    """
    planned, rows = list(planned), []
    for done, work in enumerate(planned, start=1):
        found = measured(work)
        rows += found
        release_memory(options.device)
        result = about | {"complete": done == len(planned), "rows": rows}
        check(result)
        write(options.out, result)
        for row in found:
            print(f"[{done}/{len(planned)}] {one_line(row)}", file=sys.stderr, flush=True)
    if text_table is not None:
        print(text_table(rows))
    print(f"written: {options.out}")
    return 0


def check_place(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> None:
    """Ends the program where there is no such device; fills in where results go."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device here; use --device cpu")
    if options.out is None:
        options.out = RESULTS / f"{name}--{slug(device_name(options))}.json"
    if options.out.is_dir():
        parser.error(f"argument --out: {options.out} is a directory")


def device_name(options: argparse.Namespace) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()


def cpu_name() -> str:
    """The model of the CPU, or at least its architecture."""
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of this checkout, with "-dirty" if files differ from it; None if unknown."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() or None


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes the rows so far beside `path`, and puts them in its place once they are complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.partial")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    if result["complete"]:
        os.replace(unfinished, path)


def slug(text: str) -> str:
    """A name for a file: lower case, words joined by "-"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def list_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse_list(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; known: {', '.join(known)}")
        return names

    return parse_list


def named_weights(text: str) -> tuple[str, Path]:
    """A file of weights and what to call it, from [NAME=]FILE."""
    name, _, file = ("", "", text) if Path(text).is_file() else text.partition("=")
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {file or text!r}")
    return name or Path(file).stem, Path(file)


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def one_line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
