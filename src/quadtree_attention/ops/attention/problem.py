# SPDX-License-Identifier: Apache-2.0
"""Checks of user input; the result is a frozen `Problem`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from quadtree_attention.errors import DTypeError, OptionError, ShapeError
from quadtree_attention.ops.attention.tree import Tree, grid_of, is_known

Variant = Literal["A", "B", "C"]
LEVELS_OF_ANY_MAP = 4  # accepted for any size: networks process maps of a few cells
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Problem:
    """Description of a call without its tensors, from which backends derive if they can run it."""

    batch: int
    query_tree: Tree
    key_tree: Tree
    num_heads: int
    head_dim: int
    value_dim: int
    topk: tuple[int, ...]  # cells kept at each selecting level, at most all
    variant: Variant
    scale: float
    dtype: torch.dtype
    device: torch.device

    @property
    def num_levels(self) -> int:
        return self.query_tree.num_levels

    @property
    def num_children(self) -> int:
        return self.query_tree.num_children

    def __str__(self) -> str:
        return (
            f"variant {self.variant}, batch {self.batch}, query grid {self.query_tree.grid}, "
            f"key grid {self.key_tree.grid}, {self.num_heads} heads, head dim {self.head_dim}, "
            f"value dim {self.value_dim}, {self.num_levels} levels, topk {self.topk}, "
            f"{self.dtype} on {self.device}"
        )


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_levels: int,
    topk: int | Sequence[int],
    variant: Variant = "B",
    level_weights: Tensor | None = None,
    scale: float | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Problem:
    """Check the arguments of `quadtree_attention` and return the problem."""
    check_tensors(q, k, v)
    check_mask("query_mask", query_mask, "q", q.shape[:-2], q.device)
    check_mask("key_mask", key_mask, "k", k.shape[:-2], k.device)
    check_levels(num_levels)
    query_grid, key_grid = grid_of(q.shape[1:-2]), grid_of(k.shape[1:-2])
    check_depth(num_levels, query_grid, key_grid)
    check_variant(variant)
    check_level_weights(level_weights, num_levels, variant, q.device)
    topk, scale = check_topk(topk, num_levels), check_scale(scale, q.shape[-1])
    sizes = q.shape[0], q.shape[-2], q.shape[-1], v.shape[-1]
    is_plain = not torch.compiler.is_compiling() and all(type(size) is int for size in sizes)
    describe = _described if is_plain else _describe
    return describe(*sizes, query_grid, key_grid, topk, variant, scale, q.dtype, q.device)


def _describe(
    batch: int,
    num_heads: int,
    head_dim: int,
    value_dim: int,
    query_grid: tuple[int, ...],
    key_grid: tuple[int, ...],
    topk: tuple[int, ...],
    variant: Variant,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Problem:
    """Create the problem of checked arguments."""
    num_levels = len(topk) + 1
    key_tree = Tree(key_grid, num_levels)
    return Problem(
        batch=batch,
        query_tree=Tree(query_grid, num_levels),
        key_tree=key_tree,
        num_heads=num_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        topk=effective_topk(topk, key_tree),
        variant=variant,
        scale=scale,
        dtype=dtype,
        device=device,
    )


_described = lru_cache(maxsize=256)(_describe)


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise DTypeError(
                f"{name} must be a torch.Tensor, got {type(x).__name__}; convert it first, "
                "for example with torch.as_tensor"
            )
        if not 4 <= x.ndim <= 6:
            raise ShapeError(
                f"{name} must be (batch, *grid, heads, dim) with 1, 2 or 3 grid axes, "
                f"got {x.ndim} axes: {name}.shape={_shape(x)}; add or flatten axes to fit"
            )
        if 0 in x.shape[1:]:
            raise ShapeError(
                f"every axis of {name} but the batch must have at least one entry, got axis "
                f"{x.shape.index(0, 1)} empty: {name}.shape={_shape(x)}; pass a grid of size 1 or "
                "more"
            )
    _check_dtypes_and_devices(tensors)

    def shapes() -> str:
        return f"q.shape={_shape(q)}, k.shape={_shape(k)}, v.shape={_shape(v)}"

    if q.ndim != k.ndim:
        raise ShapeError(
            f"q and k must have the same number of grid axes, got {q.ndim - 3} and {k.ndim - 3}: "
            f"{shapes()}; reshape the smaller one"
        )
    if k.shape[1:-2] != v.shape[1:-2]:
        raise ShapeError(
            f"k and v must lie on the same grid, got {_shape(k)[1:-2]} and {_shape(v)[1:-2]}: "
            f"{shapes()}; compute both from the same map"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ShapeError(
            f"q, k and v must have the same batch size, got {q.shape[0]}, {k.shape[0]} and "
            f"{v.shape[0]}: {shapes()}; use Tensor.expand to share one among many"
        )
    if not q.shape[-2] == k.shape[-2] == v.shape[-2]:
        raise ShapeError(
            f"q, k and v must have the same number of heads, got {q.shape[-2]}, {k.shape[-2]} and "
            f"{v.shape[-2]}: {shapes()}; use Tensor.expand to share heads"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            f"q and k must have the same head dim, got {q.shape[-1]} and {k.shape[-1]}: "
            f"{shapes()}; project both to one width (only v may differ)"
        )


def _check_dtypes_and_devices(tensors: dict[str, Tensor]) -> None:
    first = next(iter(tensors.values()))
    dtype, device = first.dtype, first.device
    if dtype in DTYPES and all(x.dtype == dtype and x.device == device for x in tensors.values()):
        return
    dtypes = ", ".join(f"{name}.dtype={x.dtype}" for name, x in tensors.items())
    devices = ", ".join(f"{name}.device={x.device}" for name, x in tensors.items())
    names = _names(tensors)
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise DTypeError(
                f"{name} must be float32, float64, float16 or bfloat16, got {dtypes}; "
                f"convert it, for example with {name}.float()"
            )
    if any(x.dtype != dtype for x in tensors.values()):
        raise DTypeError(
            f"{names} must have one dtype, got {dtypes}; convert them to the same "
            "(torch.autocast does it for you)"
        )
    raise DTypeError(f"{names} must be on one device, got {devices}; move them with Tensor.to")


def check_mask(
    name: str, mask: Tensor | None, owner: str, shape: tuple[int, ...], device: torch.device
) -> None:
    """Check a mask against the (batch, *grid) and the device of its tensor."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DTypeError(
            f"{name} must be a bool tensor with True = visible, got {got}; "
            "compare to make one, for example weights > 0"
        )
    if mask.shape != shape:
        raise ShapeError(
            f"{name} must be (batch, *grid) of {owner}, that is {tuple(shape)}, got "
            f"{name}.shape={_shape(mask)}; use Tensor.expand to share one mask in the batch"
        )
    if mask.device != device:
        raise DTypeError(
            f"{name} and {owner} must be on one device, got {name}.device={mask.device}, "
            f"{owner}.device={device}; move it with Tensor.to"
        )


def check_levels(num_levels: int) -> None:
    if not isinstance(num_levels, int) or isinstance(num_levels, bool) or num_levels < 1:
        raise OptionError(
            f"num_levels must be an integer of at least 1, got {num_levels=}; "
            "1 is full attention, 3 or 4 are usual"
        )


def check_depth(num_levels: int, *grids: Sequence[int]) -> None:
    """Raise `OptionError` for levels above a single cell, which would only add padding."""
    sides = [size for grid in grids for size in grid]
    if not all(isinstance(size, int) for size in sides):  # symbolic, unknown until run time
        return
    most = max(LEVELS_OF_ANY_MAP, (max(sides) - 1).bit_length() + 1)
    if num_levels > most:
        shapes = " and ".join("x".join(map(str, grid)) for grid in dict.fromkeys(map(tuple, grids)))
        raise OptionError(
            f"num_levels must be at most {most} for maps of {shapes}, got {num_levels=}; "
            "the coarsest level is a single cell by then"
        )


def check_variant(variant: str) -> None:
    if variant not in get_args(Variant):
        raise OptionError(
            f"variant must be 'A', 'B' or 'C', got {variant=}; 'B' is what the paper recommends, "
            "'C' is for networks that were trained with dense attention"
        )


def check_level_weights(
    level_weights: Tensor | None, num_levels: int, variant: Variant, device: torch.device
) -> None:
    if level_weights is None:
        return
    if variant != "B":
        raise OptionError(
            f"level_weights belong to variant 'B', got them with {variant=}; "
            "pass level_weights=None or variant='B'"
        )
    if not isinstance(level_weights, Tensor) or not level_weights.is_floating_point():
        got = level_weights.dtype if isinstance(level_weights, Tensor) else type(level_weights)
        raise DTypeError(
            f"level_weights must be a floating-point tensor of logits, got {got}; "
            "convert them with torch.tensor(..., dtype=torch.float32)"
        )
    if level_weights.shape != (num_levels,):
        raise ShapeError(
            f"level_weights must hold one logit per level, coarse -> fine: ({num_levels},), got "
            f"level_weights.shape={_shape(level_weights)}; pass {num_levels} values"
        )
    if level_weights.device != device:
        raise DTypeError(
            f"level_weights and q must be on one device, got {level_weights.device=}, "
            f"q.device={device}; move them with Tensor.to"
        )


def check_topk(topk: int | Sequence[int], num_levels: int) -> tuple[int, ...]:
    """Return the number of cells to keep at each selecting level, coarse -> fine."""
    if isinstance(topk, int):
        values = (topk,) * max(num_levels - 1, 1)
    elif isinstance(topk, Sequence) and not isinstance(topk, str):
        values = tuple(topk)
        if len(values) != num_levels - 1:
            raise OptionError(
                f"topk must have one entry per level that selects, coarse -> fine: "
                f"{num_levels - 1} for {num_levels=}, got {len(values)}: {topk=}; "
                "the finest level selects nothing, leave it out, or pass one int for all"
            )
    else:
        raise OptionError(f"topk must be an int or a sequence of ints, got {topk!r}; try topk=8")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(
                f"topk must be at least 1 at every level, got {topk=}; "
                "more than there is keeps everything"
            )
    return values[: num_levels - 1]


def effective_topk(topk: tuple[int, ...], key_tree: Tree) -> tuple[int, ...]:
    """Limit K of each level to its number of candidates."""
    candidates = key_tree.num_cells(0)
    effective = []
    for wanted in topk:
        kept = candidates if is_known(candidates <= wanted) else wanted
        effective.append(kept)
        candidates = key_tree.num_children * kept
    return tuple(effective)


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, Real) or not isfinite(scale):
        raise OptionError(
            f"scale must be a finite number, got {scale=}; None means head_dim ** -0.5"
        )
    return float(scale)


def check_levels_of_maps(qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor]) -> None:
    """Check that `qs`, `ks` and `vs` are lists of the same length."""
    for name, levels in {"qs": qs, "ks": ks, "vs": vs}.items():
        if isinstance(levels, Tensor) or not isinstance(levels, Sequence) or len(levels) == 0:
            raise ShapeError(
                f"{name} must be a list of maps, coarse -> fine, with at least one level, got "
                f"{type(levels).__name__}; for a single map call quadtree_attention"
            )
    if not len(qs) == len(ks) == len(vs):
        raise ShapeError(
            f"qs, ks and vs must have the same number of levels, got {len(qs)}, {len(ks)} and "
            f"{len(vs)}; build all three to the same depth"
        )


def check_pyramids(qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor]) -> None:
    """Check that three lists of maps are pyramids of one problem, coarse -> fine."""
    check_tensors(qs[-1], ks[-1], vs[-1])
    for name, levels in {"qs": qs, "ks": ks, "vs": vs}.items():
        _check_pyramid(name, levels)


def _check_pyramid(name: str, levels: Sequence[Tensor]) -> None:
    finest = levels[-1]
    tree = Tree(grid_of(finest.shape[1:-2]), len(levels))
    _check_dtypes_and_devices({f"{name}[{i}]": x for i, x in enumerate(levels)})
    for i, x in enumerate(levels):
        expected = (finest.shape[0], *tree.grid_at(i), *finest.shape[-2:])
        if tuple(x.shape) != expected:
            raise ShapeError(
                f"{name} must halve from level to level, rounding up, and run coarse -> fine: "
                f"{name}[{i}] must be {expected} under a finest map {_shape(finest)}, got "
                f"{_shape(x)}; is the list reversed or pooled without ceil_mode?"
            )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _names(tensors: dict[str, Tensor]) -> str:
    *first, last = tensors
    return f"{', '.join(first)} and {last}" if first else last
