# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the same tokens, in one launch.

On one image the host takes longer to call a library for each of them than the GPU needs for all.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quadtree_attention.ops.kernel import entries, kernel, parts_of, power_of_two, precision

ROWS = 64  # of a tile
CHANNELS = 32  # of a tile of results
STEP = 32  # channels that are read at a time
MOST_PRODUCTS = 2**32  # of a layer; more take the GPU longer than a library's call the host


@triton.jit
def times_part(b_x, p_matrix, o_k, o_n, b_sum, C: tl.constexpr, PRECISION: tl.constexpr):
    """`b_sum` plus the product with columns `o_k` of rows `o_n` of a layer's matrix."""
    m_part = (o_k < C)[:, None] & (o_n < C)[None, :]
    b_part = tl.load(p_matrix + o_n[None, :] * C + o_k[:, None], mask=m_part, other=0.0)
    return tl.dot(b_x, b_part.to(b_x.dtype), b_sum, input_precision=PRECISION)


@triton.jit
def store_result(p_y, b_y, p_bias, o_row, o_n, m_y, C: tl.constexpr, BIASED: tl.constexpr):
    if BIASED:
        b_y += tl.load(p_bias + o_n, mask=o_n < C, other=0.0).to(tl.float32)[None, :]
    tl.store(entries(p_y, o_row, o_n, C), b_y.to(p_y.dtype.element_ty), mask=m_y)


@kernel
def project_kernel(
    p_x, p_weight_0, p_weight_1, p_weight_2, p_bias_0, p_bias_1, p_bias_2, p_y_0, p_y_1, p_y_2,
    rows,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    LAYERS: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the results of one to three layers."""
    o_row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row = o_row < rows
    b_y_0 = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    b_y_1 = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    b_y_2 = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for i_k in range(0, C, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_x = m_row[:, None] & (o_k < C)[None, :]
        b_x = tl.load(entries(p_x, o_row, o_k, C), mask=m_x, other=0.0)
        b_x = b_x.to(p_y_0.dtype.element_ty)
        b_y_0 = times_part(b_x, p_weight_0, o_k, o_n, b_y_0, C, PRECISION)
        if LAYERS > 1:
            b_y_1 = times_part(b_x, p_weight_1, o_k, o_n, b_y_1, C, PRECISION)
        if LAYERS > 2:
            b_y_2 = times_part(b_x, p_weight_2, o_k, o_n, b_y_2, C, PRECISION)
    m_y = m_row[:, None] & (o_n < C)[None, :]
    store_result(p_y_0, b_y_0, p_bias_0, o_row, o_n, m_y, C, BIASED)
    if LAYERS > 1:
        store_result(p_y_1, b_y_1, p_bias_1, o_row, o_n, m_y, C, BIASED)
    if LAYERS > 2:
        store_result(p_y_2, b_y_2, p_bias_2, o_row, o_n, m_y, C, BIASED)


def is_small(x: Tensor) -> bool:
    """Whether layers of these tokens (..., C) are worth no call of a library."""
    return x.numel() * x.shape[-1] <= MOST_PRODUCTS


def project(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Results of one to three linear layers.

    Args:
        x: Tokens (..., C), contiguous, as all tensors are; at least one.
        weights: (C, C) of each layer.
        biases: (C,) of each layer; or nothing.
        dtype: What is multiplied, and what comes out.

    Returns:
        (..., C) of each layer.
    """
    if not is_small(x):
        terms: list[Tensor | None] = [bias.to(dtype) for bias in biases] or [None] * len(weights)
        pairs = zip(weights, terms, strict=True)
        return [F.linear(x.to(dtype), weight.to(dtype), bias) for weight, bias in pairs]
    layers, channels = len(weights), x.shape[-1]
    rows, block = x.numel() // channels, min(power_of_two(channels, 16), CHANNELS)
    results = [torch.empty_like(x, dtype=dtype) for _ in weights]
    project_kernel[(parts_of(rows, ROWS), parts_of(channels, block))](
        x, *_three(weights), *_three(biases or weights), *_three(results), rows,
        C=channels, BLOCK_R=ROWS, BLOCK_K=min(power_of_two(channels, 16), STEP), BLOCK_N=block,
        LAYERS=layers, BIASED=bool(biases), PRECISION=precision(dtype), num_stages=3,
    )  # fmt: skip
    return results


def _three(tensors: list[Tensor]) -> list[Tensor]:
    """As many as the kernel takes; those that are too many are not looked at."""
    return [*tensors, tensors[0], tensors[0]][:3]
