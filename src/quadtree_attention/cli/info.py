# SPDX-License-Identifier: Apache-2.0
"""`quadtree info`: versions, devices, backends, and the plan of a call."""

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quadtree_attention import __version__
from quadtree_attention.cli.output import command, imported
from quadtree_attention.errors import DTypeError, OptionError

if TYPE_CHECKING:
    import torch

    from quadtree_attention.ops.plan import LevelPlan, Plan
    from quadtree_attention.ops.problem import Problem

HELP = """Show versions, devices, and which backends can run a call, and why others cannot.

The options describe the call; the default is one of a feature matcher on 640 x 480 images. With
--plan also its FLOPs, bytes and memory, level by level and next to dense attention, and which of
the two to use. Nothing is run, and the device need not be present.

\b
Examples:
  quadtree info
  quadtree info --plan --grid 200x336 --heads 1 --levels 4 --topk 32
  quadtree info --grid 60x80 --key-grid 45x100 --topk 32,16 --device cuda
  quadtree info --plan --json --grid 4096 --levels 6 --topk 8 --variant A
"""


@dataclass(frozen=True)
class Question:
    """The call that is asked about, as it was typed."""

    grid: str
    key_grid: str | None
    heads: int
    dim: int
    value_dim: int | None
    levels: int
    topk: str
    variant: str
    dtype: str
    device: str
    batch: int

    def arguments(self) -> dict[str, Any]:
        """The arguments of `plan`; what it checks itself is left to it."""
        import torch

        auto = "cuda" if torch.cuda.is_available() else "cpu"
        return {
            "grid": parse_grid("--grid", self.grid),
            "key_grid": None if self.key_grid is None else parse_grid("--key-grid", self.key_grid),
            "heads": self.heads,
            "dim": self.dim,
            "value_dim": self.value_dim,
            "num_levels": self.levels,
            "topk": parse_topk(self.topk),
            "variant": self.variant,
            "dtype": parse_dtype(self.dtype),
            "device": auto if self.device == "auto" else self.device,
            "batch": self.batch,
        }


@dataclass(frozen=True)
class Report:
    """All that is printed, in the order of the JSON."""

    versions: dict[str, str | None]
    devices: dict[str, Any]
    environment: dict[str, str | None]
    problem: str
    backends: dict[str, list[str]]
    plan: "Plan | None"
    times_measured_on: str | None


def register(app: typer.Typer) -> None:
    @command(app, "info", HELP, "device json debug")
    def info(
        context: typer.Context,
        grid: Annotated[str, typer.Option(help="Query map: 200x336, 4096 or 8x24x40.")] = "60x80",
        key_grid: Annotated[
            str | None, typer.Option(help="Key map.", show_default="as --grid")
        ] = None,
        heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
        dim: Annotated[int, typer.Option(help="Width of queries and keys, per head.")] = 32,
        value_dim: Annotated[
            int | None, typer.Option(help="Width of values, per head.", show_default="as --dim")
        ] = None,
        levels: Annotated[int, typer.Option(help="Levels of the pyramids.")] = 3,
        topk: Annotated[
            str,
            typer.Option(help="Cells kept per query: 32, or one per level that selects: 32,16."),
        ] = "16",
        variant: Annotated[str, typer.Option(help="A or B.")] = "B",
        dtype: Annotated[
            str, typer.Option(help="float32, float64, float16 or bfloat16.")
        ] = "float32",
        batch: Annotated[int, typer.Option(help="Maps per call.")] = 1,
        plan: Annotated[
            bool,
            typer.Option("--plan", help="Also print what the call costs, next to dense attention."),
        ] = False,
    ) -> None:
        o = context.params
        asked = Question(**{field.name: o[field.name] for field in fields(Question)})
        show(asked, with_plan=plan, as_json=o["json"])


def show(question: Question, *, with_plan: bool, as_json: bool) -> None:
    report = make_report(question, with_plan=with_plan)
    print(json.dumps(asdict(report), indent=2) if as_json else as_text(report))


def make_report(question: Question, *, with_plan: bool) -> Report:
    from quadtree_attention.ops.backends import ENVIRONMENT_VARIABLE
    from quadtree_attention.ops.cost import SPEEDS
    from quadtree_attention.ops.plan import describe_problem, plan

    imported()
    arguments = question.arguments()
    problem = describe_problem(**arguments)
    return Report(
        versions=_versions(),
        devices={"cpu": _cpu(), "cuda": _cuda_devices()},
        environment={ENVIRONMENT_VARIABLE: os.environ.get(ENVIRONMENT_VARIABLE)},
        problem=str(problem),
        backends=_backends(problem),
        plan=plan(**arguments) if with_plan else None,
        times_measured_on=SPEEDS[problem.device.type].machine if with_plan else None,
    )


def parse_grid(option: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,18}(x\d{1,18})*", text):
        raise OptionError(
            f"{option} must be the size of every axis, joined by x, got {text!r}; "
            "write 200x336 for an image, 4096 for a row, 8x24x40 for a volume"
        )
    return tuple(int(size) for size in text.split("x"))


def parse_topk(text: str) -> int | tuple[int, ...]:
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", text):
        raise OptionError(
            f"--topk must be a number, or one per level that selects, got {text!r}; "
            "write 32, or 32,16 for three levels"
        )
    numbers = tuple(int(number) for number in text.split(","))
    return numbers if "," in text else numbers[0]


def parse_dtype(name: str) -> "torch.dtype":
    from quadtree_attention.ops.problem import DTYPES

    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in by_name:
        raise DTypeError(f"--dtype must be one of {', '.join(by_name)}, got {name!r}; take one")
    return by_name[name]


def _versions() -> dict[str, str | None]:
    import torch

    return {
        "quadtree_attention": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _installed_version("triton"),
        "numba": _installed_version("numba"),
    }


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import torch

    return {
        "name": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:  # not Linux
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


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


def _backends(problem: "Problem") -> dict[str, list[str]]:
    """Every backend with its reasons; whether the device exists is not for a backend to say."""
    import torch

    from quadtree_attention.ops.backends import explain_backends

    missing = []
    if problem.device.type == "cuda" and (problem.device.index or 0) >= torch.cuda.device_count():
        missing = [f"this machine has no device {problem.device}"]
    return {name: missing + reasons for name, reasons in explain_backends(problem).items()}


def as_text(report: Report) -> str:
    parts = [
        "versions\n" + _lines(report.versions),
        "devices\n" + _devices_text(report.devices),
        f"backends for {report.problem}\n" + _backends_text(report),
    ]
    if report.plan is not None:
        parts.append("plan\n" + _plan_text(report.plan, str(report.times_measured_on)))
    return "\n\n".join(parts)


def _lines(values: dict[str, str | None]) -> str:
    return _table([[name, value or "not installed"] for name, value in values.items()])


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


def _backends_text(report: Report) -> str:
    first = next((name for name, reasons in report.backends.items() if not reasons), None)
    rows = []
    for name, reasons in report.backends.items():
        taken = " and is what auto takes" if name == first else ""
        rows.append([name, f"cannot: {'; '.join(reasons)}" if reasons else f"can run it{taken}"])
    lines = [_table(rows)]
    for name, value in report.environment.items():
        if value:
            lines.append(f"  {name}={value} replaces auto")
    return "\n".join(lines)


def _plan_text(plan: "Plan", machine: str) -> str:
    return "\n\n".join(
        [
            _levels_text(plan.levels),
            _costs_text(plan),
            f"  Times are estimates for {machine}; compare them with each other only.\n"
            f"  {plan.advice}",
        ]
    )


def _levels_text(levels: "Sequence[LevelPlan]") -> str:
    rows = [["level", "queries", "keys", "candidates", "kept", "FLOPs"]]
    for i, level in enumerate(levels):
        grids = [_grid(level.grid), _grid(level.key_grid)]
        rows.append(
            [str(i), *grids, f"{level.candidates:,}", str(level.kept or "-"), _si(level.flops)]
        )
    return _table(rows)


def _costs_text(plan: "Plan") -> str:
    ours, dense = plan.quadtree, plan.dense
    rows = [["", "quadtree", "dense"]]
    rows += [
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
    """Columns of equal width, two spaces apart and indented."""
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
    """In the largest unit that leaves a digit before the point, three digits at least."""
    power = 0
    while number >= step and power + 1 < len(units):
        number, power = number / step, power + 1
    decimals = 0 if power == 0 or number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{decimals}f} {units[power]}".rstrip()


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
