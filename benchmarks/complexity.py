# SPDX-License-Identifier: Apache-2.0
"""What whole networks cost, next to the ones they replace.

`count`: parameters and multiply-accumulates, beside published figures; needs no GPU.
`measure`: time and memory of forward and of a training step.
"""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from benchmarks.measure import cuda_peak_mib, measure, use_threads
from benchmarks.models import (
    COUNTED_IMAGE,
    MODELS,
    RIVALS,
    TEST_MODEL,
    TOPK,
    Image,
    RetinaNet,
    Task,
    Work,
    build,
    count,
    is_ours,
    prepare,
)
from benchmarks.program import (
    OneLineParser,
    at_least_one,
    describe_kind,
    device_name,
    list_of,
    measure_rows,
    one_line_of,
    positive,
    slug,
)
from benchmarks.tables import (
    COUNTS,
    FIGURES,
    MODEL_PASSES,
    RESULTS,
    ROOT,
    TASKS,
    TIMES,
    check_result,
    number,
    outcome_text,
)

PROGRAM = "python -m benchmarks.complexity"
PUBLISHED = ROOT / "benchmarks" / "published.json"
MODES = ("eager", "graph", "compile", "compile+graph")
DEFAULT_TIMED = (
    "quadtree_b_b0,pvt_v2_b0,quadtree_b_b2,pvt_v2_b2,swin_tiny_quadtree_b,"
    "swin_tiny_patch4_window7_224"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every row that the options ask for, and writes the results."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    use_threads(options.threads)
    return measure_rows(
        options.plan(options),
        lambda arguments: [options.row(*arguments, options)],
        describe(argv, options),
        options,
        check=check_result,
        one_line=one_line,
    )


def parse(argv: Sequence[str]) -> Namespace:
    """The checked options; a bad one ends the program with one line and exit code 2."""
    parser = OneLineParser(prog=PROGRAM, description=__doc__)
    commands = parser.add_subparsers(
        required=True, metavar="count|measure", parser_class=OneLineParser
    )
    _add_count(commands)
    _add_measure(commands)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device here; use --device cpu")
    if options.device == "cpu" and any("graph" in mode for mode in options.modes):
        parser.error("argument --modes: graph means CUDA graphs and needs --device cuda")
    if options.out is None:
        options.out = RESULTS / f"complexity--{slug(device_name(options))}.json"
    if options.out.is_dir():
        parser.error(f"argument --out: {options.out} is a directory")
    return options


def _add_count(commands: Any) -> None:
    parser = commands.add_parser("count", help="parameters and multiply-accumulates")
    _add_models(parser, ",".join(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS / "complexity.json")
    parser.set_defaults(
        kind=COUNTS, plan=plan_counts, row=count_row, device="cpu", modes=(), threads=1
    )


def _add_measure(commands: Any) -> None:
    parser = commands.add_parser("measure", help="time and memory")
    add = parser.add_argument
    available = "cuda" if torch.cuda.is_available() else "cpu"
    _add_models(parser, DEFAULT_TIMED)
    add("--device", choices=("cpu", "cuda"), default=available)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add(
        "--precision",
        choices=("usual", "cast", "autocast"),
        default="usual",
        help="how bfloat16 is reached: the model cast to it, autocast around float32 weights, or "
        "what is usual: cast for forward, autocast for training",
    )
    add("--modes", type=list_of(MODES), default="graph" if available == "cuda" else "eager")
    add("--tasks", type=list_of(TASKS), default=",".join(TASKS))
    add("--passes", type=list_of(MODEL_PASSES), default=",".join(MODEL_PASSES))
    add(
        "--batch",
        type=at_least_one,
        default=64,
        help="images per call; backbones take one at a time",
    )
    add("--seconds-per-row", type=positive, default=0.5, help="time for the repeats of a row")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
    add("--out", type=Path, help="default: benchmarks/results/complexity--<device name>.json")
    parser.set_defaults(kind=TIMES, plan=plan_times, row=time_row)


def _add_models(parser: argparse.ArgumentParser, default: str) -> None:
    known = (*MODELS, TEST_MODEL)
    parser.add_argument(
        "--models", type=list_of(known), default=default, help=f"of {', '.join(known)}"
    )


def plan_counts(options: Namespace) -> Iterator[tuple[Task, str]]:
    """Every model for classification, then every backbone."""
    for task in TASKS:
        for name in options.models:
            yield task, name


def count_row(task: Task, name: str, options: Namespace) -> dict[str, Any]:
    """The counts of one model, beside what is published of it."""
    image = COUNTED_IMAGE[task]
    data = json.loads(PUBLISHED.read_text())
    known = data[task].get(name, {})
    return {
        "model": name,
        "rival": RIVALS.get(name),
        "task": task,
        "image": list(image),
        "topk": TOPK[task] if is_ours(name) else None,
        **asdict(count(_counted(name, task, image), image)),
        "detector": _detector(name, known.get("image")) if task == "backbone" else None,
        "published": {figure: _figure(known.get(figure), data["sources"]) for figure in FIGURES},
        "note": data["notes"][task].get(name),
    }


def _counted(name: str, task: Task, image: Image) -> nn.Module:
    # A named backend does not fall back to one whose operations have no formula.
    return build(name, task, image, **({"backend": "cpu"} if is_ours(name) else {}))


def _detector(name: str, published_image: Sequence[int] | None) -> dict[str, Any]:
    """The whole RetinaNet, counted once more where the published figure is of another image."""
    images = [COUNTED_IMAGE["backbone"], *([tuple(published_image)] if published_image else [])]
    counts = [count(RetinaNet(_counted(name, "backbone", image)), image) for image in images]
    return {
        "params": counts[0].params,
        "macs": counts[0].macs,
        "published_image": published_image,
        "macs_at_published_image": counts[1].macs if published_image else None,
    }


def _figure(entry: Sequence[Any] | None, sources: dict[str, str]) -> dict[str, Any] | None:
    if entry is None:
        return None
    value, source = entry
    return {"value": value, "source": sources[source]}


def plan_times(options: Namespace) -> Iterator[tuple[Work, str]]:
    """Every call to time; those that are compared with each other come together."""
    for task in options.tasks:
        for name in options.passes:
            for mode in options.modes:
                for model in options.models:
                    training = name == MODEL_PASSES[1]
                    yield (
                        Work(
                            model=model,
                            task=task,
                            training=training,
                            batch=options.batch if task == "classification" else 1,
                            device=options.device,
                            dtype=options.dtype,
                            autocast=_autocast(options, training),
                            compiled="compile" in mode,
                        ),
                        mode,
                    )


def _autocast(options: Namespace, training: bool) -> bool:
    if options.dtype == "float32":
        return False
    return training if options.precision == "usual" else options.precision == "autocast"


def time_row(work: Work, mode: str, options: Namespace) -> dict[str, Any]:
    """Measures one row; one that fails says so instead."""
    row = {
        "model": work.model,
        "rival": RIVALS.get(work.model),
        "task": work.task,
        "images": list(work.shape),
        "pass": MODEL_PASSES[work.training],
        "mode": mode,
        "precision": work.precision,
    }
    try:
        call = prepare(work)
        peak = cuda_peak_mib(call) if work.device == "cuda" else None
        seconds, graph = options.seconds_per_row, "graph" in mode
        timing = measure(call, work.device, seconds=seconds, graph=graph)
        return row | asdict(timing) | {"peak_mib": peak}
    except Exception as error:  # whatever happens to one row, the others are still wanted
        return row | {"error": one_line_of(error)}


def describe(argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """All fields of a result but its rows."""
    about = describe_kind(options.kind, PROGRAM, argv, options)
    about["versions"]["timm"] = timm.__version__
    return about


def one_line(row: dict[str, Any]) -> str:
    """A row in one line."""
    if "macs" in row:
        counted = f"{number(row['params'] / 1e6)} M, {number(row['macs'] / 1e9)} GMACs"
        return f"{row['task']} {row['model']}: {counted}"
    name = " ".join(row[key] for key in ("task", "model", "pass", "mode", "precision"))
    if "median_ms" not in row:
        return f"{name}: {outcome_text(row)}"
    return f"{name}: {number(row['median_ms'])} ms, {number(row['peak_mib'])} MiB"


if __name__ == "__main__":
    sys.exit(main())
