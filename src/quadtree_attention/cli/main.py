# SPDX-License-Identifier: Apache-2.0
"""Commands and their options; what a command does is imported when it runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from quadtree_attention.errors import QuadtreeAttentionError

# \b keeps the lines of the paragraph that follows as they are
INFO_HELP = """Show versions, devices, and which backends can run a call, and why others cannot.

The options describe the call; without them it is one of a feature matcher on 640 x 480 images. With
--plan also its FLOPs, bytes and memory, level by level and next to dense attention, and which of
the two to use. Nothing is run, and the device need not be present.

\b
Examples:
  quadtree info
  quadtree info --plan --grid 200x336 --heads 1 --levels 4 --topk 32
  quadtree info --grid 60x80 --key-grid 45x100 --topk 32,16 --device cuda
  quadtree info --plan --json --grid 4096 --levels 6 --topk 8 --variant A
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text reads the same in a terminal, in a pipe and in a log
    pretty_exceptions_enable=False,
)


@app.callback()
def _quadtree() -> None:
    """QuadTree attention: what can run here, and what a call costs."""


@contextmanager
def mistakes_on_one_line() -> Iterator[None]:
    """Ends the command with the message alone where the user can put something right."""
    try:
        yield
    except QuadtreeAttentionError as error:
        print("quadtree:", " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(2) from None


@app.command(help=INFO_HELP)
def info(
    grid: Annotated[str, typer.Option(help="Query map: 200x336, 4096 or 8x24x40.")] = "60x80",
    key_grid: Annotated[str | None, typer.Option(help="Key map.", show_default="as --grid")] = None,
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
    dtype: Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16.")] = "float32",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")
    ] = None,
    batch: Annotated[int, typer.Option(help="Maps per call.")] = 1,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Also print what the call costs, next to dense attention."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from quadtree_attention.cli.info import Question, show

    with mistakes_on_one_line():
        show(
            Question(
                grid=grid,
                key_grid=key_grid,
                heads=heads,
                dim=dim,
                value_dim=value_dim,
                levels=levels,
                topk=topk,
                variant=variant,
                dtype=dtype,
                device=device,
                batch=batch,
            ),
            with_plan=plan,
            as_json=json,
        )
