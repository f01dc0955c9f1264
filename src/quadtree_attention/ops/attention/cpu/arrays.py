# SPDX-License-Identifier: Apache-2.0
"""Conversion between tensors and the flat arrays of kernels."""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Array = np.ndarray[Any, Any]


def flat(x: Tensor | None, dtype: torch.dtype) -> Array:
    """Return a flat array; empty for None."""
    if x is None:
        return np.empty(0, numpy_dtype(dtype))
    if x.requires_grad:
        x = x.detach()
    if x.dtype != dtype:
        x = x.to(dtype)
    return x.contiguous().numpy().reshape(-1)


def flat_rows(x: Tensor | None, dtype: torch.dtype, cells: int, width: int) -> Array:
    """Return (B, N, T, D) as a flat array with `cells` rows of `width` numbers per head."""
    if x is not None and x.shape[2:] != (cells, width):
        x = F.pad(x.detach(), (0, width - x.shape[3], 0, cells - x.shape[2]))
    return flat(x, dtype)


def crop(x: Tensor, cells: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the first cells and columns of (B, N, T, D)."""
    if x.shape[2:] != (cells, width):
        x = x[:, :, :cells, :width]
    return x.to(dtype).contiguous()


def number(x: Tensor | float | None, dtype: torch.dtype) -> Any:
    """Return a scalar of the kernels' dtype; 1 for None."""
    return numpy_dtype(dtype).type(1.0 if x is None else float(x))


@cache
def numpy_dtype(dtype: torch.dtype) -> Any:
    return np.dtype(str(dtype).removeprefix("torch."))
