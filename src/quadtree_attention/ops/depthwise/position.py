# SPDX-License-Identifier: Apache-2.0
"""The kernel of position encodings, and its launches.

Torch takes five kernels for a level: two that weigh the convolution, the convolution itself, its
bias, and the sum with what comes from above. Here it is one, from coarse to fine.
"""

import torch
import triton.language as tl
from torch import Tensor

from quadtree_attention.ops.kernel import (
    entries,
    kernel,
    parts_of,
    power_of_two,
    quotient,
    share_of_levels,
)
from quadtree_attention.ops.norms.kernels import map_and_part

TILE = 2048  # numbers of a tile
LARGEST_BLOCK = 128  # channels of a tile


@kernel
def position_kernel(
    p_value, p_weight, p_bias, p_logits, p_above, p_message, p_out,
    size_0, size_1, cells_above, above_1, level,
    C: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr, HAS_ABOVE: tl.constexpr, HAS_MESSAGE: tl.constexpr,
):  # fmt: skip
    """One level: its share of the convolution, what its parents have, and the message."""
    cells = size_0 * size_1
    blocks = tl.cdiv(cells, BLOCK_R)
    i_batch, i_part = map_and_part(blocks * tl.cdiv(C, BLOCK_C))
    o_row = (i_part % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = (i_part // blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_row, m_c = o_row < cells, o_c < C
    i_0 = quotient(o_row, size_1)
    i_1 = o_row - i_0 * size_1

    p_value += i_batch * cells * C
    b_out = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    b_out += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    for i_tap in tl.static_range(9):
        i_y, i_x = i_0 + (i_tap // 3 - 1), i_1 + (i_tap % 3 - 1)
        m_tap = m_row & (i_y >= 0) & (i_y < size_0) & (i_x >= 0) & (i_x < size_1)
        p_tap = entries(p_value, i_y * size_1 + i_x, o_c, C)
        b_value = tl.load(p_tap, mask=m_tap[:, None] & m_c[None, :], other=0.0).to(tl.float32)
        b_weight = tl.load(p_weight + o_c * 9 + i_tap, mask=m_c, other=0.0).to(tl.float32)
        b_out += b_value * b_weight[None, :]

    b_shares = share_of_levels(p_logits, LEVELS, BLOCK_L)
    b_out *= tl.sum(tl.where(tl.arange(0, BLOCK_L) == level, b_shares, 0.0), axis=0)

    m_out = m_row[:, None] & m_c[None, :]
    if HAS_ABOVE:
        o_above = (i_0 >> 1) * above_1 + (i_1 >> 1)
        p_above = entries(p_above + i_batch * cells_above * C, o_above, o_c, C)
        b_out += tl.load(p_above, mask=m_out, other=0.0)
    if HAS_MESSAGE:
        p_message = entries(p_message + i_batch * cells * C, o_row, o_c, C)
        b_out += tl.load(p_message, mask=m_out, other=0.0).to(tl.float32)
    p_out = entries(p_out + i_batch * cells * C, o_row, o_c, C)
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_out)


def add_positions(
    message: Tensor,
    values: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    logits: Tensor,
) -> Tensor:
    """Adds to every cell of a message a depthwise convolution at it and at all cells above it.

    Args:
        message: (B, Y, X, C), contiguous, as all maps are.
        values: What is convolved, (B, Y_l, X_l, C) coarse -> fine.
        weights: Of the convolution at each level, (C, 1, 3, 3).
        biases: (C,) each.
        logits: (L,), whose softmax weighs the levels.

    Returns:
        (B, Y, X, C)
    """
    above, finest = message, len(values) - 1
    with torch.cuda.device_of(message):
        for level, (value, weight, bias) in enumerate(zip(values, weights, biases, strict=True)):
            batch, size_0, size_1, channels = value.shape
            dtype = message.dtype if level == finest else torch.float32
            out = torch.empty_like(value, dtype=dtype)
            tile = _tile(channels)
            tiles = parts_of(size_0 * size_1, tile["BLOCK_R"]) * parts_of(channels, tile["BLOCK_C"])
            position_kernel[(batch * tiles,)](
                value, weight, bias, logits, above, message, out,
                size_0, size_1, above.shape[1] * above.shape[2], above.shape[2], level,
                C=channels, LEVELS=len(values), BLOCK_L=power_of_two(len(values)),
                HAS_ABOVE=level > 0, HAS_MESSAGE=level == finest, **tile,
            )  # fmt: skip
            above = out
    return above


def _tile(channels: int) -> dict[str, int]:
    block = min(power_of_two(channels, least=4), LARGEST_BLOCK)
    return {"BLOCK_C": block, "BLOCK_R": TILE // block}
