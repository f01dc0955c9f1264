# SPDX-License-Identifier: Apache-2.0
"""Norm of maps, activation and linear layer as one torch operator with fused kernels."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from quadtree_attention.ops.autocast import autocast_dtype
from quadtree_attention.ops.autograd import apply, backward_pass, operator
from quadtree_attention.ops.backends import fuses_more
from quadtree_attention.ops.flop_counter import register_formulas
from quadtree_attention.ops.norms.functional import activation_code, can_fuse_map

WHAT = "the fused value pyramid"


def can_fuse(x: Tensor, backend: str, *, asked: bool = False) -> bool:
    """Return True if kernels support these maps (B, Y, X, C) in a call of this backend.

    They must be requested by `asked` or `QUADTREE_FUSED=1`.
    """
    return (asked or fuses_more()) and x.ndim == 4 and x.numel() > 0 and can_fuse_map(x, backend)


def norm_act_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    matrix: Tensor,
    offset: Tensor,
    eps: float,
    activation: str,
    *,
    by_parent: bool,
) -> Tensor:
    """Compute `linear(activation(norm(x)))`; the norm has one mean and variance for each map.

    Requires `can_fuse`.

    Args:
        x: Maps (B, Y, X, C).
        weight: Weight of the norm, (C,).
        bias: Bias of the norm, (C,).
        matrix: Weight of the linear layer, (C, C), or (C, 4 * C) by parent.
        offset: Bias of the linear layer, (C,).
        eps: Added to the variance.
        activation: "gelu" or "relu".
        by_parent: Concatenate the children of a cell, with zero padding.

    Returns:
        (B, Y, X, C), or (B, (Y + 1) // 2, (X + 1) // 2, C) by parent
    """
    dtype = autocast_dtype(x.device.type) or x.dtype
    register_formulas({"norm_act_linear": _flops, "norm_act_linear_backward": _backward_flops})
    options = eps, activation_code(activation), by_parent, dtype
    return apply(WHAT, _NormActLinear, options, x.contiguous(), weight, bias, matrix, offset)


def _flops(x: Any, weight: Any, bias: Any, matrix: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * prod(out_shape[0][:-1]) * prod(matrix)


def _backward_flops(dy: Any, *others: Any, **_: Any) -> int:
    matrix = others[4]
    return 4 * prod(dy[:-1]) * prod(matrix)


def _fake_forward(x, weight, bias, matrix, offset, eps, act, by_parent, dtype):  # type: ignore[no-untyped-def]
    batch, *grid, channels = x.shape
    grid = [(size + 1) // 2 for size in grid] if by_parent else grid
    stats = x.new_empty(batch, 2, dtype=torch.float32)
    return x.new_empty(batch, *grid, channels, dtype=dtype), stats


@operator("norm_act_linear", _fake_forward)
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    matrix: Tensor,
    offset: Tensor,
    eps: float,
    act: int,
    by_parent: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    from quadtree_attention.ops.norms.kernels import moments_of
    from quadtree_attention.ops.values.kernels import norm_linear

    with torch.cuda.device_of(x):
        moments = moments_of(x.flatten(1, 2))
    y, _, stats = norm_linear(
        x, moments, weight, bias, matrix.contiguous(), offset, eps, act,
        by_parent=by_parent, with_moments=False, dtype=dtype,
    )  # fmt: skip
    return y, stats


def _fake_backward(dy, x, stats, weight, bias, matrix, act, by_parent):  # type: ignore[no-untyped-def]
    wide = dy.is_cuda and dy.itemsize == 2
    dmatrix = torch.empty_like(matrix, dtype=torch.float32 if wide else dy.dtype)
    return torch.empty_like(x), stats.new_empty(3, x.shape[-1]), dmatrix


@operator("norm_act_linear_backward", _fake_backward)
def _backward(
    dy: Tensor,
    x: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor,
    matrix: Tensor,
    act: int,
    by_parent: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from quadtree_attention.ops.values.kernels import norm_linear_backward

    matrix = matrix.contiguous()
    return norm_linear_backward(dy, x, stats, weight, bias, matrix, act, by_parent=by_parent)


class _NormActLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: tuple[float, int, bool, torch.dtype],
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        matrix: Tensor,
        offset: Tensor,
    ) -> Tensor:
        y, stats = _forward(x, weight, bias, matrix, offset, *options)
        ctx.options = options[1:3]
        ctx.save_for_backward(x, stats, weight, bias, matrix)
        ctx.offset_dtype = offset.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        saved = ctx.saved_tensors
        _, _, weight, bias, matrix = saved
        grads = backward_pass(WHAT, _backward, dy.contiguous(), *saved, *ctx.options)
        dx, (dweight, dbias, doffset), dmatrix = grads
        dweight, dbias = dweight.to(weight.dtype), dbias.to(bias.dtype)
        return None, dx, dweight, dbias, dmatrix.to(matrix.dtype), doffset.to(ctx.offset_dtype)
