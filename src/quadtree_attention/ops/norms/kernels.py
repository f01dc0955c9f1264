# SPDX-License-Identifier: Apache-2.0
"""Kernels of norms, and their launches: layer norm of tokens, and one-group norm of maps.

Torch uses one block of threads per token, most of which are idle for 32 channels, and eight passes
over a map for norm, activation and gradient. Here a program processes a tile of tokens, and a map
is read once for its statistics and once for the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quadtree_attention.ops import replay
from quadtree_attention.ops.attention.tree import rows_by_parent
from quadtree_attention.ops.kernel import (
    kernel,
    load_rows,
    parts_of,
    power_of_two,
    quotient,
    store_rows,
)

TILE = 4096  # numbers of a tile
BACKWARD_TILE = 2048  # with additional sums in registers
PROGRAMS = 512  # programs that share one pass, about four per multiprocessor
LARGEST_SPANS = 64  # maximum parts of a map whose moments or sums are added last
GELU, RELU = 1, 2
MOMENTS = tl.constexpr(128)  # parts of a map whose moments are added at a time


@triton.jit
def standardised(b_x, m_c, eps, share):
    """Rows with mean 0 and variance 1, and their reciprocal standard deviation."""
    b_mean = tl.sum(b_x, axis=1)[:, None] * share
    b_x = tl.where(m_c, b_x - b_mean, 0.0)
    b_variance = tl.sum(b_x * b_x, axis=1)[:, None] * share
    b_rstd = 1.0 / tl.sqrt(b_variance + eps)
    return b_x * b_rstd, b_rstd


@kernel
def layer_norm_fwd_kernel(
    p_x, p_y, p_weight, p_bias, rows, eps, share, C,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    o_row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, BLOCK_C)
    m_row, m_c = o_row < rows, o_c < C
    b_x = load_rows(p_x, o_row, m_row, C, C, BLOCK_C).to(tl.float32)
    b_x, _ = standardised(b_x, m_c[None, :], eps, share)
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_y = b_x * b_weight[None, :] + b_bias[None, :]
    store_rows(p_y, b_y.to(p_y.dtype.element_ty), o_row, m_row, C, C)


@kernel
def layer_norm_bwd_kernel(
    p_dy, p_x, p_dx, p_weight, p_sums, rows, eps, share, C,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Gradient of the tokens, and partial sums of the gradients of weight and bias."""
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_dweight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    b_dbias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for i_block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), tl.num_programs(0)):
        o_row = i_block * BLOCK_R + tl.arange(0, BLOCK_R)
        m_row = o_row < rows
        b_x = load_rows(p_x, o_row, m_row, C, C, BLOCK_C).to(tl.float32)
        b_dy = load_rows(p_dy, o_row, m_row, C, C, BLOCK_C).to(tl.float32)
        b_x, b_rstd = standardised(b_x, m_c[None, :], eps, share)
        b_dweight += b_dy * b_x
        b_dbias += b_dy
        b_dy = b_dy * b_weight[None, :]
        b_along = tl.sum(b_dy * b_x, axis=1)[:, None] * share
        b_mean = tl.sum(b_dy, axis=1)[:, None] * share
        b_dx = (b_dy - b_x * b_along - b_mean) * b_rstd
        store_rows(p_dx, b_dx.to(p_dx.dtype.element_ty), o_row, m_row, C, C)
    p_sums += tl.program_id(0).to(tl.int64) * 2 * C + o_c
    tl.store(p_sums, tl.sum(b_dweight, axis=0), mask=m_c)
    tl.store(p_sums + C, tl.sum(b_dbias, axis=0), mask=m_c)


@triton.jit
def row_by_parent(o_row, size_1, BY_PARENT: tl.constexpr):
    """Index of a cell of a map of `size_1` columns in an order with adjacent siblings."""
    o_to = o_row
    if BY_PARENT:
        i_0 = quotient(o_row, size_1)
        i_1 = o_row - i_0 * size_1
        o_parent = (i_0 >> 1) * ((size_1 + 1) >> 1) + (i_1 >> 1)
        o_to = o_parent * 4 + (i_0 & 1) * 2 + (i_1 & 1)
    return o_to


@triton.jit
def activated(b_x, ACT: tl.constexpr):
    """GELU or ReLU."""
    b_y = tl.maximum(b_x, 0.0)
    if ACT == 1:
        b_y = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    return b_y


@triton.jit
def slope(b_x, ACT: tl.constexpr):
    """Derivative of the activation."""
    if ACT == 1:
        b_density = 0.3989422804014327 * tl.exp(-0.5 * b_x * b_x)
        b_slope = 0.5 * (1.0 + tl.erf(b_x * 0.7071067811865476)) + b_x * b_density
    else:
        b_slope = tl.where(b_x > 0.0, 1.0, 0.0)
    return b_slope


@triton.jit
def store_moments(p_moments, count, mean, square):
    """Count, mean, and sum of squared deviations."""
    tl.store(p_moments, count)
    tl.store(p_moments + 1, mean)
    tl.store(p_moments + 2, square)


@triton.jit
def map_and_part(parts):
    """The map of this program, in 64 bits, and the part; parts of a map are adjacent.

    Launches have one axis, since the others are limited to 65,535.
    """
    i_map = tl.program_id(0) // parts
    return i_map.to(tl.int64), tl.program_id(0) - i_map * parts


@kernel
def map_moments_kernel(
    p_x, p_moments, rows, spans, per_span, C,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Moments of a part of a map.

    Its first number replaces the mean, which is not known yet. Without this shift, the variance of
    a map with a large mean would be lost in rounding.
    """
    i_map, i_span = map_and_part(spans)
    o_c = tl.arange(0, BLOCK_C)
    start, end = i_span * per_span, tl.minimum((i_span + 1) * per_span, rows)
    p_x += i_map * rows * C
    first = tl.load(p_x + start.to(tl.int64) * C).to(tl.float32)
    b_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    b_square = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for i_row in range(start, end, BLOCK_R):
        o_row = i_row + tl.arange(0, BLOCK_R)
        m_row = o_row < end
        b_x = load_rows(p_x, o_row, m_row, C, C, BLOCK_C).to(tl.float32) - first
        b_x = tl.where(m_row[:, None] & (o_c < C)[None, :], b_x, 0.0)
        b_sum += b_x
        b_square += b_x * b_x
    count = 1.0 * (end - start) * C
    shift = tl.sum(tl.sum(b_sum, axis=1), axis=0) / count
    square = tl.sum(tl.sum(b_square, axis=1), axis=0) - shift * shift * count
    p_moments += (i_map * spans + i_span) * 3
    store_moments(p_moments, count, first + shift, tl.maximum(square, 0.0))


@triton.jit
def statistics(p_moments, parts, eps):
    """Mean and reciprocal standard deviation of a map, from the moments of its parts."""
    b_count = tl.zeros((MOMENTS,), tl.float32)
    b_total = tl.zeros((MOMENTS,), tl.float32)
    for i_p in range(0, parts, MOMENTS):
        o_p = i_p + tl.arange(0, MOMENTS)
        b_own = tl.load(p_moments + o_p * 3, mask=o_p < parts, other=0.0)
        b_count += b_own
        b_total += b_own * tl.load(p_moments + o_p * 3 + 1, mask=o_p < parts, other=0.0)
    count = tl.sum(b_count, axis=0)
    mean = tl.sum(b_total, axis=0) / count
    b_square = tl.zeros((MOMENTS,), tl.float32)
    for i_p in range(0, parts, MOMENTS):
        o_p = i_p + tl.arange(0, MOMENTS)
        b_own = tl.load(p_moments + o_p * 3, mask=o_p < parts, other=0.0)
        b_away = tl.load(p_moments + o_p * 3 + 1, mask=o_p < parts, other=0.0) - mean
        b_square += tl.load(p_moments + o_p * 3 + 2, mask=o_p < parts, other=0.0)
        b_square += b_own * b_away * b_away
    return mean, 1.0 / tl.sqrt(tl.sum(b_square, axis=0) / count + eps)


@kernel
def map_norm_fwd_kernel(
    p_x, p_y, p_weight, p_bias, p_moments, p_stats, rows, rows_out, size_1, parts, eps, C,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, ACT: tl.constexpr, BY_PARENT: tl.constexpr,
):  # fmt: skip
    i_map, i_block = map_and_part(tl.cdiv(rows, BLOCK_R))
    o_row = i_block * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, BLOCK_C)
    m_row, m_c = o_row < rows, o_c < C
    p_x += i_map * rows * C
    mean, rstd = statistics(p_moments + i_map * parts * 3, parts, eps)
    if i_block == 0:
        tl.store(p_stats + i_map * 2, mean)
        tl.store(p_stats + i_map * 2 + 1, rstd)
    b_x = load_rows(p_x, o_row, m_row, C, C, BLOCK_C).to(tl.float32)
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_y = activated((b_x - mean) * rstd * b_weight[None, :] + b_bias[None, :], ACT)
    p_y += i_map * rows_out * C
    o_to = row_by_parent(o_row, size_1, BY_PARENT)
    store_rows(p_y, b_y.to(p_y.dtype.element_ty), o_to, m_row, C, C)


@kernel
def map_norm_bwd_sums_kernel(
    p_dy, p_x, p_weight, p_bias, p_stats, p_sums, rows, rows_out, size_1, spans, per_span, C,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, ACT: tl.constexpr, BY_PARENT: tl.constexpr,
):  # fmt: skip
    """Partial sums of the gradients of weight and bias, over a part of a map."""
    i_map, i_span = map_and_part(spans)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    p_x += i_map * rows * C
    p_dy += i_map * rows_out * C
    mean, rstd = tl.load(p_stats + i_map * 2), tl.load(p_stats + i_map * 2 + 1)
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_dweight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    b_dbias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    end = tl.minimum((i_span + 1) * per_span, rows)
    for i_row in range(i_span * per_span, end, BLOCK_R):
        o_row = i_row + tl.arange(0, BLOCK_R)
        m_row = o_row < end
        b_x = (load_rows(p_x, o_row, m_row, C, C, BLOCK_C).to(tl.float32) - mean) * rstd
        o_from = row_by_parent(o_row, size_1, BY_PARENT)
        b_dy = load_rows(p_dy, o_from, m_row, C, C, BLOCK_C).to(tl.float32)
        b_dy = b_dy * slope(b_x * b_weight + b_bias, ACT)
        b_dweight += b_dy * b_x
        b_dbias += b_dy
    p_sums += (i_map * spans + i_span) * 2 * C + o_c
    tl.store(p_sums, tl.sum(b_dweight, axis=0), mask=m_c)
    tl.store(p_sums + C, tl.sum(b_dbias, axis=0), mask=m_c)


@kernel
def map_norm_bwd_kernel(
    p_dy, p_x, p_dx, p_weight, p_bias, p_stats, p_sums, rows, rows_out, size_1, per_map, C,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, ACT: tl.constexpr, BY_PARENT: tl.constexpr,
):  # fmt: skip
    """Gradient of the map from the sums over the whole map; `ACT` 0: `p_dy` is that of the norm."""
    i_map, i_block = map_and_part(tl.cdiv(rows, BLOCK_R))
    o_row = i_block * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, BLOCK_C)
    m_row, m_c = o_row < rows, o_c < C
    p_x += i_map * rows * C
    p_dx += i_map * rows * C
    p_dy += i_map * rows_out * C
    mean, rstd = tl.load(p_stats + i_map * 2), tl.load(p_stats + i_map * 2 + 1)
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    # The sums over all channels are computed from the gradients of weight and bias of this map.
    p_sums += i_map * per_map + o_c
    count = 1.0 * rows * C  # may exceed 2**31
    along = tl.sum(tl.load(p_sums, mask=m_c, other=0.0) * b_weight, axis=0) / count
    level = tl.sum(tl.load(p_sums + C, mask=m_c, other=0.0) * b_weight, axis=0) / count
    b_x = (load_rows(p_x, o_row, m_row, C, C, BLOCK_C).to(tl.float32) - mean) * rstd
    o_from = row_by_parent(o_row, size_1, BY_PARENT)
    b_dy = load_rows(p_dy, o_from, m_row, C, C, BLOCK_C).to(tl.float32)
    if ACT > 0:
        b_dy *= slope(b_x * b_weight[None, :] + b_bias, ACT)
    b_dy *= b_weight[None, :]
    b_dx = (b_dy - b_x * along - level) * rstd
    store_rows(p_dx, b_dx.to(p_dx.dtype.element_ty), o_row, m_row, C, C)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """(..., C) contiguous -> the same in `dtype`."""
    if x.numel() == 0:
        return torch.empty_like(x, dtype=dtype)
    (y,) = replay.replayed(
        lambda: [_layer_norm(x, weight, bias, eps, dtype)],
        [x, weight, bias],
        ("layer_norm", eps, dtype),
    )
    return y


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    y = torch.empty_like(x, dtype=dtype)
    rows, tile = x.numel() // x.shape[-1], tile_of(x.shape[-1])
    with torch.cuda.device_of(x):
        layer_norm_fwd_kernel[(parts_of(rows, tile["BLOCK_R"]),)](
            x, y, weight, bias, rows, eps, 1 / x.shape[-1], x.shape[-1], **tile
        )
    return y


def layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias together, (2, C) float32."""
    dx = torch.empty_like(x)
    channels = x.shape[-1]
    rows, tile = x.numel() // channels, tile_of(channels, BACKWARD_TILE)
    programs = max(1, min(PROGRAMS, parts_of(rows, tile["BLOCK_R"])))
    if rows == 0:
        return dx, x.new_zeros(2, channels, dtype=torch.float32)
    parts = x.new_empty(programs, 2, channels, dtype=torch.float32)
    with torch.cuda.device_of(x):
        layer_norm_bwd_kernel[(programs,)](
            dy, x, dx, weight, parts, rows, eps, 1 / channels, channels, **tile
        )
    return dx, parts.sum(dim=0)


def map_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, act: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Norm over each whole map, followed by the activation.

    Args:
        x: Maps (B, T, C), contiguous.
        weight: (C,)
        bias: (C,)
        eps: Added to the variance.
        act: `GELU` or `RELU`.
        columns: 0 keeps the order of cells. Otherwise the columns of the map: siblings are then
            adjacent in the result, (B, parents * 4, C), with zero padding.

    Returns:
        The result, and mean and reciprocal standard deviation of each map (B, 2).
    """
    if x.numel() == 0:
        return _map_norm(x, weight, bias, eps, act, columns)
    y, stats = replay.replayed(
        lambda: list(_map_norm(x, weight, bias, eps, act, columns)),
        [x, weight, bias],
        ("map_norm", eps, act, columns),
    )
    return y, stats


def _map_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, act: int, columns: int
) -> tuple[Tensor, Tensor]:
    batch, rows, channels = x.shape
    rows_out = rows_by_parent(rows, columns)
    y = x.new_empty(batch, rows_out, channels)
    if rows_out > rows:
        replay.noted(Tensor.zero_, y)
    stats = x.new_empty(batch, 2, dtype=torch.float32)
    if batch == 0:
        return y, stats
    tile = tile_of(channels)
    with torch.cuda.device_of(x):
        moments = moments_of(x)
        parts = moments.shape[1]
        map_norm_fwd_kernel[(batch * parts_of(rows, tile["BLOCK_R"]),)](
            x, y, weight, bias, moments, stats, rows, rows_out, columns, parts, eps,
            channels, ACT=act, BY_PARENT=columns > 0, **tile,
        )  # fmt: skip
    return y, stats


def moments_of(x: Tensor) -> Tensor:
    """Moments of the parts of each map (B, T, C), see `store_moments`: (B, parts, 3) float32."""
    batch, rows, channels = x.shape
    tile, spans, per_span = spans_of(batch, rows, channels)
    moments = x.new_empty(batch, spans, 3, dtype=torch.float32)
    map_moments_kernel[(batch * spans,)](x, moments, rows, spans, per_span, channels, **tile)
    return moments


def map_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, act: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias together, (2, C) float32."""
    batch, rows, channels = x.shape
    tile, spans, per_span = spans_of(batch, rows, channels, BACKWARD_TILE)
    dx = torch.empty_like(x)
    if batch == 0:
        return dx, x.new_zeros(2, channels, dtype=torch.float32)
    sums = x.new_empty(batch, spans, 2, channels, dtype=torch.float32)
    options = {"ACT": act, "BY_PARENT": columns > 0, **tile}
    with torch.cuda.device_of(x):
        map_norm_bwd_sums_kernel[(batch * spans,)](
            dy, x, weight, bias, stats, sums, rows, dy.shape[1], columns, spans, per_span, channels,
            **options,
        )  # fmt: skip
        by_map = sums.sum(dim=1)  # (B, 2, C)
        map_norm_bwd_kernel[(batch * parts_of(rows, tile["BLOCK_R"]),)](
            dy, x, dx, weight, bias, stats, by_map, rows, dy.shape[1], columns, 2 * channels,
            channels, **options,
        )  # fmt: skip
    return dx, by_map.sum(dim=0)


def tile_of(channels: int, numbers: int = TILE) -> dict[str, int]:
    block = power_of_two(channels, least=4)
    return {"BLOCK_C": block, "BLOCK_R": max(1, numbers // block)}


def spans_of(
    batch: int, rows: int, channels: int, numbers: int = TILE
) -> tuple[dict[str, int], int, int]:
    """Return the tile, the number of parts of a map, and the rows of a part."""
    tile = tile_of(channels, numbers)
    blocks = parts_of(rows, tile["BLOCK_R"])
    spans = max(1, min(PROGRAMS // max(1, batch), LARGEST_SPANS, blocks))
    per_span = parts_of(blocks, spans) * tile["BLOCK_R"]
    return tile, parts_of(rows, per_span), per_span
