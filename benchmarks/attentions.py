# SPDX-License-Identifier: Apache-2.0
"""The same small backbone trained with every attention, from the recipes `tiny20-*.yaml`.

`train`: accuracy; several runs at once, repeat the command until all are there.
`measure`: speed and memory of a training step, parameters and multiply-accumulates.
`figures`: the pictures of docs/results/attentions.md, whose table `benchmarks.tables` makes.
"""

import argparse
import gc
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import nn

from benchmarks.attention_runs import (
    Job,
    Recipe,
    ResultFile,
    exits_when_terminated,
    find_recipes,
    hide_paths,
    run_jobs,
    working_folder,
)
from benchmarks.measure import MIB, Call, measure, use_threads
from benchmarks.models import SEED, count
from benchmarks.program import (
    OneLineParser,
    at_least_one,
    describe_run,
    device_name,
    one_line_of,
    positive,
    release_memory,
    slug,
    version_of,
)
from benchmarks.tables import ATTENTIONS, RESULTS, ROOT, number
from quadtree_attention.models.weights import build_model

PROGRAM = "python -m benchmarks.attentions"
RECIPES = ROOT / "recipes" / "classify"
PICTURES = ROOT / "docs" / "results"
CLASSES = 20  # of the data set that the recipes are for


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
        try:
            options.recipes = find_recipes(options.folder, options.recipes)
        except ValueError as error:
            parser.error(f"argument --recipes: {error}")
        if options.device == "cuda" and not torch.cuda.is_available():
            parser.error("argument --device: torch finds no CUDA device here; use --device cpu")
        if options.out is None:
            options.out = RESULTS / f"{ATTENTIONS}--{slug(device_name(options))}.json"
        if options.out.is_dir():
            parser.error(f"argument --out: {options.out} is a directory")
    return options


def _add_train(commands: Any) -> None:
    parser = commands.add_parser("train", help="accuracy of every attention")
    add = parser.add_argument
    _add_recipes(parser)
    add("--data", help="folder of the data; default: what the recipe says")
    add("--seeds", type=_seeds, default="0,1", help="separated by commas")
    add("--jobs", type=at_least_one, default=1, help="runs at the same time")
    add("--time-limit", type=float, default=float("inf"), help="seconds; then runs are stopped")
    add("--epochs", type=at_least_one, help="default: what the recipe says")
    add("--work", help="folder that keeps checkpoints and output; default: a temporary one")
    add("--extra", type=shlex.split, default="", help='more options: --extra "--trainer.x y"')
    parser.set_defaults(run=train, device=_available(), threads=1)


def _add_measure(commands: Any) -> None:
    parser = commands.add_parser("measure", help="speed, memory, parameters and work")
    add = parser.add_argument
    _add_recipes(parser)
    add("--device", choices=("cpu", "cuda"), default=_available())
    add("--batch", type=at_least_one, default=128, help="images of a step")
    add("--image", type=at_least_one, default=224, help="pixels of a side")
    add("--seconds-per-row", type=positive, default=1.0, help="time for the repeats of a row")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
    parser.set_defaults(run=measure_all)


def _add_figures(commands: Any) -> None:
    parser = commands.add_parser("figures", help="pictures from a result file")
    parser.add_argument("--results", type=Path, help="default: the only file there is")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder to draw into")
    parser.set_defaults(run=draw)


def _add_recipes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--recipes", help="names without tiny20-, separated by commas; default: all")
    add("--folder", type=Path, default=RECIPES, help="folder of the recipes")
    add("--out", type=Path, help="default: benchmarks/results/attentions--<device name>.json")


def _available() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _seeds(text: str) -> list[int]:
    return list(dict.fromkeys(int(seed) for seed in text.split(",")))


def train(argv: Sequence[str], options: Namespace) -> int:
    """Trains what is not in the result file yet; exit code 1 if a run failed."""
    deadline = time.monotonic() + options.time_limit
    jobs = plan(options)
    results = ResultFile(options.out)
    results.begin(describe(argv, options), seeds=options.seeds)
    missing = [job for job in jobs if not results.has(job)]
    with exits_when_terminated(), working_folder(options.work) as work:
        failed, unfinished = run_jobs(
            missing, results, jobs=options.jobs, deadline=deadline, work=work, total=len(jobs)
        )
    for job in unfinished:
        print(f"not finished: {job}", file=sys.stderr)
    there = sum(map(results.has, jobs))
    again = "" if there == len(jobs) else "; repeat the command for the others"
    print(f"{there} of {len(jobs)} runs are in {options.out}{again}")
    return 1 if failed else 0


def plan(options: Namespace) -> list[Job]:
    """Every run that was asked for, one seed after the other."""
    data = Path(options.data).resolve().name if options.data else None
    settings = ["--data.root", options.data] if options.data else []
    jobs = []
    for seed in options.seeds:
        for recipe in options.recipes:
            epochs = options.epochs or recipe.epochs
            fingerprint = recipe.fingerprint(data=data, extra=options.extra)
            args = [*settings, "--trainer.max_epochs", str(epochs), *options.extra]
            jobs.append(Job(recipe, seed, epochs, data, fingerprint, tuple(args)))
    return jobs


def describe(argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """How, when and where it was made."""
    about = describe_run(argv, Namespace(**vars(options), variant=None))
    command = shlex.join([*shlex.split(PROGRAM), *(_portable(arg, options) for arg in argv)])
    versions = about["versions"] | {
        "timm": timm.__version__,
        "pytorch_lightning": version_of("pytorch-lightning"),
    }
    kept = ("date", "commit", "device", "machine")
    return {"command": command, **{key: about[key] for key in kept}, "versions": versions}


def _portable(arg: str, options: Namespace) -> str:
    """An argument as it would be on any machine: folders by their last name."""
    flag, equals, value = arg.rpartition("=") if arg.startswith("--") else ("", "", arg)
    if value in (getattr(options, "data", None), getattr(options, "work", None)):
        value = Path(value).resolve().name
    elif Path(value).is_absolute() and Path(value).is_relative_to(ROOT):
        value = str(Path(value).relative_to(ROOT))
    return flag + equals + hide_paths(value)


def measure_all(argv: Sequence[str], options: Namespace) -> int:
    """Measures every recipe, one after the other, and records what was found."""
    use_threads(options.threads)
    about = describe(argv, options) | {
        "batch": options.batch,
        "image": options.image,
        "precision": "bfloat16 autocast",
    }
    results, rows = ResultFile(options.out), []
    results.read()  # a file that is not ours is refused before any work
    for recipe in options.recipes:
        rows.append(measure_recipe(recipe, options))
        release_memory(options.device)
        results.set_measurement(about | {"rows": rows})
        progress = f"[{len(rows)}/{len(options.recipes)}] {one_line(rows[-1], options.batch)}"
        print(progress, file=sys.stderr, flush=True)
    print(f"written: {options.out}")
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
            peak = peak_mib(step, before)
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
    return build_model(settings["model"], drop_path_rate=settings.get("drop_path", 0.0), **options)


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


def peak_mib(step: Call, before: int) -> float:
    """Most memory of a step: model, optimizer, images and all that was not there before them."""
    step()  # the state of the optimizer is made in the first
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


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

    found = [options.results] if options.results else sorted(RESULTS.glob(f"{ATTENTIONS}*.json"))
    if len(found) != 1:
        print(f"{PROGRAM}: {len(found)} result files, choose with --results", file=sys.stderr)
        return 2
    for path in draw_all(ResultFile(found[0]).read(), options.out):
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
