# SPDX-License-Identifier: Apache-2.0
"""Position encodings of all levels, as a torch operator around a fused kernel.

`can_fuse` says whether it runs; the attention computes the same in plain PyTorch otherwise.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quadtree_attention.ops.dispatch import nobody_listens
from quadtree_attention.ops.fused import runs_kernels
from quadtree_attention.ops.problem import needs_grad

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def can_fuse(message: Tensor, values: Sequence[Tensor], *others: Tensor) -> bool:
    """Whether the kernel takes these tensors: on images, and where nobody wants a gradient."""
    return (
        message.ndim == 4
        and message.numel() > 0
        and all(x.dtype in _DTYPES and x.is_contiguous() for x in (message, *values))
        and not needs_grad(message, *values, *others)
        and runs_kernels(message, compiled=True)
    )


def add_positions(
    message: Tensor,
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    logits: Tensor,
) -> Tensor:
    """Adds to every cell of a message a depthwise convolution at it and at all cells above it.

    Args:
        message: (B, Y, X, C).
        values: What is convolved, (B, Y_l, X_l, C) coarse -> fine.
        weights: Of the convolution at each level, (C, 1, 3, 3).
        biases: (C,) each.
        logits: (L,), whose softmax weighs the levels.

    Returns:
        (B, Y, X, C)
    """
    arguments = (message, list(values), list(weights), list(biases), logits)
    run = _run if nobody_listens(message, *values, *weights, *biases, logits) else _add_positions
    return run(*arguments)


def _run(
    message: Tensor,
    values: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    logits: Tensor,
) -> Tensor:
    from quadtree_attention.ops.backends.triton import position

    return position.add_positions(message, values, weights, biases, logits)


_add_positions = torch.library.custom_op("quadtree_attention::add_positions", _run, mutates_args=())


@_add_positions.register_fake
def _(message, values, weights, biases, logits):  # type: ignore[no-untyped-def]
    return torch.empty_like(message)
