# SPDX-License-Identifier: Apache-2.0
"""From tensors to kernel launches: shapes, strides and a small table of configurations."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops import replay
from quadtree_attention.ops.attention.tree import Tree
from quadtree_attention.ops.attention.triton.kernels import coarse, fine, pyramid
from quadtree_attention.ops.attention.triton.limits import MOST_STEPS, Grid, bits_of
from quadtree_attention.ops.kernel import parts_of, power_of_two, precision

ROWS = 16  # what a matrix unit takes at least


@dataclass(frozen=True)
class Options:
    """What is the same at all levels."""

    topk: tuple[int, ...]
    scale: float
    variant: str
    with_scores: bool
    weights: Tensor | None  # (L,), shares of the levels in the result of variant B

    @property
    def num_levels(self) -> int:
        return len(self.topk) + 1

    @property
    def share(self) -> float:
        """Share of a level where there are no weights."""
        return 1.0 if self.variant == "A" else 1.0 / self.num_levels

    def kept(self, level: int) -> int:
        return self.topk[level] if level < len(self.topk) else 0


@dataclass(frozen=True)
class Level:
    """The arrays of one level, (B, N, T, D) with any strides but a dense last axis."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid
    key_grid: Grid
    bits: Grid  # of the axes in places of query cells, see `limits.bits_of`
    key_bits: Grid
    shown: Tensor | None  # (B, S), keys that are not hidden by a mask


@dataclass(frozen=True)
class Grids:
    """The grids of all levels of a map, coarse -> fine, worked out once."""

    sizes: tuple[Grid, ...]
    cells: tuple[int, ...]
    is_padded: bool
    bits: Grid  # of the axes in places, see `limits.bits_of`

    @property
    def finest(self) -> int:
        return len(self.sizes) - 1

    @property
    def ndim(self) -> int:
        return len(self.sizes[0])


@lru_cache(maxsize=1024)
def grids_of(grid: Grid, num_levels: int) -> Grids:
    tree = Tree(grid, num_levels)
    levels = tuple(tree.grid_at(level) for level in range(num_levels))
    return Grids(levels, tuple(prod(level) for level in levels), tree.is_padded, bits_of(grid))


def rows_of(x: Tensor) -> Tensor:
    """A map (B, *grid, N, D) as rows (B, N, T, D): a view wherever strides allow it."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x.flatten(1, -3).transpose(1, 2)


def lies_in_rows(x: Tensor) -> bool:
    """Whether `rows_of` has nothing to copy, and there is something to look at."""
    steps, sizes = x.stride()[1:-2], x.shape[1:-2]
    dense = all(steps[i - 1] == steps[i] * sizes[i] for i in range(1, len(sizes)))
    return dense and x.stride(-1) == 1 and x.numel() > 0


def strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride()[:3])


def sizes(grid: Grid) -> Grid:
    """As kernels take them: always three axes."""
    return (*grid, 1, 1)[:3]


def constants(level: Level, kept: int, options: Options) -> dict[str, Any]:
    dim, value_dim = level.q.shape[-1], level.v.shape[-1]
    return {
        "KEY_BITS": level.key_bits,
        "D": dim,
        "BLOCK_D": power_of_two(dim, 16),
        "DV": value_dim,
        "BLOCK_DV": power_of_two(value_dim, 16),
        "TOPK": kept,
        "VARIANT_A": options.variant == "A",
        "MASKED": level.shown is not None,
        "PRECISION": precision(level.q.dtype),
    }


def coarse_blocks(level: Level, kept: int) -> dict[str, int]:
    """Queries and keys that a program of the coarsest level takes at once.

    Many queries save traffic where there are many keys; otherwise the warps share the keys.
    """
    batch, heads, cells, _ = level.q.shape
    keys, size = level.k.shape[2], row_bytes(level)
    many = batch * heads * cells >= 4096 and keys >= 1024
    block_s = 128 if not many and keys > 512 else 64
    block_s = max(min(block_s, TILE_BYTES // size), power_of_two(kept))
    block_s = min(block_s, power_of_two(keys, 16))
    wide = block_s * size > TILE_BYTES
    return {
        "BLOCK_T": 64 if many and not wide else 16,
        "BLOCK_S": block_s,
        "num_warps": 4 * max(1, block_s * size // TILE_BYTES),
        "num_stages": 1 if wide else 3 if many else 2,
    }


TILE_BYTES = 32 * 1024  # of shared memory, for a tile of keys


def row_bytes(level: Level) -> int:
    """Of the wider of a key and a value, padded."""
    width = max(level.q.shape[-1], level.v.shape[-1])
    return power_of_two(width, 16) * level.q.element_size()


def coarse_spans(programs: int, keys: int, block_s: int, room: int) -> int:
    """Into how many spans the keys are cut to give work to the whole chip."""
    wanted = max(1, 512 // programs)
    most = max(1, keys // (2 * block_s))
    return 1 << (min(wanted, most, 256 // room, 4).bit_length() - 1)


def coarse_gradient_blocks(level: Level) -> dict[str, int]:
    size = row_bytes(level)
    wide = size > 128
    return {
        "BLOCK_T": min(32 if wide else 64, power_of_two(level.q.shape[2], 16)),
        "BLOCK_S": min(32, power_of_two(level.k.shape[2], 16)),
        "num_warps": 4,
        "num_stages": 1 if size > 512 else 2 if size > 256 else 3,
    }


def fine_parts(level: Level, parents: Tensor) -> dict[str, int]:
    """How candidates are cut into parts, or families put together, see `fine.py`."""
    children = 2 ** len(level.grid)
    candidates = max(power_of_two(parents.shape[-1]) * children, 16)
    size = candidates * row_bytes(level)
    most_rows = 2 * ROWS if size <= 512 * 1024 else 4 * ROWS
    parts = min(max(ROWS // children, size // PART_BYTES), most_rows // children, candidates // 16)
    families = ROWS // children if parts == 1 else 1
    return {
        "KEPT": parents.shape[-1],
        "FAMILIES": families,
        "ROWS": max(ROWS, parts * children),
        "PARTS": max(parts, families),
        "WIDTH": candidates // parts,
        "num_warps": min(max(size // parts // PART_BYTES, 1), 8),
    }


PART_BYTES = 8 * 1024  # of keys or values for which a warp has the registers


def attend_coarse(
    level: Level, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Writes the message to `out` and the log-sum-exp to `lse`; gives selection and scores."""
    batch, heads, cells, _ = level.q.shape
    keys, kept = level.k.shape[2], options.kept(0)
    selection, scores = new_selection(level, kept, options)
    fixed = constants(level, kept, options)
    shared = {name: fixed[name] for name in ("DV", "BLOCK_DV", "TOPK")}
    per_query = {name: fixed[name] for name in ("D", "BLOCK_D", "MASKED", "PRECISION")}
    blocks = coarse_blocks(level, kept)
    rows, room = lse.numel(), power_of_two(2 * kept, 32)
    programs = batch * heads * parts_of(cells, blocks["BLOCK_T"])
    spans = coarse_spans(programs, keys, blocks["BLOCK_S"], room) if kept else 1
    parts = out.new_empty(spans, rows, out.shape[-1]) if kept else out
    part_lse = lse.new_empty(spans, rows) if kept else lse
    listed = selection.new_empty(spans * room if kept else 0, rows, dtype=torch.int64)
    count = selection.new_empty(spans if kept else 0, rows)
    coarse.coarse_fwd_kernel[(programs * spans,)](
        level.q, level.k, level.v, level.shown, parts, part_lse, listed, count,
        options.scale, spans, rows, heads, cells, keys,
        *strides(level.q, level.k, level.v, out),
        **shared, **per_query, **blocks, ROOM=room,
    )  # fmt: skip
    if kept:
        block_t = max(1, 512 // (spans * room))
        coarse.coarse_choose_kernel[(parts_of(rows, block_t),)](
            level.v, parts, part_lse, listed, count, out, lse, selection, scores,
            rows, heads, cells, *sizes(level.key_grid)[1:], *strides(level.v),
            **shared, KEY_BITS=level.key_bits, VARIANT_A=options.variant == "A", ROOM=room,
            SPANS=spans, BLOCK_T=block_t, BLOCK_TOPK=power_of_two(kept),
            WITH_SCORES=options.with_scores, num_warps=1,
        )  # fmt: skip
    return selection, scores


def attend_fine(
    index: int,
    level: Level,
    parents: Tensor,
    parent_scores: Tensor,
    inherited: Tensor,
    out: Tensor,
    hides: bool,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Writes the messages of this level and those above to `out`; gives selection and scores."""
    kept = options.kept(index)
    selection, scores = new_selection(level, kept, options)
    rows, parts = parents[..., 0].numel(), fine_parts(level, parents)
    fine.fine_fwd_kernel[(parts_of(rows, parts["FAMILIES"]),)](
        level.q, level.k, level.v, level.shown, options.weights, parents, parent_scores, inherited,
        out, selection, scores,
        options.scale, options.share, index, rows, level.q.shape[1],
        *sizes(level.grid), *sizes(level.key_grid),
        *strides(level.q, level.k, level.v, out),
        **constants(level, kept, options), **parts, QUERY_BITS=level.bits, HIDES=hides,
        WEIGHTED=options.weights is not None,
        BLOCK_TOPK=power_of_two(kept), WITH_SCORES=options.with_scores,
    )  # fmt: skip
    return selection, scores


def new_selection(level: Level, kept: int, options: Options) -> tuple[Tensor, Tensor]:
    shape = level.q.shape[:3]
    return (
        level.q.new_empty(*shape, kept, dtype=torch.int32),
        level.q.new_empty(*shape, kept if options.with_scores else 0, dtype=torch.float32),
    )


def coarse_gradients(
    level: Level,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    dtotal: Tensor,
    dscores: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    options: Options,
) -> Tensor:
    """Writes the gradients of q, k and v to `grads`; gives that of the weight, in parts."""
    selection, scores, lse, message = saved
    dq, dk, dv = grads
    batch, heads, cells, _ = level.q.shape
    keys = level.k.shape[2]
    blocks = coarse_gradient_blocks(level)
    programs = parts_of(cells, blocks["BLOCK_T"]) * batch * heads
    weighted = options.weights is not None
    dweight = lse.new_empty(programs if weighted else 0)
    delta = torch.empty_like(lse)
    fixed = constants(level, selection.shape[-1], options) | blocks | {"WEIGHTED": weighted}
    numbers = (
        options.scale, options.share, heads, cells, keys, *sizes(level.key_grid)[1:],
        *strides(level.q, level.k, level.v, dtotal),
    )  # fmt: skip
    coarse.coarse_bwd_queries_kernel[(programs,)](
        level.q, level.k, level.v, level.shown, options.weights, selection, scores, lse, message,
        dtotal, dscores, dq, dweight, delta, *numbers, *strides(message, dq), **fixed,
    )  # fmt: skip
    coarse.coarse_bwd_keys_kernel[(parts_of(keys, blocks["BLOCK_S"]) * batch * heads,)](
        level.q, level.k, level.v, level.shown, options.weights, selection, lse, delta,
        dtotal, dscores, dk, dv, *numbers, *strides(dk, dv), **fixed,
    )  # fmt: skip
    return dweight


def fine_gradients(
    index: int,
    level: Level,
    saved: tuple[Tensor, Tensor, Tensor],
    dtotal: Tensor,
    dscores: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    hides: bool,
    deterministic: bool,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `coarse_gradients`; also gives the gradients of inherited messages and parent scores."""
    parents, parent_scores, selection = saved
    dq, dk, dv = grads
    rows, parts = parents[..., 0].numel(), fine_parts(level, parents)
    programs = parts_of(rows, parts["FAMILIES"])
    f32: dict[str, Any] = {"dtype": torch.float32, "device": dtotal.device}
    variant_a, weighted = options.variant == "A", options.weights is not None
    dinherited = torch.empty(*parents.shape[:3], level.v.shape[-1], **f32)
    dparent_scores = torch.empty(parents.shape if variant_a else (0,), **f32)
    dweight = torch.empty(programs if weighted else 0, **f32)
    stats = (2, 0) if variant_a else (2, *level.q.shape[:3])
    lse, delta = torch.empty(stats, **f32).unbind()
    fixed = constants(level, selection.shape[-1], options) | {"WEIGHTED": weighted}
    numbers = (
        level.q.shape[1], *sizes(level.grid), *sizes(level.key_grid),
        *strides(level.q, level.k, level.v, dtotal),
    )  # fmt: skip
    shared = options.scale, options.share, index
    fine.fine_bwd_kernel[(programs,)](
        level.q, level.k, level.v, level.shown, options.weights, parents, parent_scores, selection,
        dtotal, dscores, dq, dweight, dparent_scores, dinherited, lse, delta,
        *shared, rows, *numbers, *strides(dq), **fixed, **parts, QUERY_BITS=level.bits,
        HIDES=hides,
    )  # fmt: skip
    queries, keys = (
        Cells(tuple(parts_of(size, 2) for size in grid), bits)
        for grid, bits in ((level.grid, level.bits), (level.key_grid, level.key_bits))
    )
    find_users = sorted_users if deterministic else listed_users
    users, slots, first = find_users(parents, queries, keys, variant_a)
    fine.fine_bwd_keys_kernel[(prod(parents.shape[:2]) * prod(keys.grid),)](
        level.q, level.k, level.v, level.shown, options.weights, parent_scores, selection,
        dtotal, dscores, users, slots, first, lse, delta, dk, dv,
        *shared, *numbers, *strides(dk, dv), **fixed, QUERY_BITS=level.bits,
        KEPT=parents.shape[-1], **user_blocks(level, parents.shape[-1]),
    )  # fmt: skip
    return dweight, dinherited, dparent_scores


def user_blocks(level: Level, kept: int) -> dict[str, int]:
    """Queries that a program of the key gradients takes at once: lists have about `kept` users."""
    size = row_bytes(level)
    few = kept < 16 or size > 256
    return {
        "BLOCK_M": 16 if few else 32,
        "num_warps": 1 if size <= 256 else 2 if size <= 512 else 4,
        "num_stages": 1 if few else 2,
    }


Users = tuple[Tensor, Tensor, Tensor]


class Cells(NamedTuple):
    """A grid, and how many bits each of its axes has in places."""

    grid: Grid
    bits: Grid


def listed_users(parents: Tensor, queries: Cells, keys: Cells, with_slots: bool) -> Users:
    """For every key family and head: which query families kept it.

    Args:
        parents: Places of the kept cells, (B, N, families, K).
        queries: The query families.
        keys: The key families.
        with_slots: Whether slots are wanted.

    Returns:
        Users (place of the query family of each entry), slots (number of the key family among those
        it kept), and where the entries of each key family begin (one more than there are families),
        in 64 bits. The order of a list is that in which the threads came by.
    """
    batch, heads, families, kept = parents.shape
    entries, block = parents.numel(), 256
    ends = batch * heads * prod(keys.grid) + 1
    count, first = parents.new_empty(2 * ends), parents.new_empty(ends, dtype=torch.int64)
    users, slots = parents.new_empty(entries), parents.new_empty(entries if with_slots else 0)
    programs = (parts_of(entries, block),)
    numbers = (entries, families * kept, *sizes(keys.grid))
    fixed = {"KEY_BITS": keys.bits, "BLOCK": block}
    replay.noted(torch.Tensor.zero_, count)
    fine.count_users_kernel[programs](parents, count[1:], *numbers, **fixed)
    replay.noted(running_sum, count, first)
    fine.list_users_kernel[programs](
        parents, first, count[ends:], users, slots, *numbers, *sizes(queries.grid)[1:],
        KEPT=kept, QUERY_BITS=queries.bits, WITH_SLOTS=with_slots, **fixed,
    )  # fmt: skip
    return users, slots, first


def running_sum(x: Tensor, out: Tensor) -> None:
    """Sums up to each of the first entries, as many as there is room for."""
    torch.cumsum(x[: len(out)], 0, dtype=out.dtype, out=out)


def sorted_users(parents: Tensor, queries: Cells, keys: Cells, with_slots: bool) -> Users:
    """As `listed_users`, every list in the order of its query families."""
    batch, heads, families, kept = parents.shape
    heads_in_all, key_families = batch * heads, prod(keys.grid)
    head = torch.arange(heads_in_all, device=parents.device)[:, None]
    places = parents.reshape(heads_in_all, families * kept)
    nobody = heads_in_all * key_families  # sorts behind every family
    row = torch.zeros_like(places, dtype=torch.int64)
    for axis, size in zip(coordinates_of(places, keys.bits), keys.grid, strict=True):
        row = row * size + axis
    target = torch.where(places < 0, nobody, row + head * key_families).flatten()
    target, order = target.sort(stable=True)
    bounds = torch.arange(nobody + 1, device=parents.device)
    first = torch.searchsorted(target, bounds)
    users, slots = order // kept, order % kept
    return packed(users % families, queries), slots.int(), first


def packed(rows: Tensor, cells: Cells) -> Tensor:
    """Places of row numbers, as `places.place_of`."""
    places, shift = torch.zeros_like(rows), 0
    for size, bits in zip(reversed(cells.grid), reversed(cells.bits), strict=True):
        places |= (rows % size) << shift
        rows = rows // size
        shift += bits
    return places.int()


def coordinates_of(places: Tensor, bits: Grid) -> list[Tensor]:
    """Undoes the packing of `places.place_of`, one tensor per axis; no place is negative."""
    axes: list[Tensor] = []
    for count in reversed(bits):
        axes.insert(0, places & (2**count - 1))
        places = places >> count
    return axes


def pooled_views(buffer: Tensor, grids: Grids, lead: tuple[int, int], dim: int) -> list[Tensor]:
    """The levels above the finest in one buffer that runs from fine to coarse, coarse -> fine."""
    views, start = [], 0
    for cells in reversed(grids.cells[:-1]):
        size = lead[0] * lead[1] * cells * dim
        views.append(buffer[start : start + size].view(*lead, cells, dim))
        start += size
    return views[::-1]


def pool(x: Tensor, grids: Grids, shown: list[Tensor], buffer: Tensor) -> list[Tensor]:
    """All levels of rows (B, N, T, D), coarse -> fine; the coarser ones in `buffer`."""
    levels = [*pooled_views(buffer, grids, (x.shape[0], x.shape[1]), x.shape[-1]), x]
    for finest, steps in launches(grids):
        launch_pyramid(pyramid.pyramid_fwd_kernel, levels, grids, finest, steps, shown)
    return levels


def unpool(dx: Tensor, grids: Grids, shown: list[Tensor], buffer: Tensor) -> None:
    """Adds to `dx` (B, N, T, D) what the gradients of the coarser levels say about the map."""
    levels = [*pooled_views(buffer, grids, (dx.shape[0], dx.shape[1]), dx.shape[-1]), dx]
    for finest, steps in reversed(launches(grids)):
        launch_pyramid(pyramid.pyramid_bwd_kernel, levels, grids, finest, steps, shown)


def launches(grids: Grids) -> list[tuple[int, int]]:
    """Which level each launch starts from and how many coarser ones it makes, fine -> coarse."""
    most = MOST_STEPS[grids.ndim]
    return [(level, min(most, level)) for level in range(grids.finest, 0, -most)]


def launch_pyramid(
    kernel: Any, levels: list[Tensor], grids: Grids, finest: int, steps: int, shown: list[Tensor]
) -> None:
    """One launch from level `finest` to `steps` coarser ones, which lie one after the other."""
    x = levels[finest]
    batch, heads, _, dim = x.shape
    grid = grids.sizes[finest]
    block_d = power_of_two(dim)
    kernel[(batch * heads * grids.cells[finest - steps],)](
        x, shown[finest] if shown else None, levels[finest - 1],
        batch * heads, heads, *sizes(grid), *strides(x),
        BITS=grids.bits, STEPS=steps, D=dim, BLOCK_D=block_d,
        HIDES=bool(shown) or any(size % 2**steps for size in grid), MASKED=bool(shown),
        num_warps=1 if 2 ** (grids.ndim * steps) * block_d <= 4096 else 4,
    )  # fmt: skip
