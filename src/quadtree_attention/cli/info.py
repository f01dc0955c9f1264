# SPDX-License-Identifier: Apache-2.0
"""`quadtree info`: shows versions, devices, backends, and the plan of a call."""

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from quadtree_attention import __version__
from quadtree_attention.cli.machine import cpu_name, installed_version
from quadtree_attention.cli.options import INT, TEXT, flag, option
from quadtree_attention.cli.output import imported
from quadtree_attention.errors import DTypeError, OptionError

if TYPE_CHECKING:
    from quadtree_attention.ops.planning.plan import Plan

HELP = """Show versions, devices, the backends that can run a call, and why others cannot.

The options describe the call; the default is a call of a feature matcher on 640 x 480 images.
--plan adds its FLOPs, bytes and memory per level, compared with dense attention, and which of
the two to use. Nothing is run, and the device need not be present.

\b
Examples:
  quadtree info
  quadtree info --plan --grid 200x336 --heads 1 --levels 4 --topk 32
  quadtree info --grid 60x80 --key-grid 45x100 --topk 32,16 --device cuda
  quadtree info --plan --json --grid 4096 --levels 6 --topk 8 --variant A
"""


OPTIONS = "device json debug"
OWN = {
    "grid": option(str, "Query map: 200x336, 4096 or 8x24x40.", "60x80"),
    "key_grid": option(TEXT, "Key map.", show_default="as --grid"),
    "heads": option(int, "Attention heads.", 8),
    "dim": option(int, "Width of queries and keys, per head.", 32),
    "value_dim": option(INT, "Width of values, per head.", show_default="as --dim"),
    "levels": option(int, "Levels of the pyramids.", 3),
    "topk": option(str, "Cells kept per query: 32, or one per selecting level: 32,16.", "16"),
    "variant": option(str, "A, B or C.", "B"),
    "dtype": option(str, "float32, float64, float16 or bfloat16.", "float32"),
    "batch": option(int, "Maps per call.", 1),
    "plan": flag("plan", "Also print the cost of the call, compared with dense attention."),
}


def run(context: typer.Context) -> None:
    report, as_json = make_report(context.params), context.params["json"]
    print(json.dumps(report, indent=2, default=asdict) if as_json else as_text(report))


def make_report(o: Mapping[str, Any]) -> dict[str, Any]:
    """Return all printed facts, in the order of the JSON; options are checked by `plan`."""
    import torch

    from quadtree_attention.ops.attention.problem import DTYPES
    from quadtree_attention.ops.backends import ENVIRONMENT_VARIABLE, explain_backends
    from quadtree_attention.ops.planning.cost import SPEEDS
    from quadtree_attention.ops.planning.plan import describe_problem, plan

    imported()
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", o["topk"]):
        raise OptionError(
            f"--topk must be a number, or one per level with a selection, got {o['topk']!r}; "
            "write 32, or 32,16 for three levels"
        )
    kept = tuple(map(int, o["topk"].split(",")))
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if o["dtype"] not in dtypes:
        raise DTypeError(
            f"--dtype must be one of {', '.join(dtypes)}, got {o['dtype']!r}; pass one"
        )
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = {name: o[name] for name in ("heads", "dim", "value_dim", "variant", "batch")} | {
        "grid": parse_grid("--grid", o["grid"]),
        "key_grid": None if o["key_grid"] is None else parse_grid("--key-grid", o["key_grid"]),
        "num_levels": o["levels"],
        "topk": kept if "," in o["topk"] else kept[0],
        "dtype": dtypes[o["dtype"]],
        "device": auto if o["device"] == "auto" else o["device"],
    }
    problem = describe_problem(**arguments)
    absent = []  # a reason of every backend
    if problem.device.type == "cuda" and (problem.device.index or 0) >= torch.cuda.device_count():
        absent = [f"this machine has no device {problem.device}"]
    cpu = {"name": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {
        "versions": _versions(),
        "devices": {"cpu": cpu, "cuda": _cuda_devices()},
        "environment": {ENVIRONMENT_VARIABLE: os.environ.get(ENVIRONMENT_VARIABLE)},
        "problem": str(problem),
        "backends": {n: absent + reasons for n, reasons in explain_backends(problem).items()},
        "plan": plan(**arguments) if o["plan"] else None,
        "times_measured_on": SPEEDS[problem.device.type].machine if o["plan"] else None,
    }


def parse_grid(option: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,18}(x\d{1,18})*", text):
        raise OptionError(
            f"{option} must be the size of every axis, joined by x, got {text!r}; "
            "write 200x336 for an image, 4096 for a row, 8x24x40 for a volume"
        )
    return tuple(int(size) for size in text.split("x"))


def _versions() -> dict[str, str | None]:
    import torch

    return {
        "quadtree_attention": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": installed_version("triton"),
        "numba": installed_version("numba"),
    }


def _cuda_devices() -> list[dict[str, Any]]:
    import torch

    devices = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [
        {
            "name": device.name,
            "memory_bytes": device.total_memory,
            "capability": f"{device.major}.{device.minor}",
        }
        for device in devices
    ]


def as_text(report: Mapping[str, Any]) -> str:
    versions = [[name, value or "not installed"] for name, value in report["versions"].items()]
    first = next((name for name, reasons in report["backends"].items() if not reasons), None)
    backends = []
    for name, reasons in report["backends"].items():
        taken = " and is selected by auto" if name == first else ""
        can = f"cannot: {'; '.join(reasons)}" if reasons else f"can run it{taken}"
        backends.append([name, can])
    replaced = [
        f"  {n}={value} replaces auto" for n, value in report["environment"].items() if value
    ]
    parts = [
        "versions\n" + _table(versions),
        "devices\n" + _devices_text(report["devices"]),
        f"backends for {report['problem']}\n" + "\n".join([_table(backends), *replaced]),
    ]
    if (plan := report["plan"]) is not None:
        rows = [["level", "queries", "keys", "candidates", "kept", "FLOPs"]]
        for i, level in enumerate(plan.levels):
            grids = [_grid(level.grid), _grid(level.key_grid)]
            counts = [f"{level.candidates:,}", str(level.kept or "-"), _si(level.flops)]
            rows.append([str(i), *grids, *counts])
        parts.append(
            f"plan\n{_table(rows)}\n\n{_costs_text(plan)}\n\n"
            f"  Times are estimates for {report['times_measured_on']}; use them for relative "
            f"comparisons only.\n  {plan.advice}"
        )
    return "\n\n".join(parts)


def _devices_text(devices: dict[str, Any]) -> str:
    cpu = devices["cpu"]
    rows = [["cpu", f"{cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads used"]]
    for i, gpu in enumerate(devices["cuda"]):
        memory = _bytes(gpu["memory_bytes"])
        rows.append([f"cuda:{i}", f"{gpu['name']}, {memory}, capability {gpu['capability']}"])
    if not devices["cuda"]:
        import torch

        built = "torch finds none" if torch.version.cuda else "torch is built without CUDA"
        rows.append(["cuda", f"no device: {built}"])
    return _table(rows)


def _costs_text(plan: "Plan") -> str:
    ours, dense = plan.quadtree, plan.dense
    rows = [
        ["", "quadtree", "dense"],
        ["FLOPs, forward", _si(ours.flops), _si(dense.flops)],
        ["FLOPs, forward + backward", _si(ours.training_flops), _si(dense.training_flops)],
        ["bytes moved, forward", _bytes(ours.bytes_moved), _bytes(dense.bytes_moved)],
        ["memory, forward", _bytes(ours.memory), _bytes(dense.memory)],
        ["memory, training", _bytes(ours.training_memory), _bytes(dense.training_memory)],
        ["time, forward", _milliseconds(ours.seconds), _milliseconds(dense.seconds)],
    ]
    if ours.eager_seconds != ours.seconds:
        eager = [_milliseconds(ours.eager_seconds), _milliseconds(dense.eager_seconds)]
        rows.append(["time, forward, no CUDA graph", *eager])
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    """Formats rows as indented columns, two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _grid(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _si(number: int) -> str:
    return _scaled(number, 1000, ("", "k", "M", "G", "T", "P"))


def _bytes(number: int) -> str:
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    """Formats bytes in the largest unit with a digit before the point, with three digits."""
    power = 0
    while number >= step and power + 1 < len(units):
        number, power = number / step, power + 1
    decimals = 0 if power == 0 or number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{decimals}f} {units[power]}".rstrip()


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
