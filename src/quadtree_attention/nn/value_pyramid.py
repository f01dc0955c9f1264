# SPDX-License-Identifier: Apache-2.0
"""The learned value pyramid: every coarser value map is a function of the next finer one.

It runs in tree order, where a stride-2 convolution over 2 cells of every axis is a linear map on
the concatenated children of a cell, whatever the number of axes.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.ops.tree import accumulation_dtype, group, hide

Activation = Literal["gelu", "relu"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


class VisibleNorm(nn.Module):
    """Group norm with one group whose statistics come from visible cells only.

    Args:
        dim: Channels.
        eps: Added to the variance.
    """

    def __init__(
        self, dim: int, eps: float = 1e-5, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """(B, T, C) with (B, T) bool or None -> (B, T, C)"""
        wide = x.to(accumulation_dtype(x.dtype))
        if visible is None:
            variance, mean = torch.var_mean(wide, dim=(1, 2), correction=0, keepdim=True)
        else:
            shown = visible[..., None]
            count = (shown.sum(dim=1, keepdim=True) * x.shape[2]).clamp(min=1)
            mean = torch.where(shown, wide, 0).sum(dim=(1, 2), keepdim=True) / count
            variance = torch.where(shown, wide - mean, 0).square().sum(dim=(1, 2), keepdim=True)
            variance = variance / count
        normed = (wide - mean) * (variance + self.eps).rsqrt()
        return (normed * self.weight + self.bias).to(x.dtype)


class ValueBranch(nn.Module):
    """One step of the value pyramid, from a level to the next coarser one.

    Norm, activation, convolution over the children of a cell, norm, activation, 1x1 convolution.

    Args:
        dim: Channels.
        num_children: Children of a cell.
        activation: "gelu" or "relu".
    """

    def __init__(
        self,
        dim: int,
        num_children: int,
        activation: Activation = "gelu",
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise OptionError(
                f"value_act must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}; "
                "classification uses gelu, detection and segmentation use relu"
            )
        self.num_children = num_children
        self.norm1 = VisibleNorm(dim, device=device, dtype=dtype)
        self.reduce = nn.Linear(num_children * dim, dim, device=device, dtype=dtype)
        self.norm2 = VisibleNorm(dim, device=device, dtype=dtype)
        self.mix = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.act = _ACTIVATIONS[activation]()

    def forward(self, x: Tensor, visible: Tensor | None, visible_above: Tensor | None) -> Tensor:
        """(B, T, C) -> (B, T/F, C); the masks are those of x and of the result."""
        x = hide(self.act(self.norm1(x, visible)), visible)
        x = self.reduce(group(x, self.num_children, axis=1).flatten(2))
        x = self.mix(self.act(self.norm2(x, visible_above)))
        return hide(x, visible_above)
