# SPDX-License-Identifier: Apache-2.0
"""A transformer block around any attention on maps, and around quadtree attention."""

from typing import Any

import torch
from torch import Tensor, nn

from quadtree_attention.nn.attention import QuadtreeAttention
from quadtree_attention.nn.norm import TokenNorm
from quadtree_attention.nn.position import DepthwiseConv
from quadtree_attention.ops.attention.tree import hide


class ConvMlp(nn.Module):
    """MLP with a depthwise convolution between its two layers, channels last.

    Args:
        dim: Channels in and out.
        hidden_dim: Channels between the layers.
        ndim: Grid axes.
        extra_relu: Add a ReLU before the convolution, as in the matching network.
        drop: Dropout after each layer.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        ndim: int = 2,
        extra_relu: bool = False,
        drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.dwconv = DepthwiseConv(
            hidden_dim, ndim, relu=extra_relu, activation="gelu", device=device, dtype=dtype
        )
        self.fc2 = nn.Linear(hidden_dim, dim, device=device, dtype=dtype)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, *grid, C) -> (B, *grid, C); cells hidden by `mask` do not affect their neighbours."""
        x = self.dwconv(hide(self.fc1(x), mask))
        return self.drop(self.fc2(self.drop(x)))


class DropPath(nn.Module):
    """Stochastic depth: drops a residual branch per sample in training, with probability `rate`."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device) >= self.rate
        return x * keep / (1.0 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class Block(nn.Module):
    """Pre-norm transformer block around an attention and an MLP, both on maps, channels last.

    Args:
        dim: Channels.
        attn: The attention; it needs an argument `mask` if the block is called with one.
        mlp: The MLP: a `ConvMlp`, or a module that acts on every cell separately.
        norm_eps: Epsilon of the layer norms.
        drop_path: Rate of stochastic depth on both branches.

    Example:
        >>> import torch
        >>> from quadtree_attention.nn import make_attention
        >>> block = Block(64, make_attention("window", 64, 2), ConvMlp(64, 256))
        >>> block(torch.randn(1, 20, 27, 64)).shape
        torch.Size([1, 20, 27, 64])
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        *,
        norm_eps: float = 1e-6,
        drop_path: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        options = {
            "before_linear": True,
            "backend": getattr(attn, "backend", "auto"),
            "device": device,
            "dtype": dtype,
        }
        self.norm1 = TokenNorm(dim, norm_eps, **options)
        self.attn = attn
        self.norm2 = TokenNorm(dim, norm_eps, **options)
        self.mlp = mlp
        if isinstance(mlp, ConvMlp):
            mlp.dwconv.backend = options["backend"]
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, *grid, C) -> (B, *grid, C)

        Cells with False in `mask` (B, *grid) are hidden and do not affect other cells.
        """
        if mask is None:
            x = x + self.drop_path(self.attn(self.norm1(x)))
            return x + self.drop_path(self.mlp(self.norm2(x)))
        x = x + self.drop_path(self.attn(self.norm1(x), mask=mask))
        mixes_cells = isinstance(self.mlp, ConvMlp)
        mixed = self.mlp(self.norm2(x), mask) if mixes_cells else self.mlp(self.norm2(x))
        return x + self.drop_path(mixed)


class ContextBlock(Block):
    """A block with self or cross attention and masks.

    Args:
        dim: Channels.
        attn: The attention, with the interface of `QuadtreeAttention`.
        mlp: The MLP, with the interface of `ConvMlp`.
        norm_eps: Epsilon of the layer norms.
        drop_path: Rate of stochastic depth on both branches.
    """

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """See `QuadtreeAttention.forward` for arguments and result."""
        normed_context = None if context is None else self.norm1(context)
        attended = self.attn(self.norm1(x), normed_context, mask=mask, context_mask=context_mask)
        x = x + self.drop_path(attended)
        return x + self.drop_path(self.mlp(self.norm2(x), mask))


class QuadtreeBlock(ContextBlock):
    """Pre-norm transformer block: quadtree attention, then an MLP with a convolution inside.

    Args:
        dim: Channels.
        num_heads: Heads.
        mlp_ratio: Hidden channels of the MLP per channel.
        extra_relu: Add a ReLU before the convolution of the MLP, as in the matching network.
        norm_eps: Epsilon of the layer norms (1e-6 in the backbones, 1e-5 in the matching network).
        drop_path: Rate of stochastic depth on both branches.
        proj_drop: Dropout after the attention's projection and in the MLP.
        **attention: Further options of `QuadtreeAttention`.

    Example:
        >>> import torch
        >>> block = QuadtreeBlock(64, num_heads=2, num_levels=3, value_pyramid="conv", lepe=True)
        >>> block(torch.randn(1, 20, 27, 64)).shape
        torch.Size([1, 20, 27, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        mlp_ratio: float = 4.0,
        extra_relu: bool = False,
        norm_eps: float = 1e-6,
        drop_path: float = 0.0,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
        **attention: Any,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        attn = QuadtreeAttention(dim, num_heads, proj_drop=proj_drop, **dd, **attention)
        mlp = ConvMlp(
            dim,
            int(dim * mlp_ratio),
            ndim=attn.ndim,
            extra_relu=extra_relu,
            drop=proj_drop,
            **dd,
        )
        super().__init__(dim, attn, mlp, norm_eps=norm_eps, drop_path=drop_path, **dd)
