# SPDX-License-Identifier: Apache-2.0
"""Recipes: YAML files with the settings of an experiment, and named variants of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # comes with jsonargparse
from jsonargparse import get_loader

from quadtree_attention.checks import known
from quadtree_attention.errors import OptionError
from quadtree_attention.files import StrPath


@dataclass(frozen=True)
class Recipe:
    """A recipe with its variants applied.

    Attributes:
        path: The file.
        task: The task; None in a file without this key, such as `config.yaml` of a run.
        variant: The requested variants; empty: the default.
        variants: All variants that there are; the first is the default.
        settings: Input of the task's parser.
        results: Published and own scores, by variant and metric.
    """

    path: Path
    task: str | None
    variant: tuple[str, ...]
    variants: tuple[str, ...]
    settings: dict[str, Any]
    results: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of a run: names of the file and of the requested variants."""
        return "-".join([self.path.stem, *self.variant])

    def to_text(self) -> str:
        """The settings as YAML."""
        return str(yaml.safe_dump(self.settings, sort_keys=False))


def read_recipe(path: StrPath, variant: str | Sequence[str] | None = None) -> Recipe:
    """Read a recipe and merge variants into it, several in order.

    Args:
        path: The file.
        variant: Names, in a list or separated by commas; None: the first of the file.

    Raises:
        OptionError: The file cannot be read, is not a recipe, or has no such variant. For a file
            that was replaced by a variant of another file, the message names both.
    """
    path = Path(path)
    content = _load(path)
    task, results = content.pop("task", None), content.pop("results", None) or {}
    variants = content.pop("variants", None) or {}
    if not isinstance(variants, dict) or not isinstance(results, dict):
        raise OptionError(f"variants and results of {path} must be mappings; correct the file")
    variants = {str(name): change or {} for name, change in variants.items()}
    given = variant.split(",") if isinstance(variant, str) else list(variant or ())
    if given and not variants:
        raise OptionError(f"{path} has no variants, got {', '.join(given)}; leave out --variant")
    for name in given:
        known(name, variants, f"the variant of {path}")
    for name in given or list(variants)[:1]:
        content = merged(content, variants[name])
    return Recipe(path, task, tuple(given), tuple(variants), content, results)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Override the settings of `base` by those of `change`, recursively."""
    both = dict(base)
    for key, value in change.items():
        groups = isinstance(both.get(key), Mapping) and isinstance(value, Mapping)
        both[key] = merged(both[key], value) if groups else value
    return both


def _load(path: Path) -> dict[str, Any]:
    try:
        content = get_loader("yaml")(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(
            f"there is no recipe {path}; {_successor(path) or 'check the path'}"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"{path} cannot be read as a recipe: {reason}; correct it") from error
    if not isinstance(content, dict):
        raise OptionError(f"{path} is no recipe, which has settings by name; pass another file")
    return content


def _successor(path: Path) -> str | None:
    """Command for a recipe file from before recipes had variants; None if unknown."""
    words = Counter(path.stem.split("-"))
    found: list[tuple[int, Path, tuple[str, ...]]] = []
    for file in sorted(path.parent.glob("*.yaml")):
        try:
            names = read_recipe(file).variants
        except OptionError:
            continue
        for chosen in chain([()], combinations(names, 1), combinations(names, 2)):
            own = Counter("-".join([file.stem, *chosen]).split("-"))
            if own <= words:
                found.append(((words - own).total(), file, chosen))
    if not found:
        return None
    _, file, chosen = min(found)
    return f"pass --config {file}" + (f" --variant {','.join(chosen)}" if chosen else "")
