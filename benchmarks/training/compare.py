# SPDX-License-Identifier: Apache-2.0
"""Attentions compared by training in one network, from the variants of a recipe.

`train`: several runs at once; repeat the command until all are there.
`measure`: speed and memory of a training step, and parameters.
`evaluate`: scores of weights on scenes kept aside and on real pairs, on a CPU (match-attentions).
`figures`: the pictures of the page in docs/results.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import options as shared
from benchmarks.result import ROOT, ResultFile, describe, read
from benchmarks.training import scores, steps
from benchmarks.training.comparison import Comparison, comparisons
from benchmarks.training.runs import (
    Job,
    RunFailedError,
    Trainer,
    exits_when_terminated,
    find_recipes,
    fingerprint,
    tell,
)
from quadtree_attention.errors import OptionError

PICTURES = ROOT / "docs" / "results"
WEIGHTS = ROOT / "runs"  # a folder for each comparison
GROUPS = "groups.json"  # what a run writes that is paired by image
PAIRED = ["--trainer.callbacks+=benchmarks.training.groups.GroupScores"]  # writes it


def set_up(parser: ArgumentParser) -> None:
    """Gives the parser a comparison and what to do with it."""
    parser.description = __doc__
    names = list(comparisons())
    parser.add_argument("name", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    actions = parser.add_subparsers(
        required=True, metavar="|".join(ACTIONS), parser_class=shared.OneLineParser
    )
    for action_name, run in ACTIONS.items():
        action = actions.add_parser(action_name, description=run.__doc__)
        shared.add_options(action, f"training/{action_name}", sys.modules[__name__])
        more = {"threads": 1, "device": None} if run is train else {}
        action.set_defaults(run=run, check_options=partial(_check, action), **more)


def _check(parser: ArgumentParser, options: Namespace) -> None:
    """Completes the options; a mistake ends the program with one line."""
    comparison = options.comparison = comparisons()[options.name]
    if "recipe" in options:
        options.recipe = options.recipe or ROOT / "recipes" / f"{comparison.recipe}.yaml"
        try:
            options.recipes = find_recipes(comparison, options.recipe, options.variants)
        except OptionError as error:
            parser.error(str(error))
        options.data_options = [f"--data.{comparison.data}", options.data] if options.data else []
    if "weights" in options:
        options.weights = options.weights or WEIGHTS / comparison.name
    if options.run is scores.evaluate:
        scores.check_options(parser, options)
    if options.run is not figures:
        shared.complete(parser, options, comparison.kind, sys.modules[__name__])
    if getattr(options, "memory_only", False) and options.device != "cuda":
        parser.error("argument --memory-only: only the memory of a GPU is measured; leave it out")


def train(options: Namespace, argv: Sequence[str]) -> int:
    """Trains what is not in the result file yet; exit code 1 if a run failed."""
    comparison: Comparison = options.comparison
    deadline = time.monotonic() + options.time_limit
    seeds = options.seeds or list(comparison.seeds)
    jobs = plan(options, seeds)
    results = ResultFile(options.out, comparison.kind, grows=True)
    settings = {"seeds": seeds, "extra": list(options.extra)}
    results.begin(describe(argv, options, libraries=steps.LIBRARIES, **settings))
    with exits_when_terminated(), shared.working_folder(options.work) as work:
        kept = partial(keep, comparison=comparison, target=options.weights)
        trainer = Trainer(comparison, results, options.jobs, deadline, work, kept)
        trainer.resume = options.work is not None
        unfinished = trainer.run(jobs)
    for job in unfinished:
        tell(f"not finished: {job}")
    there = sum(map(trainer.has, jobs))
    again = "" if there == len(jobs) else "; repeat the command for the others"
    print(f"{there} of {len(jobs)} runs are in {options.out}{again}")
    return 1 if trainer.failed else 0


def keep(job: Job, folder: Path, *, comparison: Comparison, target: Path) -> dict[str, Any]:
    """Details of a run that is done: its weights, which are put aside, and its scores by image."""
    if not (comparison.weights or comparison.paired):
        return {}
    found = scores.keep_weights(job, folder, target=target)
    if not comparison.paired:
        return found
    try:
        return found | {"groups": json.loads((folder / GROUPS).read_text())}
    except (OSError, ValueError) as error:
        raise RunFailedError(str(error)) from error


def plan(options: Namespace, seeds: Sequence[int]) -> list[Job]:
    """Every run that was asked for, one seed after the other."""
    data = Path(options.data).resolve().name if options.data else None
    jobs = []
    for seed in seeds:
        for name, recipe in options.recipes.items():
            epochs = options.epochs or recipe.settings["trainer"]["max_epochs"]
            case: dict[str, Any] = {"recipe": name, "seed": seed, "epochs": epochs}
            case |= {"fingerprint": fingerprint(recipe, data=data, extra=options.extra)}
            more = ["--config", str(recipe.path), "--variant", name, "--seed_everything", str(seed)]
            more += [*options.comparison.options, *options.data_options, *options.extra]
            more += ["--trainer.max_epochs", str(epochs)]
            more += PAIRED if options.comparison.paired else []
            if options.comparison.start:  # a backbone of another one, same attention and seed
                path = WEIGHTS / options.comparison.start / f"{name}-s{seed}.safetensors"
                more += ["--model.backbone_weights", str(path)]
            jobs.append(Job(case | {"data": data}, more))
    return jobs


def figures(options: Namespace, argv: Sequence[str]) -> int:
    """Draws the pictures of a result file."""
    from benchmarks.training.figures import draw  # needs matplotlib

    comparison: Comparison = options.comparison
    result = read(comparison.find_result(options.results), comparison.kind)
    for path in draw(comparison, result, options.out):
        print(f"written: {path}")
    return 0


ACTIONS = {
    "train": train,
    "measure": steps.measure_all,
    "evaluate": scores.evaluate,
    "figures": figures,
}
