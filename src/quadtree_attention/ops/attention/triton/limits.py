# SPDX-License-Identifier: Apache-2.0
"""Limits of the Triton kernels, and the resulting reasons not to run a call.

Indices of cells, programs and coordinates have 32 bits; addresses have 64. Limits are checked
before any launch.
"""

from collections.abc import Sequence
from math import prod

from quadtree_attention.ops.attention.problem import Problem
from quadtree_attention.ops.attention.tree import is_known

Grid = tuple[int, ...]

LARGEST_DIM, LARGEST_TOPK = 256, 128  # of attention
MOST_CANDIDATES = 1024  # of a query cell of variant C below the coarsest level
LARGEST_CHANNELS = 1024  # of norms
PLACE_BITS = 31  # bits of a place: the coordinates of a cell in one non-negative int32
MOST_STEPS = {1: 5, 2: 3, 3: 2}  # levels below a cell per program of `pyramid.py`
LARGEST_QUOTIENT = 2**21  # of `kernel.quotient`: below it the estimate is off by one at most
LARGEST_CELLS = 2**31 - 2**17  # of a map; offsets of blocks past its end still fit into int32
LARGEST_PROGRAMS = 2**31 - 16  # along the only axis of a launch, with room for the last block


def usual_bits(ndim: int) -> Grid:
    """Return the default bits of each axis, for grids without an extreme aspect ratio."""
    inner = PLACE_BITS // ndim if ndim != 2 else PLACE_BITS - PLACE_BITS // 2
    return PLACE_BITS - inner * (ndim - 1), *[inner] * (ndim - 1)


def bits_of(grid: Grid) -> Grid:
    """Return the bits of each axis in the places of a grid, for all levels.

    They equal `usual_bits` if the grid fits, so that kernels are compiled once for most grids.
    """
    ndim = len(grid)
    usual = usual_bits(ndim)
    # `MOST_STEPS` levels below a cell, coordinates past the edge have that many bits, too.
    needed = tuple(max((size - 1).bit_length(), MOST_STEPS[ndim]) for size in grid)
    return usual if all(n <= u for n, u in zip(needed, usual, strict=True)) else needed


def reasons(problem: Problem) -> list[str]:
    """Return the reasons why the sizes of a problem are not supported."""
    found = []
    if max(problem.head_dim, problem.value_dim) > LARGEST_DIM:
        found.append(
            f"head dims go up to {LARGEST_DIM}, got {problem.head_dim} and {problem.value_dim}"
        )
    if max(problem.topk, default=0) > LARGEST_TOPK:
        found.append(f"topk goes up to {LARGEST_TOPK}, got {problem.topk}")
    candidates = max(problem.topk, default=0) * problem.num_children
    if problem.variant == "C" and problem.num_levels > 2 and candidates > MOST_CANDIDATES:
        found.append(
            f"variant C chooses among {MOST_CANDIDATES} cells at most, got {candidates} "
            f"({problem.topk=})"
        )
    heads, single = problem.batch * problem.num_heads, problem.num_levels == 1
    for name, tree in (("query", problem.query_tree), ("key", problem.key_tree)):
        found += grid_reasons(f"the {name} grid", tree.grid)
        # a program processes 16 cells of a single level, or at least one family of cells
        blocks = -(-prod(tree.grid) // 16) if single else prod(tree.grid_at(tree.finest - 1))
        found += program_reasons(f"batch x heads x {name} families", heads * blocks)
    return found


def grid_reasons(name: str, grid: Sequence[int]) -> list[str]:
    """Return the reasons why the cells of a grid cannot be indexed."""
    if max(grid) <= 2 ** (PLACE_BITS // 3) and prod(grid) < LARGEST_QUOTIENT:
        return []  # fast path of most grids, since every call is checked
    found = []
    cells, rows = prod(grid), prod(grid[:-1])
    if cells > LARGEST_CELLS:
        found.append(f"{name} has {cells} cells, {LARGEST_CELLS} at most can be numbered")
    if rows >= LARGEST_QUOTIENT:
        found.append(
            f"{name} has {rows} rows (all axes but the last), fewer than 2**21 can be numbered"
        )
    bits = sum(bits_of(tuple(grid)))
    if bits > PLACE_BITS:
        found.append(f"coordinates on {name} {tuple(grid)} take {bits} bits, {PLACE_BITS} fit")
    return found


def program_reasons(name: str, programs: int) -> list[str]:
    """Return the reason why this number of programs cannot be launched."""
    if is_known(programs >= LARGEST_PROGRAMS):
        return [f"{name} must be less than {LARGEST_PROGRAMS}, got {programs}"]
    return []


def token_reasons(shape: Sequence[int]) -> list[str]:
    """Return the reasons why the layer norm does not support tokens (..., C)."""
    *lead, channels = shape
    found = []
    if channels > LARGEST_CHANNELS:
        found.append(f"channels go up to {LARGEST_CHANNELS}, got {channels}")
    if prod(lead) > LARGEST_CELLS:
        found.append(f"{LARGEST_CELLS} tokens at most can be numbered, got {prod(lead)}")
    return found


def map_reasons(shape: Sequence[int]) -> list[str]:
    """Reasons why norms, linear layers and encodings do not support maps (B, Y, X, C)."""
    _, *grid, channels = shape
    found = token_reasons(shape)
    padded = [size + size % 2 for size in grid]  # with all children of every parent
    if prod(padded) > LARGEST_CELLS or prod(padded[:-1]) >= LARGEST_QUOTIENT:
        found.append(
            f"a map has {LARGEST_CELLS} cells and 2**21 - 1 rows at most, got {tuple(grid)}"
        )
    blocks = -(-channels // 64)
    return found + program_reasons("batch x cells x blocks of channels", prod(shape[:-1]) * blocks)


def depthwise_reasons(shape: Sequence[int]) -> list[str]:
    """Return the reasons why depthwise convolutions do not support maps (B, *grid, C)."""
    batch, *grid, channels = shape
    found = []
    if prod(grid) > LARGEST_CELLS or prod(grid[:-1]) >= LARGEST_QUOTIENT:
        found.append(
            f"a map has {LARGEST_CELLS} cells and 2**21 - 1 rows at most, got {tuple(grid)}"
        )
    programs = 3 * batch * prod(grid) * -(-channels // 4)  # an upper bound of all launches
    return found + program_reasons("3 x batch x cells x blocks of channels", programs)


def transport_reasons(shape: Sequence[int], iterations: int) -> list[str]:
    """Return the reasons why Sinkhorn iterations do not support scores (R, S, T)."""
    matrices, sources, targets = shape
    found = []
    if sources * targets >= 2**31:
        found.append(f"a matrix has less than 2**31 scores, got {sources} x {targets}")
    blocks = -(-sources // 16) * -(-targets // 32)
    found += program_reasons("matrices x blocks of scores", matrices * blocks)
    return found + program_reasons("matrices x iterations", matrices * (iterations + 1))
