# SPDX-License-Identifier: Apache-2.0
"""Norms."""

from typing import Any

import torch
from torch import Tensor, nn

from quadtree_attention.ops.autocast import autocast_dtype
from quadtree_attention.ops.norms.functional import can_fuse, layer_norm


class TokenNorm(nn.LayerNorm):
    """`LayerNorm` over channels, with a fused kernel if available.

    For tokens with few channels, as in a backbone, most threads of torch's kernel are idle.

    Args:
        dim: Channels.
        eps: Added to the variance.
        before_linear: Under autocast, return the autocast dtype, as input of a linear layer.
        backend: "auto" or the name of a backend; only "triton" has a kernel.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        before_linear: bool = False,
        backend: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, eps=eps, device=device, dtype=dtype)
        self.before_linear = before_linear
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        if not can_fuse(x, self.backend):
            return super().forward(x)
        dtype = autocast_dtype(x.device.type)
        if dtype is not None and not self.before_linear:
            dtype = torch.float32
        return layer_norm(x, self.weight, self.bias, self.eps, dtype or x.dtype)
