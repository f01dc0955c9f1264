# SPDX-License-Identifier: Apache-2.0
"""Options shared by several commands, declared once with the same meaning everywhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

Option = tuple[Any, Any]  # the annotation of a parameter, its default
FILE, INT, FLOAT, TEXT = Path | None, int | None, float | None, str | None


def option(kind: Any, text: str, default: Any = None, *flags: str, **settings: Any) -> Option:
    """An option; its default name is the name of the parameter."""
    if default is None:
        settings = {"show_default": False, **settings}
    return Annotated[kind, typer.Option(*flags, help=text, **settings)], default


def flag(name: str, text: str) -> Option:
    """An option without a value."""
    return Annotated[bool, typer.Option(f"--{name}", help=text)], False


def argument(kind: Any, name: str, text: str, default: Any = None) -> Option:
    """A positional argument; required if its default is `...`."""
    shown = typer.Argument(metavar=name, help=text, show_default=False)
    return Annotated[kind, shown], default


OPTIONS: dict[str, Option] = {  # by the name of the parameter
    "images": argument(list[str], "IMAGE", "Files, folders, or -.", ...),
    "weights": option(
        FILE,
        "Weights, .safetensors, or a name of packaged ones.",
        metavar="FILE",
        show_default="those of the package, if any",
    ),
    "out": option(FILE, "Picture to write, .png or .jpg; a folder for several.", metavar="PATH"),
    "save": option(FILE, "Results to write; a folder or file for several.", metavar="PATH"),
    "size": option(
        INT,
        "Resize the longer side to N pixels.",
        metavar="N",
        show_default="as trained",
    ),
    "shorter_side": option(
        INT, "Resize the shorter side to N pixels.", metavar="N", show_default="as trained"
    ),
    "threshold": option(
        FLOAT, "Minimum score, 0 to 1.", metavar="X", show_default="from the weights"
    ),
    "window": option(INT, "Sliding window of N pixels.", metavar="N", show_default="whole images"),
    "stride": option(INT, "Distance of windows.", metavar="N", show_default="2/3 of the window"),
    "max_disparity": option(
        FLOAT, "Largest disparity in pixels.", metavar="X", show_default="from the weights"
    ),
    "device": option(str, "cpu, cuda, or auto: a GPU if available.", "auto"),
    "dtype": option(str, "float32, or bfloat16, float16 (mixed precision).", "float32"),
    "batch": option(INT, "Batch size of the network.", metavar="N", show_default="by task"),
    "cluster": option(TEXT, "Ray cluster: HOST:PORT, auto or local.", metavar="ADDRESS"),
    "workers": option(int, "Processes that read images; 0: main process.", 0),
    "data": option(FILE, "Folder of the data set.", metavar="ROOT"),
    "split": option(str, "Split of the data set.", "val"),
    "predictions": option(FILE, "Score existing results, without a network.", metavar="PATH"),
    "report": option(FILE, "Write scores as JSON.", metavar="FILE"),
    "strict": flag("strict", "Fail at the first unusable item."),
    "force": flag("force", "Recompute; results of other settings are removed."),
    "json": flag("json", "Print JSON."),
    "debug": flag("debug", "Show the traceback of an error."),
}
WEIGHTS = argument(FILE, "[WEIGHTS]", "Weights, .safetensors.")  # of `evaluate`

RENAMED = {  # options of earlier versions; with the command if other commands still have them
    "--save-dir": "--save",
    "--scores": "--report",
    "--score": "--threshold",
    "--output": "--save",
    "-o": "--save",
    "--batch-size": "--batch",
    "evaluate --out": "--save",
    "evaluate --pairs": "--data",
}
