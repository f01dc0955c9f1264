# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}
_IN_PLACE: dict[str, Any] = {"gelu": torch.ops.aten.gelu_.default, "relu": F.relu_}


def depthwise(
    x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool = False, activation: str | None = None
) -> Tensor:
    """Compute `functional.depthwise`."""
    maps = (F.relu(x) if relu else x).movedim(-1, 1)
    out: Tensor = _CONVOLUTIONS[x.ndim - 2](maps, weight, bias, padding=1, groups=x.shape[-1])
    out = out.movedim(1, -1)
    if activation is None:
        return out
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        in_place: Tensor = _IN_PLACE[activation](out)  # saves a copy of a wide map
        return in_place
    return ACTIVATIONS[activation](out)
