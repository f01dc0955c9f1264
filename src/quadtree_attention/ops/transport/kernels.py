# SPDX-License-Identifier: Apache-2.0
"""Kernels of Sinkhorn iterations in the log domain, and their launches.

A half iteration computes new potentials of one side from the last potentials of the other (the
*added* ones): minus the logarithm of the sum of `exp(score + added)`, dustbin included. Forward and
backward of a half iteration take one pass over the scores each. The gradient of the scores is a sum
over all half iterations, computed from all potentials in one pass at the end.

No sum of exponentials is saved: with the new potentials, which are minus its logarithm, the
derivative of a half iteration is `-exp(score + added + new)`, the assignment after it.
"""

from math import log
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quadtree_attention.ops.kernel import kernel, parts_of, power_of_two

# Tile sizes (new potentials, summed scores): adjacent numbers should fill cache lines, and sums
# within a thread are cheaper than sums between threads.
ROW_TILE = (16, 256)
COLUMN_TILE = (32, 128)
GRADIENT_TILE = (16, 128)  # three tiles are in registers


class Side(NamedTuple):
    """Potentials of one side after each iteration, or their gradients.

    Attributes:
        cells: (iterations + 1, R, N)
        bin: (iterations + 1, R)
    """

    cells: Tensor
    bin: Tensor


@triton.jit
def log_sum(first, p_x, size, BLOCK: tl.constexpr):
    """Logarithm of the sum of the exponentials of `first` and a vector."""
    top, total = first, 1.0
    for i in range(0, size, BLOCK):
        o_x = i + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o_x, mask=o_x < size, other=float("-inf"))
        higher = tl.maximum(top, tl.max(b_x, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(b_x - higher), axis=0)
        top = higher
    return top + tl.log(total)


@triton.jit
def weighted_sum(shift, p_weight, p_x, size, BLOCK: tl.constexpr):
    """Sum of `weight * exp(shift + x)` over a vector."""
    total = 0.0
    for i in range(0, size, BLOCK):
        o_x = i + tl.arange(0, BLOCK)
        b_weight = tl.load(p_weight + o_x, mask=o_x < size, other=0.0)
        b_x = tl.load(p_x + o_x, mask=o_x < size, other=float("-inf"))
        total += tl.sum(b_weight * tl.exp(shift + b_x), axis=0)
    return total


@triton.jit
def load_tile(p_scores, o_a, o_b, size_a, size_b, s_a, s_b):
    """Scores (a, b) of one matrix; -inf past the edges."""
    p_tile = p_scores + o_a[:, None] * s_a + o_b[None, :] * s_b
    m_tile = (o_a < size_a)[:, None] & (o_b < size_b)[None, :]
    return tl.load(p_tile, mask=m_tile, other=float("-inf"))


# Kernels are specialised for sizes and strides of scores that are multiples of 16, which allows
# vectorised loads.
@kernel
def half_fwd_kernel(
    p_scores, p_bin, p_added, p_added_bin, p_new, p_new_bin, added_row, new_row,
    size_new, size_added, s_new, s_added, mass,
    BLOCK_NEW: tl.constexpr, BLOCK_ADDED: tl.constexpr,
):  # fmt: skip
    """New potentials of one side. Sums start with the share of the dustbin."""
    blocks = tl.cdiv(size_new, BLOCK_NEW)
    i_row, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_added, i_new = (added_row + i_row).to(tl.int64), (new_row + i_row).to(tl.int64)
    p_scores += i_row.to(tl.int64) * size_new * size_added
    p_added += i_added * size_added
    bin_score, added_bin = tl.load(p_bin), tl.load(p_added_bin + i_added)
    o_new = i_block * BLOCK_NEW + tl.arange(0, BLOCK_NEW)
    b_top = tl.zeros((BLOCK_NEW,), tl.float32) + (bin_score + added_bin)
    b_total = tl.zeros((BLOCK_NEW,), tl.float32) + 1.0
    for i in range(0, size_added, BLOCK_ADDED):
        o_added = i + tl.arange(0, BLOCK_ADDED)
        b_x = load_tile(p_scores, o_new, o_added, size_new, size_added, s_new, s_added)
        b_x += tl.load(p_added + o_added, mask=o_added < size_added, other=0.0)[None, :]
        b_higher = tl.maximum(b_top, tl.max(b_x, axis=1))
        b_sum = tl.sum(tl.exp(b_x - b_higher[:, None]), axis=1)
        b_total = b_total * tl.exp(b_top - b_higher) + b_sum
        b_top = b_higher
    tl.store(p_new + i_new * size_new + o_new, -b_top - tl.log(b_total), mask=o_new < size_new)
    if i_block == 0:
        all_added = log_sum(added_bin, p_added, size_added, BLOCK_ADDED)
        tl.store(p_new_bin + i_new, mass - bin_score - all_added)


@kernel
def half_bwd_kernel(
    p_scores, p_bin, p_added, p_added_bin, p_new, p_new_bin,
    p_dadded, p_dadded_bin, p_dnew, p_dnew_bin, added_row, new_row,
    size_new, size_added, s_new, s_added, mass,
    BLOCK_NEW: tl.constexpr, BLOCK_ADDED: tl.constexpr,
):  # fmt: skip
    """Gradient of the added potentials of a half iteration from the gradient of the new ones."""
    blocks = tl.cdiv(size_added, BLOCK_ADDED)
    i_row, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_added, i_new = (added_row + i_row).to(tl.int64), (new_row + i_row).to(tl.int64)
    p_scores += i_row.to(tl.int64) * size_new * size_added
    p_new += i_new * size_new
    p_dnew += i_new * size_new
    o_added = i_block * BLOCK_ADDED + tl.arange(0, BLOCK_ADDED)
    m_added = o_added < size_added
    b_added = tl.load(p_added + i_added * size_added + o_added, mask=m_added, other=0.0)
    bin_score, dnew_bin = tl.load(p_bin), tl.load(p_dnew_bin + i_new)
    shift = bin_score + tl.load(p_new_bin + i_new) - mass  # of the row of the new side's dustbin
    b_sum = dnew_bin * tl.exp(shift + b_added)
    for i in range(0, size_new, BLOCK_NEW):
        o_new = i + tl.arange(0, BLOCK_NEW)
        b_new = tl.load(p_new + o_new, mask=o_new < size_new, other=0.0)
        b_dnew = tl.load(p_dnew + o_new, mask=o_new < size_new, other=0.0)
        b_x = load_tile(p_scores, o_added, o_new, size_added, size_new, s_added, s_new)
        b_x = tl.exp(b_x + b_added[:, None] + b_new[None, :])
        b_sum += tl.sum(b_x * b_dnew[None, :], axis=1)
    tl.store(p_dadded + i_added * size_added + o_added, -b_sum, mask=m_added)
    if i_block == 0:
        added_bin = tl.load(p_added_bin + i_added)
        total = weighted_sum(bin_score + added_bin, p_dnew, p_new, size_new, BLOCK_NEW)
        tl.store(p_dadded_bin + i_added, -total - dnew_bin * tl.exp(shift + added_bin))


@triton.jit
def load_scaled(p_x, o_x, size):
    """Part of a vector of logarithms, to base 2."""
    return tl.load(p_x + o_x, mask=o_x < size, other=0.0) * 1.4426950408889634


@kernel
def scores_bwd_kernel(
    p_scores, p_left, p_right, p_dleft, p_dright, p_dscores, rows, iterations, sources, targets,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of scores.

    It is minus the sum of the assignments of all half iterations, weighted by the gradients of
    their new potentials. Logarithms are to base 2.
    """
    blocks_t = tl.cdiv(targets, BLOCK_T)
    blocks = tl.cdiv(sources, BLOCK_S) * blocks_t
    i_row, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    o_s = (i_block // blocks_t) * BLOCK_S + tl.arange(0, BLOCK_S)
    o_t = (i_block % blocks_t) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_row = i_row.to(tl.int64)
    p_scores += i_row * sources * targets
    p_dscores += i_row * sources * targets
    p_left += i_row * sources
    p_dleft += i_row * sources
    p_right += i_row * targets
    p_dright += i_row * targets
    step_left, step_right = rows.to(tl.int64) * sources, rows.to(tl.int64) * targets
    b_x = load_tile(p_scores, o_s, o_t, sources, targets, targets, 1) * 1.4426950408889634
    b_dx = tl.zeros((BLOCK_S, BLOCK_T), tl.float32)
    b_right = load_scaled(p_right, o_t, targets)
    for _ in range(iterations):
        b_left = b_x + load_scaled(p_left, o_s, sources)[:, None]
        b_dleft = tl.load(p_dleft + o_s, mask=o_s < sources, other=0.0)
        b_dx -= b_dleft[:, None] * tl.exp2(b_left + b_right[None, :])
        p_left += step_left
        p_dleft += step_left
        p_right += step_right
        p_dright += step_right
        b_right = load_scaled(p_right, o_t, targets)
        b_dright = tl.load(p_dright + o_t, mask=o_t < targets, other=0.0)
        b_dx -= b_dright[None, :] * tl.exp2(b_left + b_right[None, :])
    b_left = b_x + load_scaled(p_left, o_s, sources)[:, None]
    b_dleft = tl.load(p_dleft + o_s, mask=o_s < sources, other=0.0)
    b_dx -= b_dleft[:, None] * tl.exp2(b_left + b_right[None, :])
    m_tile = (o_s < sources)[:, None] & (o_t < targets)[None, :]
    tl.store(p_dscores + o_s[:, None] * targets + o_t[None, :], b_dx, mask=m_tile)


def sinkhorn(scores: Tensor, bin_score: Tensor, iterations: int) -> tuple[Side, Side]:
    """Compute left and right potentials of all iterations.

    Right potentials start with zeros before the first iteration; left potentials end with those
    computed after the last one.

    Args:
        scores: (R, S, T), contiguous.
        bin_score: A scalar.
        iterations: How many.
    """
    left, right = (_empty_side(scores, iterations, size) for size in scores.shape[1:])
    right.cells[0] = 0
    right.bin[0] = 0
    with torch.cuda.device_of(scores):
        for half in range(2 * iterations + 1):
            _make_new(scores, bin_score, left, right, half)
    return left, right


def sinkhorn_backward(
    scores: Tensor, bin_score: Tensor, left: Side, right: Side, dlast: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Gradients of scores and bin_score.

    Args:
        scores: (R, S, T), contiguous.
        bin_score: A scalar.
        left: As `sinkhorn` returned it.
        right: As `sinkhorn` returned it.
        dlast: Gradients of the last left (R, S), right (R, T) and dustbin on the right (R, 1).
    """
    iterations = len(left.cells) - 1
    dleft, dright = (_empty_side(scores, iterations, size) for size in scores.shape[1:])
    dleft.cells[-1] = dlast[0]
    dleft.bin[-1] = 0
    with torch.cuda.device_of(scores):
        # not through the first half iteration, whose added potentials are constant
        for half in range(2 * iterations, 0, -1):
            _take_back(scores, bin_score, left, right, dleft, dright, half)
            if half == 2 * iterations:
                dright.cells[-1] += dlast[1]
                dright.bin[-1] += dlast[2][:, 0]
        dscores = _scores_gradient(scores, left, right, dleft, dright)
    return dscores, _bin_gradient(bin_score, left, right, dleft, dright)


def _empty_side(scores: Tensor, iterations: int, size: int) -> Side:
    steps, rows = iterations + 1, len(scores)
    return Side(scores.new_empty(steps, rows, size), scores.new_empty(steps, rows))


def _make_new(scores: Tensor, bin_score: Tensor, left: Side, right: Side, half: int) -> None:
    """Run a half iteration; even ones sum over rows, for the left side."""
    by_row = half % 2 == 0
    new, added = (left, right) if by_row else (right, left)
    most_new, most_added = ROW_TILE if by_row else COLUMN_TILE
    size_new, size_added = new.cells.shape[-1], added.cells.shape[-1]
    block_new = _block(size_new, most_new)
    half_fwd_kernel[(len(scores) * parts_of(size_new, block_new),)](
        scores, bin_score, added.cells, added.bin, new.cells, new.bin, *_places(scores, half),
        BLOCK_NEW=block_new, BLOCK_ADDED=_block(size_added, most_added),
    )  # fmt: skip


def _take_back(
    scores: Tensor, bin_score: Tensor, left: Side, right: Side, dleft: Side, dright: Side, half: int
) -> None:
    """Run backward of a half iteration; sums over rows become sums over columns."""
    by_row = half % 2 == 0
    new, added, dnew, dadded = left, right, dleft, dright
    if not by_row:
        new, added, dnew, dadded = right, left, dright, dleft
    most_added, most_new = COLUMN_TILE if by_row else ROW_TILE
    size_new, size_added = new.cells.shape[-1], added.cells.shape[-1]
    block_added = _block(size_added, most_added)
    half_bwd_kernel[(len(scores) * parts_of(size_added, block_added),)](
        scores, bin_score, added.cells, added.bin, new.cells, new.bin,
        dadded.cells, dadded.bin, dnew.cells, dnew.bin, *_places(scores, half),
        BLOCK_NEW=_block(size_new, most_new), BLOCK_ADDED=block_added,
    )  # fmt: skip


def _places(scores: Tensor, half: int) -> tuple[float, ...]:
    """Return arguments of both kernels of a half iteration, from `added_row` to `mass`."""
    rows, sources, targets = scores.shape
    first_rows = half // 2 * rows, (half + 1) // 2 * rows
    if half % 2 == 0:
        return *first_rows, sources, targets, targets, 1, log(targets)
    return *first_rows, targets, sources, 1, targets, log(sources)


def _scores_gradient(scores: Tensor, left: Side, right: Side, dleft: Side, dright: Side) -> Tensor:
    rows, sources, targets = scores.shape
    block_s, block_t = _block(sources, GRADIENT_TILE[0]), _block(targets, GRADIENT_TILE[1])
    dscores = torch.empty_like(scores)
    scores_bwd_kernel[(rows * parts_of(sources, block_s) * parts_of(targets, block_t),)](
        scores, left.cells, right.cells, dleft.cells, dright.cells, dscores,
        rows, len(left.cells) - 1, sources, targets, BLOCK_S=block_s, BLOCK_T=block_t,
    )  # fmt: skip
    return dscores


def _bin_gradient(bin_score: Tensor, left: Side, right: Side, dleft: Side, dright: Side) -> Tensor:
    """Return the gradient of `bin_score`: the dustbins' shares in all half iterations."""
    in_right = (bin_score + left.cells + right.bin[..., None]).exp()
    in_left = (bin_score + right.cells[1:] + left.bin[:-1, :, None]).exp()
    cells = (dleft.cells * in_right).sum() + (dright.cells[1:] * in_left).sum()
    return -cells - dleft.bin.sum() - dright.bin[1:].sum()


def _block(size: int, most: int) -> int:
    return min(most, power_of_two(size))
