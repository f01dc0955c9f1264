# SPDX-License-Identifier: Apache-2.0
"""Norms as torch operators with fused kernels, for the triton backend.

If `can_fuse` is False, modules compute the same in plain PyTorch.
"""

from typing import Any

import torch
from torch import Tensor

from quadtree_attention.ops.attention.tree import rows_by_parent
from quadtree_attention.ops.attention.triton.limits import map_reasons, token_reasons
from quadtree_attention.ops.autograd import apply, backward_pass, operator
from quadtree_attention.ops.backends import fuses

ACTIVATIONS = ("gelu", "relu")
KERNEL_DTYPES = frozenset([torch.float32, torch.float16, torch.bfloat16])


def can_fuse(x: Tensor, backend: str = "auto") -> bool:
    """Return True if the fused layer norm supports tokens (..., C) in a call of this backend."""
    return x.dtype in KERNEL_DTYPES and fuses(x, backend) and not token_reasons(x.shape)


def can_fuse_map(x: Tensor, backend: str = "auto") -> bool:
    """Return True if the fused norm supports maps (B, Y, X, C) in a call of this backend."""
    return x.dtype in KERNEL_DTYPES and fuses(x, backend) and not map_reasons(x.shape)


def activation_code(activation: str) -> int:
    """Return the code of an activation in kernels."""
    return ACTIVATIONS.index(activation) + 1


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Layer norm over the last axis, statistics in float32, the result in `dtype`."""
    return apply(WHAT, _LayerNorm, x.contiguous(), weight, bias, eps, dtype)


def map_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, activation: str, *, by_parent: bool
) -> Tensor:
    """Norm over all cells and channels of each map, followed by an activation.

    Args:
        x: Maps (B, *grid, C).
        weight: (C,)
        bias: (C,)
        eps: Added to the variance.
        activation: "gelu" or "relu".
        by_parent: Group the cells of an image by parent, with zero padding.

    Returns:
        (B, *grid, C), or (B, *parents, 4 * C)
    """
    batch, *grid, channels = x.shape
    columns = grid[1] if by_parent else 0
    flat = x.reshape(batch, -1, channels).contiguous()
    act = activation_code(activation)
    out = apply(WHAT, _MapNorm, flat, weight, bias, eps, act, columns)
    if not by_parent:
        return out.view(x.shape)
    return out.view(batch, *((size + 1) // 2 for size in grid), 4 * channels)


WHAT = "the fused norm"


def _fake_layer_norm(x, weight, bias, eps, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=dtype)


@operator("layer_norm", _fake_layer_norm)
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    from quadtree_attention.ops.norms import kernels

    return kernels.layer_norm(x, weight, bias, eps, dtype)


def _fake_gradients(dy, x, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), x.new_empty(2, x.shape[-1], dtype=torch.float32)


@operator("layer_norm_backward", _fake_gradients)
def _layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from quadtree_attention.ops.norms import kernels

    return kernels.layer_norm_backward(dy, x, weight, eps)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.eps, ctx.bias_dtype = eps, bias.dtype
        ctx.save_for_backward(x, weight)
        return _layer_norm(x, weight, bias, eps, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx, dboth = backward_pass(WHAT, _layer_norm_backward, dy.contiguous(), x, weight, ctx.eps)
        return dx, dboth[0].to(weight.dtype), dboth[1].to(ctx.bias_dtype), None, None


def _fake_map_norm(x, weight, bias, eps, act, columns):  # type: ignore[no-untyped-def]
    batch, rows, channels = x.shape
    rows = rows_by_parent(rows, columns)
    return x.new_empty(batch, rows, channels), x.new_empty(batch, 2, dtype=torch.float32)


@operator("map_norm", _fake_map_norm)
def _map_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, act: int, columns: int
) -> tuple[Tensor, Tensor]:
    from quadtree_attention.ops.norms import kernels

    return kernels.map_norm(x, weight, bias, eps, act, columns)


@operator("map_norm_backward", _fake_gradients)
def _map_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, act: int, columns: int
) -> tuple[Tensor, Tensor]:
    from quadtree_attention.ops.norms import kernels

    return kernels.map_norm_backward(dy, x, weight, bias, stats, act, columns)


class _MapNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, act: int, columns: int
    ) -> Tensor:
        out, stats = _map_norm(x, weight, bias, eps, act, columns)
        ctx.options = act, columns
        ctx.save_for_backward(x, weight, bias, stats)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        saved = ctx.saved_tensors
        dx, dboth = backward_pass(WHAT, _map_norm_backward, dy.contiguous(), *saved, *ctx.options)
        _, weight, bias, _ = saved
        return dx, dboth[0].to(weight.dtype), dboth[1].to(bias.dtype), None, None, None
