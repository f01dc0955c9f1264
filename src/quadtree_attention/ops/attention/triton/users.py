# SPDX-License-Identifier: Apache-2.0
"""Lists of the query families that kept each key family, for gradients of keys and values."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops import replay
from quadtree_attention.ops.attention.triton.layout import Cells, Grids, coordinates_of, packed
from quadtree_attention.ops.attention.triton.schedule import Listing


class Users(NamedTuple):
    """Lists of the key families of one level.

    Attributes:
        places: Places of the query families, in concatenated lists.
        slots: Index of the key family in the selection of the query family; None in variant B.
        first: Start of the list of each key family, and the end, in 64 bits.
    """

    places: Tensor
    slots: Tensor | None
    first: Tensor


def listed_users(
    places: Sequence[Tensor],
    counters: Tensor,
    buffer: Tensor,
    listing: Listing,
    *,
    with_slots: bool,
) -> list[Users]:
    """Return the lists of all levels but the coarsest, in nondeterministic order.

    Args:
        places: Selections of all levels but the finest, concatenated.
        counters: 64-bit zeros, see `Listing.counters`.
        buffer: Memory for users and slots, int32.
        listing: The launches.
        with_slots: True if slots are needed.
    """
    users, *slots = buffer.split(len(buffer) // (2 if with_slots else 1))
    total = listing.families[-1]
    first = counters.new_empty(total + 1)
    cursor = counters[total + 4 :]
    for step, level in zip(listing.counting, listing.first, strict=True):
        step(places[level], counters[listing.families[level] :])
    replay.noted(running_sum, counters, first)
    slots_ = slots[0] if slots else None
    for step, level in zip(listing.listing, listing.first, strict=True):
        family = listing.families[level]
        step(places[level], first[family:], cursor[family:], users, slots_)
    return [Users(users, slots_, first[family:]) for family in listing.families[:-1]]


def running_sum(x: Tensor, out: Tensor) -> None:
    """Write the cumulative sum of the first entries to `out`, as many as it has."""
    torch.cumsum(x[: len(out)], 0, out=out)


def sorted_users(
    places: Sequence[Tensor], grids: Grids, key_grids: Grids, topk: Sequence[int], heads: int
) -> list[Users]:
    """Return `listed_users` in deterministic order, sorted by query family.

    Args:
        places: Selections of all levels but the finest.
        grids: Grids of queries.
        key_grids: Grids of keys.
        topk: K of all levels but the finest.
        heads: Number of heads of all batch entries.
    """
    found = []
    for i, (selection, kept) in enumerate(zip(places, topk, strict=True)):
        parents = selection[: heads * grids.cells[i] * kept].view(heads, grids.cells[i], kept)
        keys = Cells(key_grids.sizes[i], key_grids.bits)
        found.append(sorted_by_key(parents, Cells(grids.sizes[i], grids.bits), keys))
    return found


def sorted_by_key(parents: Tensor, queries: Cells, keys: Cells) -> Users:
    """Return the lists of one level.

    Args:
        parents: Places of the kept cells, (heads, families, K).
        queries: The query families.
        keys: The key families.
    """
    heads, families, kept = parents.shape
    key_families = prod(keys.grid)
    head = torch.arange(heads, device=parents.device)[:, None]
    places = parents.reshape(heads, families * kept)
    nobody = heads * key_families  # sorts after every family
    row = torch.zeros_like(places, dtype=torch.int64)
    for axis, size in zip(coordinates_of(places, keys.bits), keys.grid, strict=True):
        row = row * size + axis
    target = torch.where(places < 0, nobody, row + head * key_families).flatten()
    target, order = target.sort(stable=True)
    bounds = torch.arange(nobody + 1, device=parents.device)
    first = torch.searchsorted(target, bounds)
    users, slots = order // kept, order % kept
    return Users(packed(users % families, queries), slots.int(), first)
