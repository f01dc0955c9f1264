# SPDX-License-Identifier: Apache-2.0
"""Baseline attentions with the interface of quadtree attention.

All are self-attention on maps (B, H, W, C) of any size, channels last. The base class
`MapAttention` checks the input, adds the optional position encoding (LePE) and applies the output
projection. Subclasses define which keys a query attends to.

Padding cells are never keys.
"""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from quadtree_attention.errors import OptionError
from quadtree_attention.nn.baselines.base import MapAttention
from quadtree_attention.nn.baselines.dense import FullAttention, LinearAttention, TopKAttention
from quadtree_attention.nn.baselines.reduced import (
    LinearSpatialReductionAttention,
    SpatialReductionAttention,
)
from quadtree_attention.nn.baselines.windowed import FocalAttention, WindowAttention

__all__ = [
    "BASELINES",
    "FocalAttention",
    "FullAttention",
    "LinearAttention",
    "LinearSpatialReductionAttention",
    "MapAttention",
    "SpatialReductionAttention",
    "TopKAttention",
    "WindowAttention",
    "check_attention",
    "make_attention",
    "options_of",
]

BASELINES: dict[str, type[MapAttention]] = {
    "spatial_reduction": SpatialReductionAttention,
    "linear_spatial_reduction": LinearSpatialReductionAttention,
    "window": WindowAttention,
    "focal": FocalAttention,
    "linear": LinearAttention,
    "topk": TopKAttention,
    "full": FullAttention,
}


def make_attention(name: str, dim: int, num_heads: int = 8, **options: Any) -> MapAttention:
    """Build a baseline attention by name.

    Args:
        name: A key of `BASELINES`.
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        **options: Keyword arguments of that class.

    Example:
        >>> import torch
        >>> attention = make_attention("window", 32, 4, window_size=7, shift_size=3, lepe=True)
        >>> attention(torch.randn(1, 10, 15, 32)).shape
        torch.Size([1, 10, 15, 32])
    """
    check_attention(name, BASELINES)
    known = options_of(name)
    unknown = [option for option in options if option not in known]
    if unknown:
        hint = _nearest(unknown[0], known) or "leave out what it does not have"
        raise OptionError(
            f"attention {name!r} accepts the options {', '.join(known)}, "
            f"got {', '.join(unknown)}; {hint}"
        )
    return BASELINES[name](dim, num_heads, **options)


def options_of(name: str) -> list[str]:
    """Names of the options of a baseline, including those of its base classes."""
    found: dict[str, None] = {}
    for cls in BASELINES[name].__mro__:  # up to the class without **options
        parameters = inspect.signature(cls).parameters.values()
        found |= dict.fromkeys(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(found)


def check_attention(name: str, known: Iterable[str]) -> None:
    """Raise `OptionError` if `name` is not a known attention."""
    known = list(known)
    if name not in known:
        hint = _nearest(name, known) or "choose one of them"
        raise OptionError(f"attention must be one of {', '.join(known)}, got {name!r}; {hint}")


def _nearest(name: str, known: list[str]) -> str:
    """Suggestion of a similar name, or an empty string."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""
