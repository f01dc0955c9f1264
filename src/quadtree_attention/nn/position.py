# SPDX-License-Identifier: Apache-2.0
"""Position encodings."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quadtree_attention.nn.renamed import rename_on_load
from quadtree_attention.ops.depthwise.functional import depthwise


class DepthwiseConv(nn.Module):
    """Depthwise convolution over 3 cells of every grid axis, channels last, with zero padding.

    On a value map it is the locally enhanced position encoding (LePE); inside an MLP it mixes
    neighbouring tokens.

    Args:
        dim: Channels.
        ndim: Grid axes, 1 to 3.
        relu: Add a ReLU before the convolution.
        activation: "gelu" or "relu" after the convolution; None: none.
        backend: "auto" or the name of a backend; only "triton" has a kernel.
    """

    fused = False  # see `fuse_for_inference`
    OLD_NAMES: ClassVar = {"conv.weight": "weight", "conv.bias": "bias"}

    def __init__(
        self,
        dim: int,
        ndim: int = 2,
        *,
        relu: bool = False,
        activation: str | None = None,
        backend: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.ndim = dim, ndim
        self.relu, self.activation, self.backend = relu, activation, backend
        dd = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(dim, 1, *(3,) * ndim, **dd))
        self.bias = nn.Parameter(torch.empty(dim, **dd))
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(rename_on_load)

    def reset_parameters(self) -> None:
        """Initialise as torch's convolutions."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(3**self.ndim)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """(B, *grid, C) -> (B, *grid, C); the result is multiplied by the scalar `gain`."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if gain is not None:  # multiply the weights instead of the map
            weight, bias = weight * gain, bias * gain
        return depthwise(
            x, weight, bias, relu=self.relu, activation=self.activation, backend=self.backend,
            asked=self.fused,
        )  # fmt: skip

    def extra_repr(self) -> str:
        options = f"relu={self.relu}, activation={self.activation!r}"
        return f"{self.dim}, ndim={self.ndim}, {options}"
