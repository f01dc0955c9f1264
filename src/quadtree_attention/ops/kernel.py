# SPDX-License-Identifier: Apache-2.0
"""Code shared by the kernels of all operators.

Names in kernels: `p_` pointers, `b_` blocks of values, `o_` offsets, `m_` masks, `i_` program and
loop indices, `s_` strides. Addresses are computed in 64 bits.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl

from quadtree_attention.ops import launches, replay

# Arguments that depend on the map: no specialised kernels for multiples of 16 and for 1.
SIZES = {
    "above", "above_0", "above_1", "above_2", "added_row", "batch", "batch_heads", "cells",
    "cells_above", "entries", "gains_of_level", "heads", "iterations", "kept", "key_0", "key_1",
    "key_2", "keys", "level", "levels", "most_spans", "new_row", "parts", "per_head", "per_map",
    "per_span", "query_1", "query_2", "rows", "rows_out", "size_0", "size_1", "size_2", "spans",
    "width",
}  # fmt: skip


class Kernel:
    """A kernel to launch on a grid, which records its launches for replay."""

    def __init__(self, function: Callable[..., None]) -> None:
        update_wrapper(self, function)
        parameters = signature(function).parameters
        self.parameters = list(parameters)
        self.constants = {x.name for x in parameters.values() if x.annotation is tl.constexpr}
        self.sizes = [name for name in self.parameters if name in SIZES]
        self.jit: Any = triton.jit(function, do_not_specialize=self.sizes)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if launches.is_recording():
            launch = partial(launches.note, self, grid)
        else:
            launch = partial(self._launch_and_tell, grid) if replay.is_noting() else self.jit[grid]
        # Defaults differ between versions of Triton, which could change near ties.
        return partial(launch, enable_fp_fusion=True)

    def _launch_and_tell(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        compiled = self.jit[grid](*arguments, **constants)
        rest = self.parameters[len(arguments) :]
        values = [*arguments, *(constants[name] for name in rest)]
        if not isinstance(self.jit, triton.JITFunction):  # the interpreter does not compile
            replay.note(self.jit[grid], values, by_address=False)
        else:
            replay.note_kernel(compiled, (*grid, 1, 1)[:3], values)


def kernel(function: Callable[..., None]) -> Any:
    """Create a kernel with size arguments, without default values of parameters."""
    return Kernel(function)


def parts_of(size: int, part: int) -> int:
    """Ceiling division on the host, where `triton.cdiv` is slow."""
    return -(-size // part)


def power_of_two(n: int, least: int = 1) -> int:
    return max(least, 1 << max(n - 1, 0).bit_length())


def precision(dtype: torch.dtype) -> str:
    """Three passes of the matrix unit keep float32 exact; half precision ignores this."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def quotient(o_x, size):
    """`o_x // size` for results below `LARGEST_QUOTIENT`, much faster than an integer division."""
    o_q = (o_x.to(tl.float32) * (1.0 / size)).to(tl.int32)
    o_q -= (o_q * size > o_x).to(tl.int32)
    return o_q + ((o_q + 1) * size <= o_x).to(tl.int32)


@triton.jit
def entries(p_x, o_row, o_c, C):
    """Addresses of channels `o_c` of rows of a dense array."""
    return p_x + o_row.to(tl.int64)[:, None] * C + o_c[None, :]


@triton.jit
def load_rows(p_x, o_row, m_row, s_t, D, BLOCK_D: tl.constexpr):
    """Rows of an array whose last axis is dense; zeros where `m_row` is false."""
    o_d = tl.arange(0, BLOCK_D)
    p_rows = p_x + o_row.to(tl.int64)[:, None] * s_t + o_d[None, :]
    return tl.load(p_rows, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def store_rows(p_x, b_x, o_row, m_row, s_t, D):
    o_d = tl.arange(0, b_x.shape[1])
    p_rows = p_x + o_row.to(tl.int64)[:, None] * s_t + o_d[None, :]
    tl.store(p_rows, b_x, mask=m_row[:, None] & (o_d < D)[None, :])


@triton.jit
def share_of_levels(p_logits, LEVELS: tl.constexpr, BLOCK_L: tl.constexpr):
    """Softmax of the logits of all levels."""
    o_l = tl.arange(0, BLOCK_L)
    b_logits = tl.load(p_logits + o_l, mask=o_l < LEVELS, other=float("-inf")).to(tl.float32)
    b_shares = tl.exp(b_logits - tl.max(b_logits, axis=0))
    return b_shares / tl.sum(b_shares, axis=0)
