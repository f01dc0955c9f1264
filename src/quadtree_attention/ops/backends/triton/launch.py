# SPDX-License-Identifier: Apache-2.0
"""From tensors to kernel launches: shapes, strides and a small table of configurations."""

from typing import Any

import torch
from torch import Tensor

from quadtree_attention.ops.backends.triton import coarse, fine, pyramid
from quadtree_attention.ops.problem import Variant
from quadtree_attention.ops.tree import Tree, group


def power_of_two(n: int, least: int = 1) -> int:
    return max(least, 1 << max(n - 1, 0).bit_length())


def rows_contiguous(x: Tensor) -> Tensor:
    """Kernels take any strides but want the last axis dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride()[:3])


def precision(dtype: torch.dtype) -> str:
    """Three passes of the matrix unit keep float32 exact; half precision ignores this."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def widths(q: Tensor, v: Tensor) -> dict[str, int]:
    dim, value_dim = q.shape[-1], v.shape[-1]
    return {
        "D": dim,
        "BLOCK_D": power_of_two(dim, 16),
        "DV": value_dim,
        "BLOCK_DV": power_of_two(value_dim, 16),
    }


COARSE_CHUNK = 128
COARSE_WARPS = 1
BLOCK_T = 16  # query cells of a coarse block: what a matrix unit takes at least


def coarse_chunk(keys: int, width: int, dtype: torch.dtype) -> int:
    """Key cells that one program of the coarse level takes at once."""
    limit = 16 * 1024 // width if dtype != torch.float32 else 8 * 1024 // width
    return min(COARSE_CHUNK, limit, power_of_two(keys, 16))


def coarse_blocks(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Queries and keys per program of the coarse gradients."""
    width = max(power_of_two(q.shape[-1], 16), power_of_two(v.shape[-1], 16))
    wide = width > 64 or q.dtype == torch.float32
    block_t = min(32 if wide else 64, power_of_two(q.shape[2], 16))
    block_s = min(32, power_of_two(k.shape[2], 16))
    return {"BLOCK_T": block_t, "BLOCK_S": block_s, "num_warps": 4}


def fine_warps(candidates: int, width: int) -> int:
    """One warp per program is best while its registers hold the candidates."""
    size = candidates * width
    return 1 if size <= 128 * 64 else 2 if size <= 256 * 64 else 4 if size <= 512 * 64 else 8


def coarse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    scale: float,
    topk: int | None,
    variant: Variant,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Total, selection, scores and log-sum-exp; absent ones are empty."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    batch, heads, cells, _ = q.shape
    shape = (batch, heads, cells)
    kept = topk or 0
    total = q.new_empty(*shape, v.shape[-1], dtype=torch.float32 if kept else q.dtype)
    selection = q.new_empty(*shape, kept, dtype=torch.int32)
    scores = q.new_empty(*shape, kept if with_scores else 0, dtype=torch.float32)
    lse = q.new_empty(shape, dtype=torch.float32)
    if total.numel() == 0:
        return total, selection, scores, lse
    width = widths(q, v)
    block_s = coarse_chunk(k.shape[2], max(width["BLOCK_D"], width["BLOCK_DV"]), q.dtype)
    blocks, chunks = -(-cells // BLOCK_T), -(-k.shape[2] // block_s)
    parts = (*shape, chunks)
    maxima, sums = lse.new_empty(parts), lse.new_empty(parts)
    messages = lse.new_empty(*parts, v.shape[-1])
    best_cells = selection.new_empty(*parts, kept)
    best_scores = lse.new_empty(*parts, kept)
    with torch.cuda.device_of(q):
        coarse.coarse_fwd_kernel[(batch * heads * blocks * chunks,)](
            q, k, v, visible, maxima, sums, messages, best_cells, best_scores,
            scale, heads, cells, k.shape[2], blocks, chunks, *strides(q, k, v),
            BLOCK_T=BLOCK_T, BLOCK_S=block_s, **width, TOPK=kept, BLOCK_TOPK=power_of_two(kept),
            MASKED=visible is not None, PRECISION=precision(q.dtype), num_warps=COARSE_WARPS,
        )  # fmt: skip
        block_best = power_of_two(chunks * max(kept, 1))
        merge_rows = max(1, min(16, 1024 // block_best))
        coarse.coarse_merge_kernel[(batch * heads * -(-cells // merge_rows),)](
            v, weight, maxima, sums, messages, best_cells, best_scores,
            total, selection, scores, lse,
            heads, cells, chunks, *strides(v),
            BLOCK_T=merge_rows, BLOCK_CHUNKS=power_of_two(chunks), BLOCK_BEST=block_best,
            DV=width["DV"], BLOCK_DV=width["BLOCK_DV"], TOPK=kept, BLOCK_TOPK=power_of_two(kept),
            VARIANT_A=variant == "A", WEIGHTED=weight is not None, WITH_SCORES=with_scores,
            num_warps=1 if block_best <= 1024 else 4,
        )  # fmt: skip
    return total, selection, scores, lse


def coarse_backward(
    dtotal: Tensor,
    dscores: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    selection: Tensor,
    lse: Tensor,
    scale: float,
    variant: Variant,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the weight (empty if there is none)."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    dtotal = dtotal.contiguous()
    batch, heads, cells, _ = q.shape
    keys, kept = k.shape[2], selection.shape[-1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=q.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=q.device)
    delta = torch.empty_like(lse)
    blocks = coarse_blocks(q, k, v)
    programs = -(-cells // blocks["BLOCK_T"]) * batch * heads
    dweight = lse.new_empty(programs if weight is not None else 0)
    if programs == 0:
        return dq, dk.zero_(), dv.zero_(), dweight.sum()
    constants = {
        **blocks, **widths(q, v), "TOPK": kept, "VARIANT_A": variant == "A",
        "MASKED": visible is not None, "WEIGHTED": weight is not None,
        "PRECISION": precision(q.dtype),
    }  # fmt: skip
    sizes = (scale, heads, cells, keys, *strides(q, k, v))
    with torch.cuda.device_of(q):
        coarse.coarse_bwd_queries_kernel[(programs,)](
            q, k, v, visible, weight, selection, lse, dtotal, dscores, dq, dweight, delta,
            *sizes, **constants,
        )  # fmt: skip
        coarse.coarse_bwd_keys_kernel[(-(-keys // blocks["BLOCK_S"]) * batch * heads,)](
            q, k, v, visible, weight, selection, lse, delta, dtotal, dscores, dk, dv,
            *sizes, **constants,
        )  # fmt: skip
    return dq, dk, dv, dweight.sum()


def fine_constants(
    q: Tensor, v: Tensor, parents: Tensor, visible: Tensor | None, weight: Tensor | None,
    topk: int, variant: Variant,
) -> dict[str, Any]:  # fmt: skip
    children = q.shape[2] // parents.shape[2]
    candidates = power_of_two(parents.shape[3]) * children
    candidates = max(candidates, 16)
    block = widths(q, v)
    return {
        **block,
        "F": children,
        "ROWS": 16,
        "KEPT": parents.shape[3],
        "CANDIDATES": candidates,
        "TOPK": topk,
        "VARIANT_A": variant == "A",
        "MASKED": visible is not None,
        "WEIGHTED": weight is not None,
        "PRECISION": precision(q.dtype),
        "num_warps": fine_warps(candidates, max(block["BLOCK_D"], block["BLOCK_DV"])),
    }


def fine_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    parents: Tensor,
    parent_scores: Tensor | None,
    inherited: Tensor,
    scale: float,
    topk: int | None,
    variant: Variant,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Total, selection and scores; absent ones are empty."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    batch, heads, cells, _ = q.shape
    families = parents.shape[2]
    kept = topk or 0
    total = q.new_empty(batch, heads, cells, v.shape[-1], dtype=torch.float32 if kept else q.dtype)
    selection = q.new_empty(batch, heads, cells, kept, dtype=torch.int32)
    scores = q.new_empty(batch, heads, cells, kept if with_scores else 0, dtype=torch.float32)
    if q.numel() == 0:
        return total, selection, scores
    with torch.cuda.device_of(q):
        fine.fine_fwd_kernel[(batch * heads * families,)](
            q, k, v, visible, weight, parents, parent_scores, inherited.contiguous(),
            total, selection, scores, scale, heads, families, k.shape[2], *strides(q, k, v),
            **fine_constants(q, v, parents, visible, weight, kept, variant),
            BLOCK_TOPK=power_of_two(kept), WITH_SCORES=with_scores,
        )  # fmt: skip
    return total, selection, scores


def fine_backward(
    dtotal: Tensor,
    dscores: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    parents: Tensor,
    parent_scores: Tensor | None,
    selection: Tensor,
    scale: float,
    variant: Variant,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, weight, parent_scores and inherited; absent ones are empty."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    dtotal = dtotal.contiguous()
    batch, heads = q.shape[:2]
    families, keys, kept = parents.shape[2], k.shape[2], selection.shape[-1]
    programs = batch * heads * families
    f32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dweight = torch.empty(programs if weight is not None else 0, **f32)
    dparent_scores = torch.empty(parents.shape if variant == "A" else (0,), **f32)
    dinherited = torch.empty(batch, heads, families, v.shape[-1], **f32)
    stats = q.shape[:3] if variant == "B" else (0,)
    lse, delta = torch.empty(stats, **f32), torch.empty(stats, **f32)
    if programs == 0:
        return dq, dk, dv, dweight.sum(), dparent_scores, dinherited
    constants = fine_constants(q, v, parents, visible, weight, kept, variant)
    children = q.shape[2] // families
    key_families = keys // children
    with torch.cuda.device_of(q):
        fine.fine_bwd_kernel[(programs,)](
            q, k, v, visible, weight, parents, parent_scores, selection, dtotal, dscores,
            dq, dweight, dparent_scores, dinherited, lse, delta,
            scale, heads, families, keys, *strides(q, k, v), **constants,
        )  # fmt: skip
        find_users = sorted_users if deterministic else listed_users
        users, slots, first = find_users(parents, key_families)
        del constants["CANDIDATES"]
        constants |= {"ROWS": USER_ROWS, "num_warps": 2}
        fine.fine_bwd_keys_kernel[(batch * heads * key_families,)](
            q, k, v, visible, weight, parent_scores, selection, dtotal, dscores,
            users, slots, first, lse, delta, dk, dv,
            scale, heads, families, key_families, keys, *strides(q, k, v), **constants,
        )  # fmt: skip
    return dq, dk, dv, dweight.sum(), dparent_scores, dinherited


USER_ROWS = 32  # queries that a program of the key gradients takes at once
Users = tuple[Tensor, Tensor, Tensor]


def listed_users(parents: Tensor, key_families: int) -> Users:
    """For every key family and head: which query families kept it, and at which place.

    Returns users (query family of each entry), slots (its place there), and where the entries of
    each key family begin (one more than there are families). The order of a list is that in which
    the threads came by.
    """
    parents = parents.contiguous()
    batch, heads, families, kept = parents.shape
    entries, block = parents.numel(), 256
    count = parents.new_zeros(batch * heads * key_families + 1)
    users, slots = parents.new_empty(entries), parents.new_empty(entries)
    grid = (-(-entries // block),)
    fine.count_users_kernel[grid](
        parents, count[1:], entries, families * kept, key_families, BLOCK=block
    )
    first = count.cumsum(0, dtype=torch.int32)
    fine.list_users_kernel[grid](
        parents, first, torch.zeros_like(count), users, slots,
        entries, families * kept, key_families, KEPT=kept, BLOCK=block,
    )  # fmt: skip
    return users, slots, first


def sorted_users(parents: Tensor, key_families: int) -> Users:
    """As `listed_users`, every list in the order of its query families."""
    batch, heads, families, kept = parents.shape
    rows = batch * heads
    head = torch.arange(rows, device=parents.device)[:, None]
    flat = parents.reshape(rows, families * kept).long()
    nobody = rows * key_families  # sorts behind every family
    target = torch.where(flat < 0, nobody, flat + head * key_families).flatten()
    target, order = target.sort(stable=True)
    bounds = torch.arange(rows * key_families + 1, device=parents.device)
    first = torch.searchsorted(target, bounds)
    users = order // kept
    return users.int(), (order - users * kept).int(), first.int()


MOST_STEPS = {1: 5, 2: 3, 3: 2}  # coarser levels that one program can make from what it holds


def pyramid_sizes(tree: Tree, below: int, level: int) -> tuple[int, ...]:
    """Programs per head of a launch that take `below` levels down to `level`, and the grid."""
    size = (*tree.grid, 1, 1)[:3]
    coarse = (*tree.grid_at(0), 1, 1)[:3]
    return (tree.num_cells(level - below), *size, *coarse[1:])


def pyramid_warps(tokens: int, block_d: int) -> int:
    return 1 if tokens * block_d <= 4096 else 4


def pyramid_forward(tree: Tree, x: Tensor, visible: Tensor | None, num_levels: int) -> list[Tensor]:
    """The `num_levels` finest levels of a map (B, *grid, N, D), coarse -> fine, (B, N, T_l, D)."""
    x = rows_contiguous(x)
    batch, heads, dim = x.shape[0], x.shape[-2], x.shape[-1]
    levels = [
        x.new_empty(batch, heads, tree.num_cells(tree.finest - i), dim) for i in range(num_levels)
    ]  # fine -> coarse
    if x.numel() == 0:
        return levels[::-1]
    axes = (*x.stride()[1 : 1 + tree.ndim], 0, 0)[:3]
    done = 0
    while done == 0 or done < num_levels - 1:
        steps = min(MOST_STEPS[tree.ndim], num_levels - 1 - done)
        below = steps or min(MOST_STEPS[tree.ndim], tree.finest)
        cells, *sizes = pyramid_sizes(tree, below, tree.finest - done)
        outputs = [*levels[done : done + steps + 1], *[levels[done]] * 5][:6]
        block_d = power_of_two(dim)
        with torch.cuda.device_of(x):
            pyramid.pyramid_fwd_kernel[(batch * heads * cells,)](
                x if done == 0 else levels[done], visible, *outputs,
                heads, cells, *sizes, x.stride(0), *axes, x.stride(-2),
                NDIM=tree.ndim, DEPTH=tree.finest, BELOW=below, STEPS=steps, D=dim, BLOCK_D=block_d,
                MASKED=visible is not None, FROM_GRID=done == 0,
                num_warps=pyramid_warps(tree.num_children**below, block_d),
            )  # fmt: skip
        done += max(steps, 1)
        if visible is not None:
            for _ in range(steps):
                visible = group(visible, tree.num_children, axis=1).any(dim=-1)
    return levels[::-1]


def pyramid_backward(tree: Tree, grads: list[Tensor], visible: Tensor | None) -> Tensor:
    """Gradient of the map (B, *grid, N, D) from those of its levels, coarse -> fine."""
    levels = [g.contiguous() for g in reversed(grads)]  # fine -> coarse
    batch, heads, _, dim = levels[0].shape
    dx = levels[0].new_empty(batch, *tree.grid, heads, dim)
    if dx.numel() == 0:
        return dx
    masks = [visible]
    for _ in levels[1:]:
        above = masks[-1]
        masks.append(None if above is None else group(above, tree.num_children, axis=1).any(-1))
    first = list(range(0, max(len(levels) - 1, 1), MOST_STEPS[tree.ndim]))
    for start in reversed(first):
        steps = min(MOST_STEPS[tree.ndim], len(levels) - 1 - start)
        below = steps or min(MOST_STEPS[tree.ndim], tree.finest)
        cells, *sizes = pyramid_sizes(tree, below, tree.finest - start)
        inputs = [*levels[start : start + steps + 1], *[levels[start]] * 5][:6]
        out = dx if start == 0 else torch.empty_like(levels[start])
        block_d = power_of_two(dim)
        with torch.cuda.device_of(dx):
            pyramid.pyramid_bwd_kernel[(batch * heads * cells,)](
                out, masks[start], *inputs, heads, cells, *sizes,
                NDIM=tree.ndim, DEPTH=tree.finest, BELOW=below, STEPS=steps, D=dim, BLOCK_D=block_d,
                MASKED=visible is not None, FROM_GRID=start == 0,
                num_warps=pyramid_warps(tree.num_children**below, block_d),
            )  # fmt: skip
        levels[start] = out
    return dx
