# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have; each is declared once and means the same everywhere."""

from pathlib import Path
from typing import Annotated, Any

import typer


def _option(kind: Any, text: str, default: Any = None, **settings: Any) -> tuple[Any, Any]:
    if default is None:
        settings = {"show_default": False, **settings}
    return Annotated[kind, typer.Option(help=text, **settings)], default


def _flag(name: str, text: str) -> tuple[Any, Any]:
    return Annotated[bool, typer.Option(f"--{name}", help=text)], False


_FILE, _INT, _FLOAT = Path | None, int | None, float | None
_IMAGES = typer.Argument(metavar="IMAGE", help="Files, folders, or -.")
_WEIGHTS = typer.Argument(metavar="[WEIGHTS]", help="Weights, .safetensors.", show_default=False)

OPTIONS: dict[str, tuple[Any, Any]] = {  # by name: the annotation of the parameter, its default
    "images": (Annotated[list[str], _IMAGES], ...),
    "weights": _option(
        _FILE, "Weights, .safetensors.", metavar="FILE", show_default="those of the package, if any"
    ),
    "out": _option(_FILE, "Picture to draw, .png or .jpg; a folder for several.", metavar="PATH"),
    "save": _option(_FILE, "Results to write; a folder or file for several.", metavar="PATH"),
    "size": _option(
        _INT,
        "Pixels of the longer side that the network sees.",
        metavar="N",
        show_default="as trained",
    ),
    "shorter_side": _option(
        _INT, "Pixels of the shorter side.", metavar="N", show_default="as trained"
    ),
    "threshold": _option(
        _FLOAT, "Least score, 0 to 1.", metavar="X", show_default="that of the weights"
    ),
    "window": _option(
        _INT, "Slide a window of N pixels.", metavar="N", show_default="whole images"
    ),
    "stride": _option(_INT, "From a window to the next.", metavar="N", show_default="2/3 of it"),
    "max_disparity": _option(
        _FLOAT, "Largest disparity in pixels.", metavar="X", show_default="that of the weights"
    ),
    "device": _option(str, "cpu, cuda, or auto: a GPU if there is one.", "auto"),
    "dtype": _option(str, "float32; bfloat16 or float16: mixed precision.", "float32"),
    "batch": _option(
        _INT, "Items that go through the network together.", metavar="N", show_default="by task"
    ),
    "workers": _option(int, "Processes that read images; 0: this one.", 0),
    "data": _option(_FILE, "Folder of the data set.", metavar="ROOT"),
    "split": _option(str, "Split of the data set.", "val"),
    "predictions": _option(_FILE, "Score these results, without a network.", metavar="PATH"),
    "report": _option(_FILE, "Scores to write, JSON.", metavar="FILE"),
    "strict": _flag("strict", "Fail at the first item that cannot be used."),
    "force": _flag("force", "Compute again; results of other settings are removed."),
    "json": _flag("json", "Print JSON."),
    "debug": _flag("debug", "Show the traceback of an error."),
}
WEIGHTS_ARGUMENT = (Annotated[_FILE, _WEIGHTS], None)  # of `evaluate`

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
