# SPDX-License-Identifier: Apache-2.0
"""The same small backbone trained with every attention, from the recipe `tiny20.yaml`.

`train`: accuracy; several runs at once, repeat the command until all are there.
`measure`: speed and memory of a training step, parameters and multiply-accumulates.
`figures`: the pictures of docs/results/attentions.md, whose table `benchmarks.tables` makes.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import nn

from benchmarks.attention_program import (
    add_recipes,
    add_runs,
    add_steps,
    available,
    check_recipes,
    describe,
    draw_result,
    measure_recipes,
    plan,
    train_missing,
)
from benchmarks.attention_runs import Recipe, ResultFile, Suite, hide_paths
from benchmarks.attention_tables import METRICS, ORDER, check_result, empty_result
from benchmarks.measure import Call, cuda_peak_mib, measure, use_threads
from benchmarks.models import SEED, count
from benchmarks.program import OneLineParser, at_least_one, one_line_of, release_memory
from benchmarks.tables import ATTENTIONS, ROOT, number
from quadtree_attention.models.registry import create

PROGRAM = "python -m benchmarks.attentions"
RECIPES = ROOT / "recipes" / "classify"
PICTURES = ROOT / "docs" / "results"
CLASSES = 20  # of the data set that the recipes are for
SUITE = Suite(
    task="classify",
    prefix="tiny20-",
    order=ORDER,
    metrics=METRICS,
    score="val/top1",
    score_name="top-1",
    empty_result=empty_result,
    check_result=check_result,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the options ask for."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    return options.run(argv, options)


def parse(argv: Sequence[str]) -> Namespace:
    """The checked options; a bad one ends the program with one line and exit code 2."""
    parser = OneLineParser(prog=PROGRAM, description=__doc__)
    names = "train|measure|figures"
    commands = parser.add_subparsers(required=True, metavar=names, parser_class=OneLineParser)
    _add_train(commands)
    _add_measure(commands)
    _add_figures(commands)
    options = parser.parse_args(argv)
    if "recipes" in options:
        check_recipes(parser, options, SUITE, ATTENTIONS)
    if getattr(options, "memory_only", False) and options.device != "cuda":
        parser.error("argument --memory-only: only the memory of a GPU is measured; leave it out")
    return options


def _add_train(commands: Any) -> None:
    parser = commands.add_parser("train", help="accuracy of every attention")
    add_recipes(parser, SUITE, RECIPES, ATTENTIONS)
    parser.add_argument("--data", help="folder of the data; default: what the recipe says")
    add_runs(parser, seeds="0,1")
    parser.set_defaults(run=train, device=available(), threads=1)


def _add_measure(commands: Any) -> None:
    parser = commands.add_parser("measure", help="speed, memory, parameters and work")
    add = parser.add_argument
    add_recipes(parser, SUITE, RECIPES, ATTENTIONS)
    add_steps(parser)
    add("--batch", type=at_least_one, default=128, help="images of a step")
    add("--image", type=at_least_one, default=224, help="pixels of a side")
    add("--memory-only", action="store_true", help="add memory to a file that has the speed: "
        "what else a GPU is doing changes the speed alone")  # fmt: skip
    parser.set_defaults(run=measure_all)


def _add_figures(commands: Any) -> None:
    parser = commands.add_parser("figures", help="pictures from a result file")
    parser.add_argument("--results", type=Path, help="default: the only file there is")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder to draw into")
    parser.set_defaults(run=draw)


def train(argv: Sequence[str], options: Namespace) -> int:
    """Trains what is not in the result file yet; exit code 1 if a run failed."""
    settings = ["--data.root", options.data] if options.data else []
    jobs = plan(options, options.data, settings)
    return train_missing(jobs, options, SUITE, describe(PROGRAM, argv, options))


def measure_all(argv: Sequence[str], options: Namespace) -> int:
    """Measures every recipe, one after the other, and records what was found."""
    use_threads(options.threads)
    about = describe(PROGRAM, argv, options) | {
        "batch": options.batch,
        "image": options.image,
        "precision": "bfloat16 autocast",
    }
    if options.memory_only:
        return add_memory(options, about)
    return measure_recipes(
        options, SUITE, about, measure_recipe, lambda row: one_line(row, options.batch)
    )


def add_memory(options: Namespace, about: dict[str, Any]) -> int:
    """Measures the memory of a step alone, for the rows that a result file has."""
    results = ResultFile(options.out, SUITE)
    measurement = results.read()["measurement"] or {"rows": []}
    rows = {row["recipe"]: row for row in measurement["rows"] if "error" not in row}
    if unknown := [recipe.name for recipe in options.recipes if recipe.name not in rows]:
        print(f"{PROGRAM}: {options.out} has no speed of {', '.join(unknown)}", file=sys.stderr)
        return 2
    for recipe in options.recipes:
        release_memory(options.device)
        before = torch.cuda.memory_allocated()
        rows[recipe.name]["peak_mib"] = cuda_peak_mib(training_step(recipe, options)[0], before)
        results.set(measurement=measurement | {"memory": about})
        print(one_line(rows[recipe.name], options.batch), file=sys.stderr, flush=True)
    return 0


def measure_recipe(recipe: Recipe, options: Namespace) -> dict[str, Any]:
    """One row; one that fails says so instead."""
    row = {"recipe": recipe.name}
    try:
        counted = count(build(recipe, counted=True), (options.image, options.image))
        row |= {"params": counted.params, "macs": counted.macs}
        # What rows before have left behind, such as the pools of their graphs, is not of this one
        before = torch.cuda.memory_allocated() if options.device == "cuda" else 0
        step, record = training_step(recipe, options)
        peak = None
        if options.device == "cuda":
            peak = cuda_peak_mib(step, before)
            if recipe.content["model"].get("cuda_graph", False):
                record()
        timing = measure(step, options.device, seconds=options.seconds_per_row)
        return row | asdict(timing) | {"peak_mib": peak}
    except Exception as error:  # whatever happens to one row, the others are still wanted
        return {"recipe": recipe.name, "error": hide_paths(one_line_of(error))}


def build(recipe: Recipe, *, counted: bool = False) -> nn.Module:
    """The model of a recipe; to be counted, on the backend whose operations have formulas."""
    settings = recipe.content["model"]
    options = {"num_classes": CLASSES, **settings.get("options", {})}
    if counted and "attention" not in options:
        options["backend"] = "cpu"
    torch.manual_seed(SEED)
    return create(settings["model"], drop_path_rate=settings.get("drop_path", 0.0), **options)


def training_step(recipe: Recipe, options: Namespace) -> tuple[Call, Call]:
    """Forward, loss, backward and a step of AdamW, on random images that are there already.

    The second call makes the first replay forward and backward from a CUDA graph.
    """
    device = options.device
    model = build(recipe).to(device).train()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-4, weight_decay=0.05)
    random = torch.Generator().manual_seed(SEED)
    shape = (options.batch, 3, options.image, options.image)
    images = torch.randn(shape, generator=random).to(device)
    labels = torch.randint(CLASSES, (options.batch,), generator=random).to(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()

    def record() -> None:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            torch.cuda.make_graphed_callables(model, (images,))

    return step, record


def one_line(row: dict[str, Any], batch: int) -> str:
    """A row in one line."""
    if "error" in row:
        return f"{row['recipe']}: failed: {row['error']}"
    speed = number(1e3 * batch / row["median_ms"])
    return (
        f"{row['recipe']}: {speed} images/s, {number(row['peak_mib'])} MiB, "
        f"{number(row['params'] / 1e6)} M, {number(row['macs'] / 1e9)} GMACs"
    )


def draw(argv: Sequence[str], options: Namespace) -> int:
    """Draws the pictures of a result file."""
    from benchmarks.attention_figures import draw_all  # needs matplotlib

    return draw_result(PROGRAM, options, SUITE, ATTENTIONS, draw_all)


if __name__ == "__main__":
    sys.exit(main())
