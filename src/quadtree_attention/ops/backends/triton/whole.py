# SPDX-License-Identifier: Apache-2.0
"""All of an attention between its projections, in one row of launches."""

from dataclasses import replace

import torch
import triton.language as tl
from torch import Tensor

from quadtree_attention.ops.backends.triton import replay
from quadtree_attention.ops.backends.triton.launch import Options, power_of_two
from quadtree_attention.ops.backends.triton.norms import moments_of
from quadtree_attention.ops.backends.triton.position import add_positions
from quadtree_attention.ops.backends.triton.shared import kernel, share_of_levels
from quadtree_attention.ops.backends.triton.values import norm_linear
from quadtree_attention.ops.backends.triton.walk import Maps, forward


@kernel
def shares_kernel(p_logits, p_shares, LEVELS: tl.constexpr, BLOCK_L: tl.constexpr):
    """Softmax of a few logits."""
    o_l = tl.arange(0, BLOCK_L)
    tl.store(p_shares + o_l, share_of_levels(p_logits, LEVELS, BLOCK_L), mask=o_l < LEVELS)


def attend_whole(
    maps: tuple[Tensor, Tensor, Tensor],
    branches: list[Tensor],
    positions: list[Tensor],
    logits: Tensor,
    options: Options,
    eps: float,
    act: int,
) -> Tensor:
    """See the operator; maps are q, k and v, and options have no weights yet."""
    tensors = [*maps, *branches, *positions, logits]

    def run() -> list[Tensor]:
        q, k, v, *parameters, logits = [x.contiguous() for x in tensors]
        weighted = replace(options, weights=shares_of(logits) if branches else None)
        with torch.cuda.device_of(v):
            values = value_levels(v, parameters[: len(branches)], eps, act)
            heads = [x.unflatten(-1, q.shape[-2:]) for x in values]
            results = forward(Maps([q], []), Maps([k], []), Maps(heads, []), weighted)
            out = results.out.flatten(-2)
            if positions:
                weights, biases = parameters[len(branches) :: 2], parameters[len(branches) + 1 :: 2]
                out = add_positions(out, values, weights, biases, logits)
            return [out]

    (out,) = replay.replayed(
        run,
        tensors,
        ("whole", *options.topk, options.scale, eps, act, len(positions)),
        lambda: all(x.is_contiguous() for x in tensors),
    )
    return out


def shares_of(logits: Tensor) -> Tensor:
    """Softmax of the logits of levels (L,), float32."""
    levels = len(logits)
    shares = logits.new_empty(levels, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        shares_kernel[(1,)](logits, shares, LEVELS=levels, BLOCK_L=power_of_two(levels))
    return shares


def value_levels(v: Tensor, branches: list[Tensor], eps: float, act: int) -> list[Tensor]:
    """Value maps (B, Y_l, X_l, C), coarse -> fine, from the finest and parameters of the others."""
    values = [v]
    if not branches:
        return values
    moments = moments_of(v.flatten(1, 2))
    for start in range(len(branches) - 8, -1, -8):
        first, second = branches[start : start + 4], branches[start + 4 : start + 8]
        reduced, moments = norm_linear(
            values[0], moments, *first, eps, act, by_parent=True, with_moments=True
        )
        mixed, moments = norm_linear(
            reduced, moments, *second, eps, act, by_parent=False, with_moments=start > 0
        )
        values.insert(0, mixed)
    return values
