# SPDX-License-Identifier: Apache-2.0
"""Commands and their options; what a command does is imported when it runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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

CONVERT_HELP = """Turn an official backbone checkpoint into weights for this package.

Reads classification, detection and segmentation checkpoints, also whole detectors and segmenters,
of which it takes the backbone. Code in the file is never run, and every tensor of the backbone is
accounted for. Writes OUT.safetensors, and beside it OUT.json, which says what it is.

\b
Examples:
  quadtree convert quadtree_b2.pth -o b2.safetensors
  quadtree convert retinanet.pth -o b1_det.safetensors --json
  quadtree convert mine.pth -o mine.safetensors --model quadtree_b_b2 --act gelu --topk 16
  quadtree convert quadtree_b2.pth -o b2_features.safetensors --num-classes 0 --force
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


@app.command(help=CONVERT_HELP)
def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="Official .pth, .pt or .safetensors file."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Weights to write, a .safetensors file.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Name of the model, checked.", show_default="by its tensors"),
    ] = None,
    act: Annotated[
        str | None,
        typer.Option(
            help="Activation of the value branches, gelu or relu.",
            show_default="gelu with a classifier, else relu",
        ),
    ] = None,
    topk: Annotated[
        int | None,
        typer.Option(help="Cells kept per query.", show_default="8 with a classifier, else 32"),
    ] = None,
    num_classes: Annotated[
        str, typer.Option(help="auto, or 0 to leave out the classifier.")
    ] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the card as JSON.")] = False,
) -> None:
    with mistakes_on_one_line():
        from quadtree_attention.cli.convert import Request, run

        run(
            Request(
                checkpoint=checkpoint,
                output=output,
                model=model,
                act=act,
                topk=topk,
                num_classes=num_classes,
                force=force,
            ),
            as_json=json,
        )
