# SPDX-License-Identifier: Apache-2.0
"""Position encodings."""

from typing import Any

from torch import Tensor, nn

_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


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
        self.conv = _CONVOLUTIONS[ndim](
            dim, dim, kernel_size=3, padding=1, groups=dim, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, *grid, C) -> (B, *grid, C)"""
        return self.conv(x.movedim(-1, 1)).movedim(1, -1)
