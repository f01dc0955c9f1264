# SPDX-License-Identifier: Apache-2.0
"""Options of the commands, as options.yaml declares them, and the types of their values."""

import importlib
import shlex
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import yaml

from benchmarks.result import RESULTS, ROOT, device_name, path_of


class OneLineParser(ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"formatter_class": RawDescriptionHelpFormatter} | options))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


# Type, default and help of every option, by kind and name
OPTIONS: dict[str, dict[str, list[Any]]] = yaml.safe_load(
    (ROOT / "benchmarks" / "options.yaml").read_text()
)


def add_options(parser: ArgumentParser, kind: str, suite: ModuleType) -> None:
    """Gives a parser the options of a kind."""
    for name, (what, *more) in OPTIONS[kind].items():
        default, help_ = [*more, None, None][:2]
        if what == "flag":
            parser.add_argument(f"--{name}", action="store_true", help=help_)
            continue
        parse, known = type_of(what, suite)
        if known and len(known) < 10:
            help_ = f"{help_ + '; ' if help_ else ''}of {', '.join(map(str, known))}"
        more = {"action": "append", "metavar": "[NAME=]FILE"} if what == "weights" else {}
        if isinstance(default, str) and default.startswith("="):
            default = named(default[1:], suite)
        elif default == "all" and known:
            default = known
        default = None if isinstance(default, dict) else default
        default = str(default) if what == "folder" and default else default  # is checked, too
        default = list(default) if isinstance(default, list | tuple) else default
        parser.add_argument(f"--{name}", type=parse, default=default, help=help_, **more)


def type_of(what: str, suite: ModuleType) -> tuple[Callable[[str], Any], Sequence[Any]]:
    """The function that reads a value, and the values that are known, if not all are."""
    if what in TYPES:
        return TYPES[what], ()
    many, _, name = what.rpartition(" ")
    found = named(name, suite) or name.split("|")
    if callable(found) and not many:
        return found, ()
    known = list(found() if callable(found) else found)
    return (list_of if many else one_of)(known), known


def named(name: str, suite: ModuleType) -> Any:
    """What [MODULE:]NAME holds, of the suite or of another module; None if there is no such."""
    module, _, name = name.rpartition(":")
    return getattr(importlib.import_module(module) if module else suite, name, None)


def complete(parser: ArgumentParser, options: Namespace, kind: str, suite: ModuleType) -> None:
    """Fills in what depends on the machine; ends the program where there is no such device."""
    counted = "threads" not in options
    options.device = getattr(options, "device", "cpu")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.threads = 1 if counted else options.threads or torch.get_num_threads()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device here; use --device cpu")
    for name, (what, *more) in OPTIONS.get(kind, {}).items():
        key = name.replace("-", "_")
        if more and isinstance(more[0], dict) and getattr(options, key) is None:
            setattr(options, key, type_of(what, suite)[0](more[0][options.device]))
    if options.device == "cpu" and any("graph" in mode for mode in getattr(options, "modes", ())):
        parser.error("argument --modes: graph means CUDA graphs and needs --device cuda")
    place = RESULTS / f"{kind}.json" if counted else path_of(kind, device_name(options.device))
    options.out = getattr(options, "out", None) or place
    if options.out.is_dir():
        parser.error(f"argument --out: {options.out} is a directory")


# ---- types


def list_of(known: Sequence[Any]) -> Callable[[str], list[Any]]:
    """Names separated by commas."""
    one = one_of(known)
    return lambda text: list(dict.fromkeys(one(name) for name in text.split(",")))


def one_of(known: Sequence[Any]) -> Callable[[str], Any]:
    """A name, or a number that is written like it."""
    names = {str(value): value for value in known}

    def parse(text: str) -> Any:
        if text not in names:
            raise ArgumentTypeError(f"unknown {text!r}; known: {', '.join(names)}")
        return names[text]

    return parse


def sizes(text: str) -> list[list[int]]:
    """[width, height] of every image of a list."""
    found = [part.split("x") for part in text.split(",")]
    if any(len(p) != 2 or not all(s.isdecimal() and int(s) for s in p) for p in found):
        raise ArgumentTypeError(f"must be like 640x480,1024x1024, got {text!r}")
    return [[int(side) for side in part] for part in found]


def size(text: str) -> list[int]:
    height, _, width = text.partition("x")
    found = [int(side) if side.isdecimal() else 0 for side in (height, width)]
    if min(found) < 8:
        raise ArgumentTypeError(f"must be HEIGHTxWIDTH, at least 8x8, got {text!r}")
    return found


def named_weights(text: str) -> tuple[str, Path]:
    """A file of weights and what to call it, from [NAME=]FILE."""
    name, _, file = ("", "", text) if Path(text).is_file() else text.partition("=")
    if not Path(file).is_file():
        raise ArgumentTypeError(f"there is no file {file or text!r}")
    return name or Path(file).stem, Path(file)


def existing_folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def numbers(text: str, kind: type = int) -> list[Any]:
    try:
        return list(dict.fromkeys(kind(number) for number in text.split(",")))
    except ValueError:
        raise ArgumentTypeError(f"must be numbers with commas, got {text!r}") from None


TYPES: dict[str, Callable[[str], Any]] = {
    "int": at_least_one, "float": positive, "number": float, "str": str, "path": Path,
    "folder": existing_folder,
    "size": size, "sizes": sizes, "weights": named_weights, "numbers": numbers,
    "floats": partial(numbers, kind=float), "words": shlex.split,
}  # fmt: skip


@contextmanager
def working_folder(path: str | None) -> Iterator[Path]:
    """The folder asked for, or one that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as name:
        folder = Path(path or name)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
