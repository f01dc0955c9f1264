# SPDX-License-Identifier: Apache-2.0
"""Attentions compared by training in one network: detectors, segmenters and stereo.

`train NAME`: several runs at once; repeat the command until all are there.
`figures NAME`: the picture of docs/results/NAME.md, whose table `benchmarks.tables` makes.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention_program import (
    add_runs,
    available,
    check_recipes,
    describe,
    draw_result,
    plan,
    train_missing,
)
from benchmarks.attention_results import Result
from benchmarks.comparison_tables import COMPARISONS, Comparison, runs_by_recipe
from benchmarks.program import OneLineParser
from benchmarks.tables import ROOT

PROGRAM = "python -m benchmarks.comparisons"
PICTURES = ROOT / "docs" / "results"
COLOURS = ("#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#999999", "#0072B2", "#F0E442")
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
        required=True, metavar="train|figures", parser_class=OneLineParser
    )
    _add_train(commands)
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
    add = parser.add_argument
    add("name", choices=COMPARISONS, metavar="NAME", help=f"of {', '.join(COMPARISONS)}")
    add("--recipes", help="names without their common part, separated by commas; default: all")
    add("--folder", type=Path, help="folder of the recipes")
    add("--out", type=Path, help="default: benchmarks/results/NAME--<device name>.json")
    add("--data", help="folder of the data (of textures, for stereo); default: as in the recipe")
    add_runs(parser, seeds="0,1")
    parser.set_defaults(run=train, device=available(), threads=1)


def _add_figures(commands: Any) -> None:
    parser = commands.add_parser("figures", help="the picture from a result file")
    add = parser.add_argument
    add("name", choices=COMPARISONS, metavar="NAME", help=f"of {', '.join(COMPARISONS)}")
    add("--results", type=Path, help="default: the only file there is")
    add("--out", type=Path, default=PICTURES, help="folder to draw into")
    parser.set_defaults(run=draw)


def train(argv: Sequence[str], options: Namespace) -> int:
    """Trains what is not in the result file yet; exit code 1 if a run failed."""
    comparison: Comparison = options.comparison
    option = "--data.textures" if comparison.task == "stereo" else "--data.root"
    settings = [option, options.data] if options.data else []
    jobs = plan(options, options.data, settings)
    about = describe(PROGRAM, argv, options)
    return train_missing(jobs, options, comparison.suite, about, resume=options.work is not None)


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
