# SPDX-License-Identifier: Apache-2.0
"""Position encodings."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.nn.untouched import is_untouched

_CONVOLUTIONS: dict[int, tuple[Any, Any]] = {
    1: (nn.Conv1d, F.conv1d),
    2: (nn.Conv2d, F.conv2d),
    3: (nn.Conv3d, F.conv3d),
}


class DepthwiseConv(nn.Module):
    """Depthwise convolution over 3 cells of every grid axis, channels last, zeros past the edge.

    On a value map this is the locally enhanced position encoding (LePE); in the middle of an MLP
    it lets neighbouring tokens talk.

    Args:
        dim: Channels.
        ndim: Grid axes, 1 to 3.
    """

    def __init__(self, dim: int, ndim: int = 2, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.dim = dim
        module, self._function = _CONVOLUTIONS[ndim]
        self.conv = module(
            dim, dim, kernel_size=3, padding=1, groups=dim, device=device, dtype=dtype
        )

    def parameters_if_untouched(self) -> list[Tensor] | None:
        """Weight and bias; None where the layer was replaced or is watched."""
        conv: Any = self._modules.get("conv")  # attributes of a module are slow to look up
        if not is_untouched(self, DepthwiseConv) or not is_untouched(conv, nn.Conv2d):
            return None
        weight, bias = conv._parameters.get("weight"), conv._parameters.get("bias")
        if weight is None or bias is None:
            return None
        shapes = weight.shape, bias.shape, conv.padding
        is_as_built = shapes == ((self.dim, 1, 3, 3), (self.dim,), (1, 1))
        return [weight, bias] if is_as_built else None

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """(B, *grid, C) -> (B, *grid, C), times a number `gain`."""
        x = x.movedim(-1, 1)
        if gain is None:
            return self.conv(x).movedim(1, -1)
        # on the few weights, not on the whole map
        weight, bias = self.conv.weight * gain, self.conv.bias * gain
        return self._function(x, weight, bias, padding=1, groups=x.shape[1]).movedim(1, -1)
