# SPDX-License-Identifier: Apache-2.0
"""What the programs that compare attentions by training share: options, plan, and the commands."""

import argparse
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_runs import (
    Job,
    Keep,
    Recipe,
    ResultFile,
    Suite,
    exits_when_terminated,
    find_recipes,
    hide_paths,
    run_jobs,
    working_folder,
)
from benchmarks.measure import Call, cuda_peak_mib, measure
from benchmarks.program import (
    at_least_one,
    describe_run,
    device_name,
    one_line_of,
    positive,
    release_memory,
    slug,
    version_of,
)
from benchmarks.tables import RESULTS, ROOT

FOLDERS = ("data", "textures", "work", "weights")  # options that hold one of this machine


def add_recipes(parser: argparse.ArgumentParser, suite: Suite, folder: Path, kind: str) -> None:
    """Which recipes, and where results go."""
    add = parser.add_argument
    add("--recipes", help=f"names without {suite.prefix}, separated by commas; default: all")
    add("--folder", type=Path, default=folder, help="folder of the recipes")
    add("--out", type=Path, help=f"default: benchmarks/results/{kind}--<device name>.json")


def add_runs(parser: argparse.ArgumentParser, *, seeds: str) -> None:
    """How many runs, how long, how many at once."""
    add = parser.add_argument
    add("--seeds", type=_seeds, default=seeds, help="separated by commas")
    add("--jobs", type=at_least_one, default=1, help="runs at the same time")
    add("--time-limit", type=float, default=float("inf"), help="seconds; then runs are stopped")
    add("--epochs", type=at_least_one, help="default: what the recipe says")
    add("--work", help="folder that keeps checkpoints and output; default: a temporary one")
    add("--extra", type=shlex.split, default="", help='more options: --extra "--trainer.x y"')


def add_steps(parser: argparse.ArgumentParser) -> None:
    """How a training step is measured."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default=available())
    add("--seconds-per-row", type=positive, default=1.0, help="time for the repeats of a row")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")


def check_recipes(
    parser: argparse.ArgumentParser, options: Namespace, suite: Suite, kind: str
) -> None:
    """Puts recipes in the place of their names, and a path in that of no `--out`."""
    try:
        options.recipes = find_recipes(options.folder, suite, options.recipes)
    except ValueError as error:
        parser.error(f"argument --recipes: {error}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device here; use --device cpu")
    if options.out is None:
        options.out = RESULTS / f"{kind}--{slug(device_name(options))}.json"
    if options.out.is_dir():
        parser.error(f"argument --out: {options.out} is a directory")


def available() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _seeds(text: str) -> list[int]:
    return list(dict.fromkeys(int(seed) for seed in text.split(",")))


def plan(options: Namespace, folder: str | None, settings: Sequence[str]) -> list[Job]:
    """Every run that was asked for, one seed after the other.

    Args:
        options: Those of `add_runs`, and the recipes.
        folder: Where the data are; its name is recorded.
        settings: Options of training that say so.
    """
    data = Path(folder).resolve().name if folder else None
    jobs = []
    for seed in options.seeds:
        for recipe in options.recipes:
            epochs = options.epochs or recipe.epochs
            fingerprint = recipe.fingerprint(data=data, extra=options.extra)
            args = [*settings, "--trainer.max_epochs", str(epochs), *options.extra]
            jobs.append(Job(recipe, seed, epochs, data, fingerprint, tuple(args)))
    return jobs


def train_missing(
    jobs: Sequence[Job],
    options: Namespace,
    suite: Suite,
    about: dict[str, Any],
    *,
    keep: Keep | None = None,
    resume: bool = False,
) -> int:
    """Trains what is not in the result file yet; exit code 1 if a run failed."""
    deadline = time.monotonic() + options.time_limit
    results = ResultFile(options.out, suite)
    results.begin(about, seeds=options.seeds)
    missing = [job for job in jobs if not results.has(job)]
    with exits_when_terminated(), working_folder(options.work) as work:
        failed, unfinished = run_jobs(
            missing,
            results,
            jobs=options.jobs,
            deadline=deadline,
            work=work,
            total=len(jobs),
            keep=keep,
            resume=resume,
        )
    for job in unfinished:
        print(f"not finished: {job}", file=sys.stderr)
    there = sum(map(results.has, jobs))
    again = "" if there == len(jobs) else "; repeat the command for the others"
    print(f"{there} of {len(jobs)} runs are in {options.out}{again}")
    return 1 if failed else 0


def measure_recipes(
    options: Namespace,
    suite: Suite,
    about: dict[str, Any],
    measure_recipe: Callable[[Recipe, Namespace], dict[str, Any]],
    one_line: Callable[[dict[str, Any]], str],
) -> int:
    """Measures every recipe, one after the other; exit code 1 if one failed."""
    results, rows = ResultFile(options.out, suite), []
    results.read()  # a file that is not ours is refused before any work
    for recipe in options.recipes:
        rows.append(measure_recipe(recipe, options))
        release_memory(options.device)
        results.set(measurement=about | {"rows": rows})
        progress = f"[{len(rows)}/{len(options.recipes)}] {one_line(rows[-1])}"
        print(progress, file=sys.stderr, flush=True)
    print(f"written: {options.out}")
    return 1 if any("error" in row for row in rows) else 0


def measure_step(
    recipe: Recipe, prepare: Callable[[], tuple[Call, int]], options: Namespace
) -> dict[str, Any]:
    """A row about training steps; one that fails says so instead.

    Args:
        recipe: What they are of.
        prepare: Makes a call that runs one, and gives the number of parameters with it.
        options: Those of `add_steps`.
    """
    try:
        cuda = options.device == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        step, params = prepare()
        peak = cuda_peak_mib(step, before) if cuda else None
        timing = measure(step, options.device, seconds=options.seconds_per_row)
        return {"recipe": recipe.name, "params": params} | asdict(timing) | {"peak_mib": peak}
    except Exception as error:  # whatever happens to one row, the others are still wanted
        return {"recipe": recipe.name, "error": hide_paths(one_line_of(error))}


def find_result(program: str, path: Path | None, kind: str) -> Path | None:
    """The result file asked for, or the only one there is; None, and a line that says so."""
    found = [path] if path else sorted(RESULTS.glob(f"{kind}*.json"))
    if len(found) == 1:
        return found[0]
    print(f"{program}: {len(found)} result files, choose with --results", file=sys.stderr)
    return None


def draw_result(
    program: str,
    options: Namespace,
    suite: Suite,
    kind: str,
    draw_all: Callable[[dict[str, Any], Path], Iterable[Path]],
) -> int:
    """Draws the pictures of the result file asked for; the exit code."""
    found = find_result(program, options.results, kind)
    if found is None:
        return 2
    for path in draw_all(ResultFile(found, suite).read(), options.out):
        print(f"written: {path}")
    return 0


def describe(program: str, argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """How, when and where it was made."""
    about = describe_run(argv, Namespace(**vars(options), variant=None))
    command = shlex.join([*shlex.split(program), *(_portable(arg, options) for arg in argv)])
    versions = about["versions"] | {
        "timm": version_of("timm"),
        "pytorch_lightning": version_of("pytorch-lightning"),
    }
    kept = ("date", "commit", "device", "machine")
    return {"command": command, **{key: about[key] for key in kept}, "versions": versions}


def _portable(arg: str, options: Namespace) -> str:
    """An argument as it would be on any machine: folders by their last name."""
    flag, equals, value = arg.rpartition("=") if arg.startswith("--") else ("", "", arg)
    folders = (getattr(options, name, None) for name in FOLDERS)
    if value in [str(folder) for folder in folders if folder is not None]:
        value = Path(value).resolve().name
    elif Path(value).is_absolute() and Path(value).is_relative_to(ROOT):
        value = str(Path(value).relative_to(ROOT))
    return flag + equals + hide_paths(value)
