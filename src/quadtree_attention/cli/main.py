# SPDX-License-Identifier: Apache-2.0
"""All commands. Their implementation is imported when they run: `--help` imports no torch."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from quadtree_attention import __version__
from quadtree_attention.cli.options import RENAMED
from quadtree_attention.cli.output import MISTAKE, command, errors_on_one_line, tell

COMMANDS = (  # modules of this package, in the order of the help
    "info", "match", "stereo", "classify", "detect", "segment", "sfm", "evaluate", "train",
    "convert", "export", "warmup", "explore", "attention", "calibrate",
)  # fmt: skip

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text reads the same in a terminal, in a pipe and in a log
    pretty_exceptions_enable=False,
)
for name in COMMANDS:
    module = import_module(f"quadtree_attention.cli.{name}")
    if hasattr(module, "register"):  # it has commands or settings of its own
        module.register(app)
    else:
        command(app, name, module.run, module.HELP, module.OPTIONS, getattr(module, "OWN", {}))


def _show_version(asked: bool) -> None:
    if asked:
        print(f"quadtree-attention {__version__}", flush=True)
        raise typer.Exit


@app.callback()
def _quadtree(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """QuadTree attention: match, stereo, classify, detect, segment; sfm, train, evaluate."""


def run(args: Sequence[str]) -> None:
    """Run a command line; end the process."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if args and args[0] != "train":  # its options are defined by the recipe
        for word in args:
            flag = word.split("=")[0]
            new = RENAMED.get(f"{args[0]} {flag}") or RENAMED.get(flag)
            if new is not None:
                tell(f"{flag} was renamed to {new}; see quadtree {args[0]} --help")
                sys.exit(MISTAKE)
    try:
        with errors_on_one_line():  # also those of --help
            app(list(args), prog_name="quadtree")
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
