# SPDX-License-Identifier: Apache-2.0
"""Suites of scores on real data, on a CPU: `python -m benchmarks quality SUITE`.

Methods x sets: what a method finds is written to a folder, and scored from there.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.result import slug
from benchmarks.suite import Work
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


def check_methods(parser: ArgumentParser, options: Namespace, baseline: str) -> None:
    names = [name for name, _ in options.weights or []]
    if len(set(names)) < len(names) or baseline in names:
        told = f"{', '.join(names)}, and {baseline}"
        parser.error(f"argument --weights: names must differ, got {told}")


def check_folders(parser: ArgumentParser, folders: Iterable[Path]) -> None:
    for folder in folders:
        if not folder.is_dir():
            parser.error(f"argument --data: there is no folder {folder}")


def works(
    options: Namespace, known: Mapping[str, Any], sets: Iterable[tuple[dict[str, str], Source[Any]]]
) -> list[list[Work]]:
    """Every method on every set; the settings of methods become those of the result."""
    methods = [method for name in options.methods for method in known[name](options)]
    options.methods = {method.name: method.settings for method in methods}
    return [
        [Work({**case, "method": method.name}, "cpu", {"method": method, "samples": samples})]
        for case, samples in sets
        for method in methods
    ]


def find_and_score(
    task: str, method: Method, source: Source[Any], folder: Path
) -> tuple[Scores, list[float]]:
    """Scores of a method on all samples, from the files it writes to a folder, and its seconds."""
    seconds, folder = [], folder / slug(method.name)
    for index in range(len(source)):
        found = method.find(*source.images(index), source.truth(index))
        path = folder / f"{source.name(index)}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
        seconds.append(found.seconds)
    chosen = get_task(task)
    return score(chosen, source, Store.open(folder, chosen, source)), seconds


def networks(options: Namespace, kind: Any, suffix: str = "", **own: Any) -> list[Method]:
    """A method for all weights that were asked for: predictors of a class with options of it."""
    made = []
    for name, path in options.weights or [(DEFAULT, None)]:
        network = kind.from_pretrained(path, device="cpu", size=options.size, **own)
        settings = {"model": network.card["model"], "longer_side": network.preprocess.size}
        settings |= own | {"weights_sha256": file_sha256(network.path)}
        made.append(Method(name + suffix, partial(without_truth, network), settings))
    return made


def without_truth(network: Callable[..., Any], *sample: Any) -> Any:
    """What a network finds in the images of a sample, whose truth comes last."""
    return network(*sample[:-1])
