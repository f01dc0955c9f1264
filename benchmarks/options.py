# SPDX-License-Identifier: Apache-2.0
"""Options that the benchmark commands share, and the types of their values."""

import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.result import device_name, path_of


class OneLineParser(ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"formatter_class": RawDescriptionHelpFormatter} | options))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def available() -> str:
    """The device that is measured by default."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_machine(parser: ArgumentParser, seconds: float) -> None:
    """The device and how long is measured."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default=available())
    help_ = "time for the repeats of a row"
    parser.add_argument("--seconds-per-row", type=positive, default=seconds, help=help_)
    add_threads(parser)


def add_threads(parser: ArgumentParser) -> None:
    default = torch.get_num_threads()
    parser.add_argument("--threads", type=at_least_one, default=default, help="CPU threads")


def add_out(parser: ArgumentParser, kind: str) -> None:
    parser.add_argument("--out", type=Path, help=f"default: benchmarks/results/{kind}--DEVICE.json")


def check_place(parser: ArgumentParser, options: Namespace, kind: str) -> None:
    """Ends the program where there is no such device; fills in where results go."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device here; use --device cpu")
    if options.device == "cpu" and any("graph" in mode for mode in getattr(options, "modes", ())):
        parser.error("argument --modes: graph means CUDA graphs and needs --device cuda")
    options.out = options.out or path_of(kind, device_name(options.device))
    if options.out.is_dir():
        parser.error(f"argument --out: {options.out} is a directory")


def list_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Names separated by commas."""

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise ArgumentTypeError(f"unknown {unknown[0]!r}; known: {', '.join(known)}")
        return names

    return parse


def sizes(text: str) -> list[list[int]]:
    """[width, height] of every image of a list."""
    found = [part.split("x") for part in text.split(",")]
    if any(len(p) != 2 or not all(s.isdecimal() and int(s) for s in p) for p in found):
        raise ArgumentTypeError(f"must be like 640x480,1024x1024, got {text!r}")
    return [[int(side) for side in part] for part in found]


def named_weights(text: str) -> tuple[str, Path]:
    """A file of weights and what to call it, from [NAME=]FILE."""
    name, _, file = ("", "", text) if Path(text).is_file() else text.partition("=")
    if not Path(file).is_file():
        raise ArgumentTypeError(f"there is no file {file or text!r}")
    return name or Path(file).stem, Path(file)


def positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return value


@contextmanager
def working_folder(path: str | None) -> Iterator[Path]:
    """The folder asked for, or one that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as name:
        folder = Path(path or name)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
