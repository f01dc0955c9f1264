# SPDX-License-Identifier: Apache-2.0
"""Sine position encoding of maps."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from quadtree_attention import checks
from quadtree_attention.errors import OptionError

Frequencies = Literal["fixed", "legacy"]


def check_position(dim: int, frequencies: str) -> None:
    """Raise `OptionError` for an unknown encoding or an invalid number of channels."""
    if dim % 4:
        raise OptionError(
            f"the position encoding has sine and cosine of x and y, so the coarse channels must be "
            f"a multiple of 4, got {dim=}; change them"
        )
    checks.one_of(get_args(Frequencies), position=frequencies)


def sine_table(
    height: int, width: int, dim: int, frequencies: Frequencies = "fixed", *, device: Any = None
) -> Tensor:
    """Return the position encoding of a map: (H, W, C) float32.

    Channels 4m ... 4m+3 are sin x, cos x, sin y, cos y at frequency m, positions count from 1.
    The frequencies decrease from 1 to almost 1/10000; in the "legacy" form, a bug of the original
    that some weights were trained with, they are `exp(-2m)`.

    Example:
        >>> sine_table(30, 45, 64).shape
        torch.Size([30, 45, 64])
    """
    check_position(dim, frequencies)
    decay = -1.0 if frequencies == "legacy" else -math.log(10000.0) / (dim // 2)
    frequency = torch.exp(torch.arange(0, dim // 2, 2, device=device).float() * decay)  # (C/4,)
    rows, columns = (
        torch.arange(1, size + 1, device=device).float()[:, None] * frequency
        for size in (height, width)
    )
    across, down = (torch.stack([x.sin(), x.cos()], dim=-1) for x in (columns, rows))
    shape = (height, width, dim // 4, 2)
    return torch.cat([across.expand(shape), down[:, None].expand(shape)], dim=-1).flatten(2)
