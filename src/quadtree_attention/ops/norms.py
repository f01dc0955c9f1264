# SPDX-License-Identifier: Apache-2.0
"""Norms as torch operators around fused kernels, for where the triton backend runs.

`can_fuse` says whether it does; modules compute the same in plain PyTorch otherwise.
"""

from typing import Any

import torch
from torch import Tensor

from quadtree_attention.ops.backends.triton.limits import map_reasons, token_reasons
from quadtree_attention.ops.dispatch import nobody_listens
from quadtree_attention.ops.fused import runs_kernels
from quadtree_attention.ops.tree import rows_by_parent

ACTIVATIONS = ("gelu", "relu")
KERNEL_DTYPES = frozenset([torch.float32, torch.float16, torch.bfloat16])


def can_fuse(x: Tensor) -> bool:
    """Whether the fused layer norm takes these tokens (..., C)."""
    return x.dtype in KERNEL_DTYPES and runs_kernels(x) and not token_reasons(x.shape)


def can_fuse_map(x: Tensor) -> bool:
    """Whether the fused norm of maps takes these maps (B, Y, X, C)."""
    return x.dtype in KERNEL_DTYPES and runs_kernels(x) and not map_reasons(x.shape)


def activation_code(activation: str) -> int:
    """As kernels know it."""
    return ACTIVATIONS.index(activation) + 1


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Layer norm over the last axis, statistics in float32, the result in `dtype`."""
    run = _run_layer_norm if nobody_listens(x, weight, bias) else _layer_norm
    return run(x.contiguous(), weight, bias, eps, dtype)


def map_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, activation: str, *, by_parent: bool
) -> Tensor:
    """Activation of the norm over all cells and channels of each map.

    Args:
        x: Maps (B, *grid, C).
        weight: (C,)
        bias: (C,)
        eps: Added to the variance.
        activation: "gelu" or "relu".
        by_parent: Gather the cells of an image under their parents, zeros past the edge.

    Returns:
        (B, *grid, C), or (B, *parents, 4 * C)
    """
    batch, *grid, channels = x.shape
    columns = grid[1] if by_parent else 0
    flat = x.reshape(batch, -1, channels).contiguous()
    act = activation_code(activation)
    run = _run_map_norm if nobody_listens(x, weight, bias) else _map_norm
    out, _ = run(flat, weight, bias, eps, act, columns)
    if not by_parent:
        return out.view(x.shape)
    return out.view(batch, *((size + 1) // 2 for size in grid), 4 * channels)


def _run_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    from quadtree_attention.ops.backends.triton import norms

    return norms.layer_norm(x, weight, bias, eps, dtype)


_layer_norm = torch.library.custom_op(
    "quadtree_attention::layer_norm", _run_layer_norm, mutates_args=()
)


@_layer_norm.register_fake
def _(x, weight, bias, eps, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=dtype)


@torch.library.custom_op("quadtree_attention::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from quadtree_attention.ops.backends.triton import norms

    return norms.layer_norm_backward(dy, x, weight, eps)


@_layer_norm_backward.register_fake
def _(dy, x, weight, eps):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), x.new_empty(2, x.shape[-1], dtype=torch.float32)


def _save_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.eps, _ = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(x, weight)


def _layer_norm_gradient(ctx: Any, dy: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    dx, (dweight, dbias) = _layer_norm_backward(dy.contiguous(), x, weight, ctx.eps)
    return dx, dweight.to(weight.dtype), dbias.to(ctx.bias_dtype), None, None


_layer_norm.register_autograd(_layer_norm_gradient, setup_context=_save_layer_norm)


def _run_map_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, act: int, columns: int
) -> tuple[Tensor, Tensor]:
    from quadtree_attention.ops.backends.triton import norms

    return norms.map_norm(x, weight, bias, eps, act, columns)


_map_norm = torch.library.custom_op("quadtree_attention::map_norm", _run_map_norm, mutates_args=())


@_map_norm.register_fake
def _(x, weight, bias, eps, act, columns):  # type: ignore[no-untyped-def]
    batch, rows, channels = x.shape
    rows = rows_by_parent(rows, columns)
    return x.new_empty(batch, rows, channels), x.new_empty(batch, 2, dtype=torch.float32)


@torch.library.custom_op("quadtree_attention::map_norm_backward", mutates_args=())
def _map_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, act: int, columns: int
) -> tuple[Tensor, Tensor]:
    from quadtree_attention.ops.backends.triton import norms

    return norms.map_norm_backward(dy, x, weight, bias, stats, act, columns)


@_map_norm_backward.register_fake
def _(dy, x, weight, bias, stats, act, columns):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), x.new_empty(2, x.shape[-1], dtype=torch.float32)


def _save_map_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, ctx.act, ctx.columns = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _map_norm_gradient(ctx: Any, dy: Tensor, _: Any) -> Any:
    x, weight, bias, stats = ctx.saved_tensors
    dx, (dweight, dbias) = _map_norm_backward(
        dy.contiguous(), x, weight, bias, stats, ctx.act, ctx.columns
    )
    return dx, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None, None


_map_norm.register_autograd(_map_norm_gradient, setup_context=_save_map_norm)
