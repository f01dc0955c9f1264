# SPDX-License-Identifier: Apache-2.0
"""Attentions compared by training in one network: detectors, segmenters and stereo.

`train NAME`: several runs at once; repeat the command until all are there.
`measure NAME`: speed and memory of training steps, one recipe after the other.
`figures NAME`: the picture of docs/results/NAME.md, whose table `benchmarks.tables` makes.
"""

import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from torch import nn

from benchmarks.attention_program import (
    add_runs,
    add_steps,
    available,
    check_recipes,
    describe,
    draw_result,
    measure_recipes,
    measure_step,
    plan,
    train_missing,
)
from benchmarks.attention_results import Result, speed
from benchmarks.attention_runs import Recipe
from benchmarks.comparison_tables import COMPARISONS, Comparison, runs_by_recipe
from benchmarks.measure import Call, use_threads
from benchmarks.program import OneLineParser
from benchmarks.tables import ROOT, number

PROGRAM = "python -m benchmarks.comparisons"
PICTURES = ROOT / "docs" / "results"
COLOURS = ("#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#999999", "#0072B2", "#F0E442")
PRECISIONS = {"32-true": False, "bf16-mixed": True}  # whether forward is in bfloat16
OURS_COLOUR = "#D00000"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the options ask for."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    return options.run(argv, options)


def parse(argv: Sequence[str]) -> Namespace:
    """The checked options; a bad one ends the program with one line and exit code 2."""
    parser = OneLineParser(prog=PROGRAM, description=__doc__)
    commands = parser.add_subparsers(
        required=True, metavar="train|measure|figures", parser_class=OneLineParser
    )
    _add_train(commands)
    _add_measure(commands)
    _add_figures(commands)
    options = parser.parse_args(argv)
    options.comparison = COMPARISONS[options.name]
    if "recipes" in options:
        comparison = options.comparison
        options.folder = options.folder or ROOT / "recipes" / comparison.task
        check_recipes(parser, options, comparison.suite, comparison.name)
    return options


def _add_train(commands: Any) -> None:
    parser = commands.add_parser("train", help="scores with every attention")
    _add_recipes(parser)
    add_runs(parser, seeds="0,1")
    parser.set_defaults(run=train, device=available(), threads=1)


def _add_measure(commands: Any) -> None:
    parser = commands.add_parser("measure", help="speed and memory with every attention")
    _add_recipes(parser)
    add_steps(parser)
    parser.set_defaults(run=measure_all)


def _add_recipes(parser: OneLineParser) -> None:
    add = parser.add_argument
    add("name", choices=COMPARISONS, metavar="NAME", help=f"of {', '.join(COMPARISONS)}")
    add("--recipes", help="names without their common part, separated by commas; default: all")
    add("--folder", type=Path, help="folder of the recipes")
    add("--out", type=Path, help="default: benchmarks/results/NAME--<device name>.json")
    add("--data", help="folder of the data (of textures, for stereo); default: as in the recipe")


def _add_figures(commands: Any) -> None:
    parser = commands.add_parser("figures", help="the picture from a result file")
    add = parser.add_argument
    add("name", choices=COMPARISONS, metavar="NAME", help=f"of {', '.join(COMPARISONS)}")
    add("--results", type=Path, help="default: the only file there is")
    add("--out", type=Path, default=PICTURES, help="folder to draw into")
    parser.set_defaults(run=draw)


def train(argv: Sequence[str], options: Namespace) -> int:
    """Trains what is not in the result file yet; exit code 1 if a run failed."""
    jobs = plan(options, options.data, _data_options(options))
    about = describe(PROGRAM, argv, options)
    suite = options.comparison.suite
    return train_missing(jobs, options, suite, about, resume=options.work is not None)


def _data_options(options: Namespace) -> list[str]:
    option = "--data.textures" if options.comparison.task == "stereo" else "--data.root"
    return [option, options.data] if options.data else []


def measure_all(argv: Sequence[str], options: Namespace) -> int:
    """Measures every recipe, one after the other, and records what was found."""
    use_threads(options.threads)
    content = options.recipes[0].content  # all are alike but for the attention
    about = describe(PROGRAM, argv, options) | {
        "batch": content["data"]["batch_size"],
        "precision": _precision(options.recipes[0]),
    }
    tell = partial(one_line, batch=about["batch"])
    return measure_recipes(options, options.comparison.suite, about, measure_recipe, tell)


def measure_recipe(recipe: Recipe, options: Namespace) -> dict[str, Any]:
    """One row; one that fails says so instead."""
    return measure_step(recipe, lambda: training_step(recipe, options), options)


def training_step(recipe: Recipe, options: Namespace) -> tuple[Call, int]:
    """Forward, losses, backward, clipping and a step of AdamW; and the number of parameters.

    All on one batch, which is the same for every recipe, and lies on the device already.
    """
    from quadtree_attention.tasks.training.run import prepare

    device = torch.device(options.device)
    settings = ["--trainer.accelerator", "cpu", *_data_options(options)]
    run = prepare(options.comparison.task, [*recipe.options, *settings])
    data, module = run.datamodule, run.model.to(device).train()
    data.setup("fit")
    batch = data.transfer_batch_to_device(next(iter(data.train_dataloader())), device, 0)
    batch = data.on_after_batch_transfer(batch, 0)
    optimizer = create_optimizer_v2(module.model, opt="adamw", lr=1e-5, weight_decay=0.05)
    half = PRECISIONS[_precision(recipe)]
    clip = recipe.content["trainer"].get("gradient_clip_val") or float("inf")
    warnings.filterwarnings("ignore", message=".*self.log")  # nobody listens here

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = module.training_step(batch, batch_idx=1)  # 0 would look at the loss and wait
        loss.backward()
        nn.utils.clip_grad_norm_(module.model.parameters(), clip)
        optimizer.step()

    return step, sum(parameter.numel() for parameter in module.model.parameters())


def _precision(recipe: Recipe) -> str:
    return recipe.content["trainer"].get("precision", "32-true")


def one_line(row: dict[str, Any], batch: int) -> str:
    """A row in one line."""
    if "error" in row:
        return f"{row['recipe']}: failed: {row['error']}"
    return f"{row['recipe']}: {speed(row, batch)} samples/s, {number(row['peak_mib'])} MiB"


def draw(argv: Sequence[str], options: Namespace) -> int:
    """Draws the picture of a result file."""
    comparison: Comparison = options.comparison

    def draw_all(result: Result, folder: Path) -> list[Path]:
        from benchmarks.attention_figures import curves, save  # needs matplotlib

        runs = {name: mine for name, mine in runs_by_recipe(comparison, result).items() if mine}
        figure = curves(
            runs,
            panels={comparison.losses[0]: "training loss", **_first(comparison)},
            styles=_styles(list(runs)),
            label=comparison.label,
        )
        return save({f"{comparison.name}.png": figure}, folder)

    return draw_result(PROGRAM, options, comparison.suite, comparison.name, draw_all)


def _first(comparison: Comparison) -> dict[str, str]:
    return {comparison.score: f"validation {comparison.scores[comparison.score]}"}


def _styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Ours in red; a dashed line for forms of the same attention."""
    ours = [name for name in names if name.startswith("quadtree-b")]
    others = [name for name in names if name not in ours]
    families = list(dict.fromkeys(name.removesuffix("-lepe") for name in others))
    dashes = ("-", "--", ":", "-.")
    styles = {name: (OURS_COLOUR, dashes[i % 4]) for i, name in enumerate(reversed(ours))}
    for name in others:
        colour = COLOURS[families.index(name.removesuffix("-lepe")) % len(COLOURS)]
        styles[name] = (colour, "--" if name.endswith("-lepe") else "-")
    return styles


if __name__ == "__main__":
    sys.exit(main())
