# SPDX-License-Identifier: Apache-2.0
"""All of an attention in one row of launches."""

from dataclasses import replace

import torch
import triton.language as tl
from torch import Tensor

from quadtree_attention.ops import replay
from quadtree_attention.ops.attention.triton.launch import Options
from quadtree_attention.ops.attention.triton.project import is_small, project
from quadtree_attention.ops.attention.triton.walk import Maps, forward
from quadtree_attention.ops.depthwise.position import add_positions
from quadtree_attention.ops.kernel import kernel, power_of_two, share_of_levels
from quadtree_attention.ops.norms.kernels import moments_of
from quadtree_attention.ops.values.kernels import norm_linear
from quadtree_attention.ops.whole import Parameters


@kernel
def shares_kernel(p_logits, p_shares, LEVELS: tl.constexpr, BLOCK_L: tl.constexpr):
    """Softmax of a few logits."""
    o_l = tl.arange(0, BLOCK_L)
    tl.store(p_shares + o_l, share_of_levels(p_logits, LEVELS, BLOCK_L), mask=o_l < LEVELS)


def attend_whole(
    maps: list[Tensor],
    parameters: Parameters,
    heads: int,
    options: Options,
    eps: float,
    act: int,
    dtype: torch.dtype,
) -> Tensor:
    """See the operator; maps are x and, if there is one, its context; options have no weights."""
    tensors = [*maps, *parameters.tensors()]

    def run() -> list[Tensor]:
        x, *context = (x.contiguous() for x in maps)
        weights, biases, branches, positions, logits = parameters.contiguous()
        with torch.cuda.device_of(x):
            weighted = replace(options, weights=shares_of(logits) if branches else None)
            q, k, v = queries_keys_values(x, context, weights[:-1], biases[:-1], dtype)
            values = value_levels(v, branches, eps, act)
            q, k, *by_level = (y.unflatten(-1, (heads, -1)) for y in (q, k, *values))
            out = forward(Maps([q], []), Maps([k], []), Maps(by_level, []), weighted).out
            out = out.flatten(-2)
            if positions:
                out = add_positions(out, values, positions[::2], positions[1::2], logits)
            return project(out, weights[-1:], biases[-1:], dtype)

    counts = len(maps), *map(len, parameters)
    (out,) = replay.replayed(
        run,
        tensors,
        ("whole", counts, heads, options.topk, options.scale, eps, act, dtype),
        lambda: all(x.is_contiguous() for x in tensors) and all(is_small(x) for x in maps),
    )
    return out


def queries_keys_values(
    x: Tensor,
    context: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Queries of x, and keys and values of its context, or of x itself."""
    if not context:
        return project(x, weights, biases, dtype)
    (other,) = context
    queries = project(x, weights[:1], biases[:1], dtype)
    return queries + project(other, weights[1:], biases[1:], dtype)


def shares_of(logits: Tensor) -> Tensor:
    """Softmax of the logits of levels (L,), float32."""
    levels = len(logits)
    shares = logits.new_empty(levels, dtype=torch.float32)
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
