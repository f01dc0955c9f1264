# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, and how all of them end where the user made a mistake."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from quadtree_attention.errors import QuadtreeAttentionError

Device = Annotated[
    str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonList = Annotated[bool, typer.Option("--json", help="Print a list as JSON.")]
JsonOfPairs = Annotated[bool, typer.Option("--json", help="Print JSON, with every pair.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where mistakes arise.")]
DetectorSize = Annotated[
    int | None,
    typer.Option(help="Pixels of the shorter side.", show_default="that of the weights"),
]
SegmenterSize = Annotated[
    int | None,
    typer.Option(help="Pixels of the shorter side.", metavar="N", show_default="as in training"),
]
Window = Annotated[
    int | None,
    typer.Option(help="Slide a window of N pixels.", metavar="N", show_default="whole images"),
]
Stride = Annotated[
    int | None,
    typer.Option(help="From a window to the next.", metavar="N", show_default="2/3 of it"),
]
Images = Annotated[list[str], typer.Argument(metavar="IMAGE", help="Files, folders, or -.")]


@contextmanager
def mistakes_on_one_line(*, debug: bool = False) -> Iterator[None]:
    """Ends the command with the message alone where the user can put something right."""
    try:
        yield
    except QuadtreeAttentionError as error:
        if debug:
            traceback.print_exc()
        print("quadtree:", " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as error:
        print("quadtree:", str(error) or "interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
