# SPDX-License-Identifier: Apache-2.0
"""`quadtree train`: trains from recipes."""

import typer

from quadtree_attention.cli.options import argument
from quadtree_attention.cli.output import command, imported
from quadtree_attention.tasks.contract import NAMES

HELP = """Train a model from a recipe file.

TASK is classify, match, stereo, detect or segment. Options on the command line override the recipe:
quadtree train TASK --help lists them. --variant applies one or several variants of the recipe.
After Ctrl-C or a kill, at most --save_every steps are lost; continue with --resume. Writes
last.ckpt, best.ckpt, best.safetensors, history.csv and curves.png to --run_dir.

\b
Examples:
  quadtree train classify --config recipes/classify/debug.yaml
  quadtree train classify --config recipes/classify/imagenet.yaml --variant b2 --data.root imagenet
  quadtree train classify --config recipes/classify/imagenet.yaml --variant b2 --resume
  quadtree train classify --config my.yaml --trainer.devices 8 --trainer.num_nodes 2
"""


def register(app: typer.Typer) -> None:
    command(
        app,
        "train",
        train,
        HELP,
        own={"task": argument(str, "TASK", f"{', '.join(NAMES)}.", "")},
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,  # help is handled by the parser of the task
    )


def train(context: typer.Context) -> None:
    task = context.params["task"]
    if not task or task in ("--help", "-h"):
        print(context.get_help())
        raise typer.Exit(0 if task else 2)
    from quadtree_attention.tasks.training.run import run_command

    imported()
    run_command(task, context.args)
