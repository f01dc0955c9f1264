# SPDX-License-Identifier: Apache-2.0
"""Fused kernels for the CPU, compiled by Numba on first use.

| file | content |
|---|---|
| `operators.py` | attention of one level as a PyTorch operator |
| `pyramids.py` | pyramids of a map, and their gradients |
| `threads.py` | threads of a kernel |
| `flops.py` | formulas for PyTorch's FLOP counter |
| `kernels/` | the Numba code |
"""

import os

import torch

from quadtree_attention.ops.attention.base import installed
from quadtree_attention.ops.attention.cpu.flops import FORMULAS
from quadtree_attention.ops.attention.cpu.operators import attend_coarse, attend_fine
from quadtree_attention.ops.attention.cpu.pyramids import pyramid, to_grid, to_tree
from quadtree_attention.ops.attention.levels import levelwise
from quadtree_attention.ops.attention.problem import DTYPES, Problem
from quadtree_attention.ops.attention.tree import is_exporting
from quadtree_attention.ops.flop_counter import register_formulas

__all__ = ["CPU", "attend_coarse", "attend_fine", "pyramid", "to_grid", "to_tree"]

LARGEST_INDEX = 2**31 - 1  # indices of cells and selections are int32
NUMBA_INSTALLED = installed("numba")


def is_compiled() -> bool:
    """Return True if Numba's cache on disk has kernels, so that the first call compiles few."""
    here = os.path.join(os.path.dirname(__file__), "kernels")
    folder = os.environ.get("NUMBA_CACHE_DIR") or here
    return any(name.endswith(".nbi") for _, _, names in os.walk(folder) for name in names)


def _reasons(problem: Problem) -> list[str]:
    if is_exporting():
        return ["exported programs use the reference"]
    reasons = []
    if problem.device.type not in ("cpu", "meta"):
        reasons.append(f"it runs on the CPU, and the tensors are on {problem.device}")
    if problem.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        reasons.append(f"the dtype must be one of {names}, got {problem.dtype}")
    finest = problem.num_levels - 1
    kept = max(problem.topk, default=1)
    cells = max(
        problem.key_tree.num_cells(finest), problem.query_tree.num_cells(finest) * kept
    )  # entries of a selection
    if cells > LARGEST_INDEX:
        reasons.append(f"cells times topk must stay below 2**31, got {cells}")
    if not NUMBA_INSTALLED:
        reasons.append("numba is not installed; pip install numba")
    if not torch.compiler.is_compiling():
        register_formulas(FORMULAS)
    return reasons


CPU = levelwise("cpu", _reasons, attend_coarse, attend_fine, pyramid, to_tree, to_grid)
