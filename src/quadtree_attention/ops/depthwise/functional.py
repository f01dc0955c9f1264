# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolution over 3 cells of each axis, channels last, of a map or of levels of a tree.

It uses fused kernels with the triton backend, and plain PyTorch otherwise.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from quadtree_attention.ops.attention.triton.limits import depthwise_reasons
from quadtree_attention.ops.autocast import autocast_dtype
from quadtree_attention.ops.autograd import apply, backward_pass, operator
from quadtree_attention.ops.backends import fuses, fuses_more
from quadtree_attention.ops.depthwise import plain
from quadtree_attention.ops.flop_counter import register_formulas
from quadtree_attention.ops.norms.functional import KERNEL_DTYPES, activation_code

WHAT = "the fused depthwise convolution"
MOST_LEVELS = {1: 4, 2: 4, 3: 2}  # maximum levels per launch, see `launch.LEAST_TILE`


def can_fuse(
    maps: Sequence[Tensor], parameters: Sequence[Tensor], backend: str, *, asked: bool = False
) -> bool:
    """Return True if kernels support these maps (B, *grid, C) and their weights and biases.

    They must be requested by `asked` or `QUADTREE_FUSED=1`.
    """
    finest, dtypes, others = maps[-1], {x.dtype for x in maps}, {x.dtype for x in parameters}
    return (
        (asked or fuses_more())
        and fuses(finest, backend)
        and finest.numel() > 0
        and len(dtypes) == len(others) == 1
        and dtypes | others <= KERNEL_DTYPES
        and not depthwise_reasons(finest.shape)
    )


def depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    relu: bool = False,
    activation: str | None = None,
    backend: str = "auto",
    asked: bool = False,
) -> Tensor:
    """Depthwise convolution with zeros past the edge.

    Args:
        x: Maps (B, *grid, C), 1 to 3 axes.
        weight: (C, 1, 3, ...)
        bias: (C,)
        relu: Apply a ReLU to the maps first.
        activation: "gelu" or "relu" of the result; None: none.
        backend: Backend of the enclosing call.
        asked: See `can_fuse`.

    Returns:
        (B, *grid, C)
    """
    if not can_fuse([x], [weight, bias], backend, asked=asked):
        return plain.depthwise(x, weight, bias, relu=relu, activation=activation)
    register_formulas(_FORMULAS)
    act = 0 if activation is None else activation_code(activation)
    dtype = autocast_dtype(x.device.type) or x.dtype
    return apply(
        WHAT, _Depthwise, (0, act, relu), dtype, None, None, None, x.contiguous(), weight, bias
    )


def add_positions(
    message: Tensor,
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    logits: Tensor,
) -> Tensor:
    """Add to every cell of a message the depthwise convolutions of itself and its ancestors.

    Requires `can_fuse`.

    Args:
        message: (B, *grid, C)
        values: Maps to convolve, (B, *grid_at(level), C), coarse -> fine.
        weights: Weights of the convolution of each level, (C, 1, 3, ...).
        biases: (C,) of each level.
        logits: (L,); their softmax is the weight of the levels.

    Returns:
        (B, *grid, C)
    """
    register_formulas(_FORMULAS)
    maps, most = [x.contiguous() for x in values], MOST_LEVELS[message.ndim - 2]
    above: Tensor | None = None
    ends = list(range(len(maps), 0, -most))[::-1]  # the finest levels share a launch
    for start, end in zip([0, *ends], ends, strict=False):
        is_last = end == len(maps)
        tensors = [*maps[start:end], *weights[start:end], *biases[start:end]]
        dtype = message.dtype if is_last else torch.float32
        given = message.contiguous() if is_last else None
        above = apply(WHAT, _Depthwise, (end - 1, 0, False), dtype, given, above, logits, *tensors)
    assert above is not None
    return above


def _flops(message: Any, above: Any, values: Any, weights: Any, *_: Any, **__: Any) -> int:
    pairs = zip(values, weights, strict=True)
    return sum(2 * prod(value) * prod(weight[1:]) for value, weight in pairs)


def _backward_flops(dy: Any, values: Any, weights: Any, *_: Any, **__: Any) -> int:
    return 2 * _flops(None, None, values, weights)


_FORMULAS: dict[str, Callable[..., int]] = {
    "depthwise": _flops,
    "depthwise_backward": _backward_flops,
}


def _fake_forward(message, above, values, weights, biases, logits, options, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(values[-1], dtype=dtype)


@operator("depthwise", _fake_forward)
def _forward(
    message: Tensor | None,
    above: Tensor | None,
    values: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    logits: Tensor | None,
    options: list[int],
    dtype: torch.dtype,
) -> Tensor:
    from quadtree_attention.ops.depthwise import launch

    level, act, relu = options
    parameters = [x.contiguous() for x in weights], [x.contiguous() for x in biases]
    chosen = launch.Options(level, act, bool(relu))
    return launch.forward(message, above, values, *parameters, logits, chosen, dtype)


def _fake_backward(dy, values, weights, biases, logits, options, with_above):  # type: ignore[no-untyped-def]
    x, levels = values[-1], len(values)
    batch, *grid, channels = values[0].shape
    parents = (batch, *((size + 1) // 2 for size in grid), channels)
    return (
        x.new_empty(sum(value.numel() for value in values)),
        weights[0].new_empty(levels, channels, weights[0][0].numel()),
        biases[0].new_empty(levels, channels),
        x.new_empty(0) if logits is None else torch.empty_like(logits),
        x.new_empty(prod(parents) if with_above else 0, dtype=torch.float32),
    )


@operator("depthwise_backward", _fake_backward)
def _backward(
    dy: Tensor,
    values: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    logits: Tensor | None,
    options: list[int],
    with_above: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from quadtree_attention.ops.depthwise import launch

    level, act, relu = options
    parameters = [x.contiguous() for x in weights], [x.contiguous() for x in biases]
    chosen = launch.Options(level, act, bool(relu))
    return launch.backward(dy, values, *parameters, logits, chosen, with_above)


def _thirds(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    count = len(tensors) // 3
    return [list(tensors[i * count : (i + 1) * count]) for i in range(3)]


def _gradients(
    options: list[int], with_above: bool, dy: Tensor, logits: Tensor | None, *tensors: Tensor
) -> Any:
    """Call `_backward` with tensors as separate arguments."""
    return _backward(dy, *_thirds(tensors), logits, options, with_above)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: tuple[int, int, bool],
        dtype: torch.dtype,
        message: Tensor | None,
        above: Tensor | None,
        logits: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        values, weights, biases = _thirds(tensors)
        ctx.options, ctx.above = options, None if above is None else above.shape
        ctx.has_message = message is not None
        ctx.save_for_backward(logits, *tensors)
        return _forward(message, above, values, weights, biases, logits, options, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        logits, *tensors = ctx.saved_tensors
        values, weights, _ = _thirds(tensors)
        run = partial(_gradients, ctx.options, ctx.above is not None)
        grads = backward_pass(WHAT, run, dy.contiguous(), logits, *tensors)
        dx, dweight, dbias, dlogits, dabove = grads
        dvalues = dx.split([value.numel() for value in reversed(values)])[::-1]
        return (
            None,
            None,
            dy if ctx.has_message else None,
            None if ctx.above is None else dabove.view(ctx.above),
            None if logits is None else dlogits,
            *(grad.view(value.shape) for grad, value in zip(dvalues, values, strict=True)),
            *(x.view(weights[0].shape) for x in reversed(dweight.unbind())),
            *reversed(dbias.unbind()),
        )
