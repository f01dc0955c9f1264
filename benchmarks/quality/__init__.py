# SPDX-License-Identifier: Apache-2.0
"""Suites of scores on real data, on a CPU: `python -m benchmarks quality SUITE`.

A suite is a module of this package with the name of its kind: methods x sets. It has `METHODS`,
functions that make methods from options, by name; `DATA`, `BASELINE`, `LIBRARIES`,
`add_options(parser)` and `folders(options)`, which must be there;
`sets(options, work) -> [(case, samples)]`; and `measure(method, samples, folder) -> (values,
details)`, which writes what a method finds to a folder and scores it from there.
"""

import importlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.measure import use_threads
from benchmarks.options import (
    add_out,
    add_threads,
    at_least_one,
    check_place,
    list_of,
    named_weights,
    working_folder,
)
from benchmarks.result import ResultFile, describe, slug
from benchmarks.tables import views
from quadtree_attention.files import file_sha256
from quadtree_attention.tasks.contract import Scores, Source, get_task
from quadtree_attention.tasks.evaluation import score
from quadtree_attention.tasks.store import Store

DEFAULT = "quadtree"  # the weights of the package


@dataclass(frozen=True)
class Method:
    """Something that finds a result from images and their truth, and its settings."""

    name: str
    find: Callable[..., Any]
    settings: dict[str, Any]


def set_up(parser: ArgumentParser, name: str) -> None:
    """Gives the parser of a suite its options, and what to do with them."""
    suite = importlib.import_module(f"benchmarks.quality.{name}")
    parser.description = suite.__doc__
    add = parser.add_argument
    known = list(suite.METHODS)
    add("--data", type=Path, default=suite.DATA, help="folder of the data; default: %(default)s")
    add("--methods", type=list_of(known), default=known, help="separated by commas")
    add(
        "--weights",
        action="append",
        type=named_weights,
        metavar="[NAME=]FILE",
        help="weights of a network, as often as wanted; default: those of the package",
    )
    add("--size", type=at_least_one, help="longer side that networks see; default: theirs")
    add("--work", help="folder that keeps what methods find; default: a temporary one")  # fmt: skip
    suite.add_options(parser)
    add_threads(parser)
    add_out(parser, f"quality/{name}")

    def check(options: Namespace) -> None:
        names = [name for name, _ in options.weights or []]
        if len(set(names)) < len(names) or suite.BASELINE in names:
            told = f"{', '.join(names)}, and {suite.BASELINE}"
            parser.error(f"argument --weights: names must differ, got {told}")
        for folder in suite.folders(options):
            if not folder.is_dir():
                parser.error(f"argument --data: there is no folder {folder}")
        check_place(parser, options, f"quality/{name}")

    parser.set_defaults(
        run=lambda options, argv: run(suite, options, argv), check_options=check, device="cpu"
    )


def run(suite: ModuleType, options: Namespace, argv: Sequence[str]) -> int:
    """Runs every method on every set, and writes what there is after each."""
    import cv2

    use_threads(options.threads)
    cv2.setNumThreads(options.threads)
    kind = suite.__name__.removeprefix("benchmarks.").replace(".", "/")
    methods = [method for name in options.methods for method in suite.METHODS[name](options)]
    file = ResultFile(options.out, kind)
    about = {method.name: method.settings for method in methods}
    file.begin(describe(argv, options, libraries=suite.LIBRARIES, methods=about))
    with working_folder(options.work) as work:
        sets = suite.sets(options, work)
        for i, (case, samples) in enumerate(sets, start=1):
            for k, method in enumerate(methods, start=1):
                folder = work.joinpath(*case.values(), slug(method.name))
                folder.mkdir(parents=True, exist_ok=True)
                values, details = suite.measure(method, samples, folder)
                row = {"case": {**case, "method": method.name}, "values": values}
                file.add(row | {"details": details}, complete=(i, k) == (len(sets), len(methods)))
                told = ", ".join([*case.values(), method.name])
                print(f"{told}: done", file=sys.stderr, flush=True)
    print(views.text(file.read()))
    print(f"written: {options.out}")
    return 0


def find_and_score(
    task: str, method: Method, source: Source[Any], folder: Path
) -> tuple[Scores, list[float]]:
    """Scores of a method on all samples, from the files it has written, and its seconds."""
    seconds = []
    for index in range(len(source)):
        found = method.find(*source.images(index), source.truth(index))
        path = folder / f"{source.name(index)}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
        seconds.append(found.seconds)
    chosen = get_task(task)
    return score(chosen, source, Store.open(folder, chosen, source)), seconds


def networks(options: Namespace, kind: Any, **own: Any) -> list[Method]:
    """A method for all weights that were asked for: predictors of a class with options of it."""
    made = []
    for name, path in options.weights or [(DEFAULT, None)]:
        network = kind.from_pretrained(path, device="cpu", size=options.size, **own)
        settings = {"model": network.card["model"], "longer_side": network.preprocess.size}
        settings |= own | {"weights_sha256": file_sha256(network.path)}
        made.append(Method(name, partial(without_truth, network), settings))
    return made


def without_truth(network: Callable[..., Any], *sample: Any) -> Any:
    """What a network finds in the images of a sample, whose truth comes last."""
    return network(*sample[:-1])
