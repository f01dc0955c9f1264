# SPDX-License-Identifier: Apache-2.0
"""Checks of options with uniform error messages; None always passes."""

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quadtree_attention.errors import MissingDependencyError, OptionError


def at_least(least: float, /, **values: float | None) -> None:
    """Raises `OptionError` for a value below `least`, or NaN."""
    _check(values, lambda x: x >= least, f"at least {least:g}", "a larger one")


def count(least: int, /, **values: int | None) -> None:
    """Raises `OptionError` for what is not an integer, or below `least`."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise OptionError(f"{name} must be an integer, got {value!r}; pass {least} or more")
        at_least(least, **{name: int(value)})


def above(limit: float, /, **values: float | None) -> None:
    """Raises `OptionError` for a value that is not finite and above `limit`."""
    _check(values, lambda x: limit < x < math.inf, f"above {limit:g}", "a larger one")


def between(low: float, high: float, /, **values: float | None) -> None:
    """Raises `OptionError` for a value outside [low, high], or NaN."""
    _check(values, lambda x: low <= x <= high, f"in [{low:g}, {high:g}]", "another")


def _check(
    values: Mapping[str, Any], fits: Callable[[Any], bool], accepted: str, instead: str
) -> None:
    for name, value in values.items():
        try:
            good = value is None or fits(value)
        except TypeError:
            raise OptionError(f"{name} must be a number {accepted}, got {value!r}") from None
        if not good:
            raise OptionError(f"{name} must be {accepted}, got {value}; pass {instead}")


def one_of(choices: Iterable[Any], /, **values: Any) -> None:
    """Raises `OptionError` for a value that is not one of the choices."""
    accepted = list(choices)
    for name, value in values.items():
        if value is not None:
            known(value, accepted, name)


def known(name: Any, names: Collection[Any], what: str) -> None:
    """Raises `OptionError` for a name that is not in `names`; suggests the closest ones."""
    if name not in names:
        raise OptionError(
            f"{what} must be one of {', '.join(map(str, names))}, got {name!r}"
            + suggestion(str(name), map(str, names))
        )


def keywords(*functions: Callable[..., Any]) -> list[str]:
    """Names of the keyword-only arguments of functions."""
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    return list(dict.fromkeys(p.name for p in parameters if p.kind is p.KEYWORD_ONLY))


def suggestion(name: str, names: Iterable[str]) -> str:
    """End of a message about an unknown name: the closest known names, or advice."""
    close = difflib.get_close_matches(name, list(names), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else "; pass one of them"


def shown(value: object) -> str:
    """A value in a message; checksums by their first 12 characters."""
    is_checksum = (
        isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
    )
    return str(value)[:12] if is_checksum else str(value)


def few(names: Collection[str]) -> str:
    """The first three names, and the number of the others."""
    first = ", ".join(list(names)[:3]) or "none"
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Turns a failed import into a `MissingDependencyError` with the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{what} needs {error.name}, which is not installed; "
            f"pip install 'quadtree-attention[{extra}]'"
        ) from error
