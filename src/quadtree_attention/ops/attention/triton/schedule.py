# SPDX-License-Identifier: Apache-2.0
"""Launch schedule of a call, without its tensors.

Grids, integer arguments and constants of kernels, and sizes of temporary memory, are functions of
shapes, strides, dtype and options. They are computed once per call signature.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops.attention.triton.kernels import coarse, fine, pyramid, users
from quadtree_attention.ops.attention.triton.layout import (
    ENTRIES,
    Grids,
    Layout,
    Shape,
    Strides,
    dense_strides,
    grids_of,
    layout_of,
    rounded,
    row_strides,
)
from quadtree_attention.ops.attention.triton.limits import LARGEST_PROGRAMS, MOST_STEPS, Grid
from quadtree_attention.ops.kernel import parts_of, power_of_two, precision

ROWS = 16  # minimum rows of a matrix unit
TILE_BYTES = 32 * 1024  # shared memory of a tile of keys
PART_BYTES = 8 * 1024  # keys or values that fit into the registers of a warp
LEVELS_AT_ONCE = 7  # levels whose K are packed into one number
SHARE_BLOCK = 1024  # partial gradients of a share that are added at a time


class Look(NamedTuple):
    """Key of a schedule.

    Attributes:
        maps: Shape (B, *grid, N, D) and strides of each map of q, of k and of v: one, to be
            averaged into levels, or one per level, coarse -> fine.
        masked: True if there are masks of queries, and of keys.
        weighted: True if levels are mixed by logits.
        with_scores: True if the scores of kept cells are written.
    """

    maps: tuple[tuple[tuple[Shape, Shape], ...], ...]
    dtype: torch.dtype
    masked: tuple[bool, bool]
    weighted: bool
    topk: tuple[int, ...]
    scale: float
    variant: str
    with_scores: bool


class Step(NamedTuple):
    """A launch without its tensors."""

    kernel: Any
    programs: int
    numbers: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self, *tensors: Tensor | None) -> None:
        self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants)


class Pool(NamedTuple):
    """A launch of `pyramid.py`: its maps (of q, k, v: 0, 1, 2), and the level it starts from."""

    maps: tuple[int, ...]
    level: int
    step: Step


class Forward(NamedTuple):
    """Launches of forward, and sizes (float32) of temporary memory.

    Attributes:
        layout: Layout of the memory for backward.
        pools: Launches of averages.
        between: Sizes for the coarsest level: messages and log-sum-exps of spans, lists (64 bits),
            counts.
        totals: Messages of the levels between the coarsest and the finest.
    """

    layout: Layout
    pools: tuple[Pool, ...]
    coarse: Step
    choose: Step | None
    between: tuple[int, ...]
    fine: tuple[Step, ...]
    totals: tuple[int, ...]


class Listing(NamedTuple):
    """Launches that list the users of key families, several levels each.

    Attributes:
        first: The first level of each launch.
        families: Start index of the key families of each level, and the end.
    """

    counting: tuple[Step, ...]
    listing: tuple[Step, ...]
    first: tuple[int, ...]
    families: tuple[int, ...]

    @property
    def counters(self) -> int:
        """Number of counters: a zero, the lengths of the lists, and the fill level of each list."""
        return rounded(2 * self.families[-1] + 4)


class Backward(NamedTuple):
    """Launches of backward, and sizes (float32 or int32) of temporary memory.

    Attributes:
        layout: Layout of the memory saved by forward.
        fine: Launches of the levels below the coarsest, coarse -> fine: gradients of queries, and
            of keys.
        inherited: Sizes of the gradients of inherited messages, by level as `fine`.
        scores: Sizes of the gradients of parent scores; empty in variant B.
        stats: Sizes of log-sum-exps and mean gradients; empty in variant A.
        delta: Size of the mean gradients of the coarsest level.
        entries: Number of entries of all selections.
        width: Partial gradients of each share; 0 without weights.
    """

    layout: Layout
    fine: tuple[tuple[Step, Step], ...]
    coarse: tuple[Step, Step]
    pools: tuple[Pool, ...]
    listing: Listing
    logits: Step | None
    inherited: tuple[int, ...]
    scores: tuple[int, ...]
    stats: tuple[int, ...]
    delta: int
    entries: int
    width: int


class _Levels:
    """Arguments shared by the launches of all levels of a call."""

    def __init__(self, look: Look) -> None:
        self.look = look
        q, k, v = look.maps
        self.shapes = tuple(tuple(shape for shape, _ in maps) for maps in look.maps)
        self.count = len(look.topk) + 1
        self.batch, *grid, self.heads, self.dim = q[-1][0]
        self.value_dim = v[-1][0][-1]
        self.batch_heads = self.batch * self.heads
        self.grids = grids_of(tuple(grid), self.count)
        self.key_grids = grids_of(tuple(k[-1][0][1:-2]), self.count)
        self.layout = layout_of(
            self.shapes, look.topk, look.dtype.itemsize, with_scores=look.with_scores
        )
        self.hides = look.masked[1] or self.key_grids.is_padded
        self.share = 1.0 if look.variant == "A" else 1.0 / self.count
        width = max(self.dim, self.value_dim)
        self.row_bytes = power_of_two(width, 16) * look.dtype.itemsize  # of a key or a value
        self.strides = [self._strides(maps) for maps in look.maps]
        self.message_strides = [self.rows(n, self.value_dim) for n in self.grids.cells]

    def rows(self, cells: int, dim: int) -> Strides:
        """Strides of dense rows (B, N, T, D)."""
        return self.heads * cells * dim, cells * dim, dim

    def _strides(self, maps: Sequence[tuple[Shape, Shape]]) -> list[Strides]:
        """Return strides of all levels, coarse -> fine; averaged levels are dense rows."""
        own = [row_strides(*each) or dense_strides(each[0]) for each in maps]
        if len(own) == self.count:
            return own
        shape = maps[0][0]
        cells = grids_of(tuple(shape[1:-2]), self.count).cells[:-1]
        return [*(self.rows(n, shape[-1]) for n in cells), *own]

    def inputs(self, level: int) -> tuple[int, ...]:
        """Strides of queries, keys and values of a level."""
        return tuple(s for part in self.strides for s in part[level])

    def gradients(self, part: int, level: int) -> Strides:
        """Strides of the gradients of queries, keys or values, which are dense."""
        maps = self.shapes[part]
        if len(maps) == self.count:
            return dense_strides(maps[level])
        if level == self.count - 1:
            return dense_strides(maps[0])
        cells = grids_of(tuple(maps[0][1:-2]), self.count).cells[level]
        return self.rows(cells, maps[0][-1])

    def kept(self, level: int) -> int:
        return self.look.topk[level] if level < self.count - 1 else 0

    def sizes(self, level: int) -> tuple[int, ...]:
        """Return the sizes of the query grid and of the key grid."""
        return *three(self.grids.sizes[level]), *three(self.key_grids.sizes[level])

    def constants(self, level: int) -> dict[str, Any]:
        return {
            "KEY_BITS": self.key_grids.bits,
            "D": self.dim,
            "BLOCK_D": power_of_two(self.dim, 16),
            "DV": self.value_dim,
            "BLOCK_DV": power_of_two(self.value_dim, 16),
            "TOPK": self.kept(level),
            "VARIANT_A": self.look.variant == "A",
            "MASKED": self.look.masked[1],
            "PRECISION": precision(self.look.dtype),
        }

    # ---- averages

    def pools(self, kernel: Any, strides: Sequence[Strides | None]) -> tuple[Pool, ...]:
        """Return launches from fine to coarse, shared by maps of the same sizes and strides.

        Args:
            kernel: Kernel of `pyramid.py`.
            strides: Strides of the finest maps of q, k and v; None: all levels are given.
        """
        found = []
        parts = [part for part, each in enumerate(strides) if each is not None]

        def alike(i: int) -> tuple[Any, ...]:
            masked = self.look.masked[i > 0]
            return self.shapes[i][0], strides[i], masked, masked and i > 0

        for (shape, own, masked, _), group in groupby(parts, alike):
            maps = tuple(group)
            grids = grids_of(tuple(shape[1:-2]), self.count)
            fit = len(maps) * self.batch_heads * grids.cells[-2] < LARGEST_PROGRAMS
            for together in [maps] if fit else [(i,) for i in maps]:
                found += self._pools_of(kernel, together, grids, own, masked)
        return tuple(found)

    def _pools_of(
        self, kernel: Any, maps: tuple[int, ...], grids: Grids, own: Strides | None, masked: bool
    ) -> list[Pool]:
        dim, most = self.shapes[maps[0]][0][-1], MOST_STEPS[grids.ndim]
        block_d, found = power_of_two(dim), []
        for level in range(self.count - 1, 0, -most):
            steps, grid = min(most, level), grids.sizes[level]
            strides = own if level == self.count - 1 else self.rows(grids.cells[level], dim)
            assert strides is not None
            constants = {
                "BITS": grids.bits,
                "STEPS": steps,
                "D": dim,
                "BLOCK_D": block_d,
                "HIDES": masked or any(size % 2**steps for size in grid),
                "MASKED": masked,
                "num_warps": 1 if 2 ** (grids.ndim * steps) * block_d <= 4096 else 4,
            }
            numbers = (
                self.batch_heads, self.heads, *three(grid), sum(self.layout.pooled[maps[0]]),
                *strides,
            )  # fmt: skip
            programs = len(maps) * self.batch_heads * grids.cells[level - steps]
            found.append(Pool(maps, level, Step(kernel, programs, numbers, constants)))
        return found

    # ---- the coarsest level

    @property
    def is_miscompiled(self) -> bool:
        """True if blocks of 64 queries would read uninitialised registers.

        The assembler of Triton 3.6 loses the start of a matrix descriptor on Hopper, in half
        precision, if rows of neither keys nor values are multiples of 16 numbers and their blocks
        differ in width.
        """
        dims = self.dim, self.value_dim
        return all(x % 16 for x in dims) and len({power_of_two(x, 16) for x in dims}) > 1

    def coarse_blocks(self) -> dict[str, int]:
        """Return the block sizes of queries and keys.

        With many keys, large blocks of queries reduce traffic; otherwise warps split the keys.
        """
        keys, size = self.key_grids.cells[0], self.row_bytes
        many = self.batch_heads * self.grids.cells[0] >= 4096 and keys >= 1024
        many = many and not self.is_miscompiled
        block_s = 128 if not many and keys > 512 else 64
        block_s = max(min(block_s, TILE_BYTES // size), power_of_two(self.kept(0)))
        block_s = min(block_s, power_of_two(keys, 16))
        wide = block_s * size > TILE_BYTES
        return {
            "BLOCK_T": 64 if many and not wide else 16,
            "BLOCK_S": block_s,
            "num_warps": 4 * max(1, block_s * size // TILE_BYTES),
            "num_stages": 1 if wide else 3 if many else 2,
        }

    def coarse(self, out: Strides) -> tuple[Step, Step | None, tuple[int, ...]]:
        """Return both launches, and sizes of temporary memory; `out`: strides of the message."""
        look, kept, blocks = self.look, self.kept(0), self.coarse_blocks()
        cells, keys = self.grids.cells[0], self.key_grids.cells[0]
        rows, room = self.batch_heads * cells, power_of_two(2 * kept, 32)
        fixed = self.constants(0)
        programs = self.batch_heads * parts_of(cells, blocks["BLOCK_T"])
        spans = coarse_spans(programs, keys, blocks["BLOCK_S"], room) if kept else 1
        shared = {name: fixed[name] for name in ("DV", "BLOCK_DV", "TOPK")}
        per_query = {name: fixed[name] for name in ("D", "BLOCK_D", "MASKED", "PRECISION")}
        first = Step(
            coarse.coarse_fwd_kernel, programs * spans,
            (look.scale, spans, rows, self.heads, cells, keys, *self.inputs(0), *out),
            shared | per_query | blocks | {"ROOM": room},
        )  # fmt: skip
        if not kept:
            return first, None, ()
        most_spans = min(4, 256 // room) if spans > 1 else 1
        block_t = max(1, 512 // (most_spans * room))
        choose = Step(
            coarse.coarse_choose_kernel, parts_of(rows, block_t),
            (spans, rows, self.heads, cells, *self.sizes(0)[4:], *self.strides[2][0]),
            shared | {
                "KEY_BITS": self.key_grids.bits, "VARIANT_A": look.variant == "A", "ROOM": room,
                "MOST_SPANS": most_spans, "BLOCK_T": block_t, "BLOCK_TOPK": power_of_two(kept),
                "WITH_SCORES": look.with_scores, "num_warps": 1,
            },
        )  # fmt: skip
        listed = 2 * spans * room * rows
        sizes = spans * rows * self.value_dim, spans * rows, listed, spans * rows
        return first, choose, tuple(map(rounded, sizes))

    def coarse_gradients(self, total: Strides) -> tuple[Step, Step]:
        """Return both launches of backward; `total`: strides of the gradient of the message."""
        size, cells, keys = self.row_bytes, self.grids.cells[0], self.key_grids.cells[0]
        wide = size > 128
        fixed = self.constants(0) | {
            "WEIGHTED": self.look.weighted,
            "BLOCK_T": min(32 if wide else 64, power_of_two(cells, 16)),
            "BLOCK_S": min(32, power_of_two(keys, 16)),
            "num_warps": 4,
            "num_stages": 1 if size > 512 else 2 if size > 256 else 3,
        }
        numbers = (
            self.look.scale, self.share, self.count, self.heads, cells, keys, *self.sizes(0)[4:],
            *self.inputs(0), *total,
        )  # fmt: skip
        message = self.message_strides[0] if self.count > 1 else dense_strides(self._out_shape())
        queries, keys_ = (
            parts_of(n, fixed[block]) * self.batch_heads
            for n, block in ((cells, "BLOCK_T"), (keys, "BLOCK_S"))
        )
        grads = [self.gradients(part, 0) for part in range(3)]
        return (
            Step(coarse.coarse_bwd_queries_kernel, queries, (*numbers, *message, *grads[0]), fixed),
            Step(coarse.coarse_bwd_keys_kernel, keys_, (*numbers, *grads[1], *grads[2]), fixed),
        )

    def _out_shape(self) -> Shape:
        return *self.shapes[0][-1][:-1], self.value_dim

    # ---- the levels below

    def fine_parts(self, level: int) -> dict[str, int]:
        """Return the split of candidates into parts, or grouping of families, see `fine.py`."""
        children, kept = 2**self.grids.ndim, self.kept(level - 1)
        candidates = max(power_of_two(kept) * children, 16)
        size = candidates * self.row_bytes
        most_rows = 2 * ROWS if size <= 512 * 1024 else 4 * ROWS
        parts = max(ROWS // children, size // PART_BYTES)
        parts = min(parts, most_rows // children, candidates // 16)
        families = ROWS // children if parts == 1 else 1
        return {
            "KEPT": kept,
            "FAMILIES": families,
            "ROWS": max(ROWS, parts * children),
            "PARTS": max(parts, families),
            "WIDTH": candidates // parts,
            "num_warps": min(max(size // parts // PART_BYTES, 1), 8),
        }

    def families(self, level: int) -> int:
        """Query families of all heads, the cells of the level above."""
        return self.batch_heads * self.grids.cells[level - 1]

    def fine(self, level: int, out: Strides) -> Step:
        """Return the launch of a finer level; `out`: strides of the result."""
        look, parts, kept = self.look, self.fine_parts(level), self.kept(level)
        rows = self.families(level)
        constants = self.constants(level) | parts | {
            "QUERY_BITS": self.grids.bits, "HIDES": self.hides, "WEIGHTED": look.weighted,
            "BLOCK_TOPK": power_of_two(kept), "WITH_SCORES": look.with_scores,
        }  # fmt: skip
        numbers = (
            look.scale, self.share, level, self.count, rows, self.heads, *self.sizes(level),
            *self.inputs(level), *out,
        )  # fmt: skip
        programs = parts_of(rows, parts["FAMILIES"])
        return Step(fine.fine_fwd_kernel, programs, numbers, constants)

    def fine_gradients(self, level: int, total: Strides) -> tuple[Step, Step]:
        """Return both launches of backward; `total`: strides of the gradient of the result."""
        look, parts = self.look, self.fine_parts(level)
        rows = self.families(level)
        fixed = self.constants(level) | {
            "WEIGHTED": look.weighted, "QUERY_BITS": self.grids.bits,
        }  # fmt: skip
        shared = look.scale, self.share, level, self.count
        numbers = self.heads, *self.sizes(level), *self.inputs(level), *total
        grads = [self.gradients(part, level) for part in range(3)]
        queries = Step(
            fine.fine_bwd_kernel, parts_of(rows, parts["FAMILIES"]),
            (*shared, rows, *numbers, *grads[0]), fixed | parts | {"HIDES": self.hides},
        )  # fmt: skip
        kept, size = parts["KEPT"], self.row_bytes
        few = kept < 16 or size > 256  # lists have about `kept` users
        blocks = {
            "KEPT": kept,
            "BLOCK_M": 16 if few else 32,
            "num_warps": 1 if size <= 256 else 2 if size <= 512 else 4,
            "num_stages": 1 if few else 2,
        }
        keys = Step(
            fine.fine_bwd_keys_kernel, self.batch_heads * self.key_grids.cells[level - 1],
            (*shared, *numbers, *grads[1], *grads[2]), fixed | blocks,
        )  # fmt: skip
        return queries, keys

    def listing(self) -> Listing:
        """Return the launches that list the users of all levels, several levels at a time."""
        counting, listing, starts, families = [], [], [], [0]
        fixed = {"KEY_BITS": self.key_grids.bits, "BLOCK": ENTRIES}
        more = {"QUERY_BITS": self.grids.bits, "WITH_SLOTS": self.look.variant == "A"}
        for cells in self.key_grids.cells[:-1]:
            families.append(families[-1] + (self.batch_heads * cells + 3) // 4 * 4)
        blocks = [size // ENTRIES for size in self.layout.places]
        first = 0
        while first < len(blocks):
            last = first + 1
            while last < min(first + LEVELS_AT_ONCE, len(blocks)):
                if sum(blocks[first : last + 1]) >= LARGEST_PROGRAMS:
                    break
                last += 1
            # a set bit 62 makes it a 64-bit number for any K
            kept = sum(self.kept(i) << 8 * (i - first) for i in range(first, last)) | 1 << 62
            numbers = (
                self.batch_heads, self.count - 1 - first, kept, *self.sizes(self.count - 1),
            )  # fmt: skip
            programs = sum(blocks[first:last])
            counting.append(Step(users.count_users_kernel, programs, numbers, fixed))
            listing.append(Step(users.list_users_kernel, programs, numbers, fixed | more))
            starts.append(first)
            first = last
        return Listing(tuple(counting), tuple(listing), tuple(starts), tuple(families))


def three(grid: Grid) -> Grid:
    """Pad a grid to three axes, for kernels."""
    return (*grid, 1, 1)[:3]


def coarse_spans(programs: int, keys: int, block_s: int, room: int) -> int:
    """Return the number of spans of keys that occupies all multiprocessors."""
    wanted = max(1, 512 // programs)
    most = max(1, keys // (2 * block_s))
    return 1 << (min(wanted, most, 256 // room, 4).bit_length() - 1)


@lru_cache(maxsize=256)
def forward_schedule(look: Look) -> Forward:
    levels = _Levels(look)
    finest = levels.count - 1
    strides = [
        None if len(maps) == levels.count else own[-1]
        for maps, own in zip(look.maps, levels.strides, strict=True)
    ]
    out = [*levels.message_strides[:-1], dense_strides(levels._out_shape())]
    first, choose, between = levels.coarse(out[0])
    return Forward(
        layout=levels.layout,
        pools=levels.pools(pyramid.pyramid_fwd_kernel, strides),
        coarse=first,
        choose=choose,
        between=between,
        fine=tuple(levels.fine(i, out[i]) for i in range(1, levels.count)),
        totals=tuple(
            rounded(levels.batch_heads * n * levels.value_dim) for n in levels.grids.cells[1:finest]
        ),
    )


@lru_cache(maxsize=256)
def backward_schedule(look: Look, dout: Strides) -> Backward:
    """Return the schedule of backward; `dout`: strides of the gradient of the result, as rows."""
    levels = _Levels(look)
    heads, cells, finest = levels.batch_heads, levels.grids.cells, levels.count - 1
    strides = [
        None if len(maps) == levels.count else dense_strides(maps[0]) for maps in levels.shapes
    ]
    totals = [*levels.message_strides[:-1], dout]
    fine_ = tuple(levels.fine_gradients(i, totals[i]) for i in range(1, levels.count))
    coarse_ = levels.coarse_gradients(totals[0])
    width, logits = 0, None
    if look.weighted:
        width = rounded(max(step.programs for step, _ in (coarse_, *fine_)))
        fixed = {"BLOCK": SHARE_BLOCK}
        logits = Step(users.logits_bwd_kernel, 1, (levels.count, width), fixed)
    variant_a = look.variant == "A"
    return Backward(
        layout=levels.layout,
        fine=fine_,
        coarse=coarse_,
        pools=levels.pools(pyramid.pyramid_bwd_kernel, strides)[::-1],
        listing=levels.listing(),
        logits=logits,
        inherited=tuple(rounded(heads * n * levels.value_dim) for n in cells[:finest]),
        scores=tuple(
            rounded(heads * n * k) for n, k in zip(cells, look.topk, strict=False) if variant_a
        ),
        stats=tuple(rounded(heads * n) for n in cells[1:] if not variant_a),
        delta=rounded(heads * cells[0]),
        entries=sum(levels.layout.places),
        width=width,
    )
