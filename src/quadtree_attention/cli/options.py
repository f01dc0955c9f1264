# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have; each is declared once and means the same everywhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

Option = tuple[Any, Any]  # the annotation of a parameter, its default
FILE, INT, FLOAT, TEXT = Path | None, int | None, float | None, str | None


def option(kind: Any, text: str, default: Any = None, *flags: str, **settings: Any) -> Option:
    """An option, by default called as its parameter."""
    if default is None:
        settings = {"show_default": False, **settings}
    return Annotated[kind, typer.Option(*flags, help=text, **settings)], default


def flag(name: str, text: str) -> Option:
    """An option without a value."""
    return Annotated[bool, typer.Option(f"--{name}", help=text)], False


def argument(kind: Any, name: str, text: str, default: Any = None) -> Option:
    """An argument; one whose default is ... must be given."""
    shown = typer.Argument(metavar=name, help=text, show_default=False)
    return Annotated[kind, shown], default


OPTIONS: dict[str, Option] = {  # by the name of the parameter
    "images": argument(list[str], "IMAGE", "Files, folders, or -.", ...),
    "weights": option(
        FILE, "Weights, .safetensors.", metavar="FILE", show_default="those of the package, if any"
    ),
    "out": option(FILE, "Picture to draw, .png or .jpg; a folder for several.", metavar="PATH"),
    "save": option(FILE, "Results to write; a folder or file for several.", metavar="PATH"),
    "size": option(
        INT,
        "Pixels of the longer side that the network sees.",
        metavar="N",
        show_default="as trained",
    ),
    "shorter_side": option(
        INT, "Pixels of the shorter side.", metavar="N", show_default="as trained"
    ),
    "threshold": option(
        FLOAT, "Least score, 0 to 1.", metavar="X", show_default="that of the weights"
    ),
    "window": option(INT, "Slide a window of N pixels.", metavar="N", show_default="whole images"),
    "stride": option(INT, "From a window to the next.", metavar="N", show_default="2/3 of it"),
    "max_disparity": option(
        FLOAT, "Largest disparity in pixels.", metavar="X", show_default="that of the weights"
    ),
    "device": option(str, "cpu, cuda, or auto: a GPU if there is one.", "auto"),
    "dtype": option(str, "float32; bfloat16 or float16: mixed precision.", "float32"),
    "batch": option(
        INT, "Items that go through the network together.", metavar="N", show_default="by task"
    ),
    "workers": option(int, "Processes that read images; 0: this one.", 0),
    "data": option(FILE, "Folder of the data set.", metavar="ROOT"),
    "split": option(str, "Split of the data set.", "val"),
    "predictions": option(FILE, "Score these results, without a network.", metavar="PATH"),
    "report": option(FILE, "Scores to write, JSON.", metavar="FILE"),
    "strict": flag("strict", "Fail at the first item that cannot be used."),
    "force": flag("force", "Compute again; results of other settings are removed."),
    "json": flag("json", "Print JSON."),
    "debug": flag("debug", "Show the traceback of an error."),
}
WEIGHTS = argument(FILE, "[WEIGHTS]", "Weights, .safetensors.")  # of `evaluate`

RENAMED = {  # options of earlier versions; with the command where they still exist elsewhere
    "--save-dir": "--save",
    "--scores": "--report",
    "--score": "--threshold",
    "--output": "--save",
    "-o": "--save",
    "--batch-size": "--batch",
    "evaluate --out": "--save",
    "evaluate --pairs": "--data",
}
