# SPDX-License-Identifier: Apache-2.0
"""Value pyramids on the grid: every coarser map is a function of the next finer one.

Maps are (B, *grid, C). A level has half of the size of the next finer level, rounded up. Every cell
of every level therefore covers a part of the map, and without a mask all cells are visible.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.nn.renamed import rename_on_load
from quadtree_attention.ops.attention.tree import Tree, accumulation_dtype, hide, is_known
from quadtree_attention.ops.autograd import is_transformed
from quadtree_attention.ops.norms.functional import can_fuse_map, map_norm
from quadtree_attention.ops.values.functional import can_fuse, norm_act_linear

Activation = Literal["gelu", "relu"]
NORM_EPS = 1e-5
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


def by_parent(x: Tensor, parents: Sequence[int]) -> Tensor:
    """Group cells by parent: (B, *grid, C) -> (B, *parents, F, C), with zero padding."""
    grid, ndim = x.shape[1:-1], len(parents)
    missing = [2 * above - size for size, above in zip(grid, parents, strict=True)]
    if not all(is_known(count == 0) for count in missing):
        x = F.pad(x, [0, 0, *(side for count in reversed(missing) for side in (0, count))])
    x = x.reshape(x.shape[0], *(side for above in parents for side in (above, 2)), x.shape[-1])
    outer, inner = range(1, 2 * ndim, 2), range(2, 2 * ndim + 1, 2)
    return x.permute(0, *outer, *inner, 2 * ndim + 1).flatten(ndim + 1, 2 * ndim)


def plus_parents(x: Tensor, above: Tensor) -> Tensor:
    """Add the value of its parent to every cell: x (B, *grid, C), above (B, *parents, C)."""
    (batch, *grid, channels), parents = x.shape, above.shape[1:-1]

    def apart(siblings: int) -> list[int]:
        """(B, p0, siblings, p1, siblings, ..., C)"""
        return [batch, *(side for size in parents for side in (size, siblings)), channels]

    is_whole = all(is_known(size == 2 * over) for size, over in zip(grid, parents, strict=True))
    if is_whole and not x.is_cpu:
        return (x.reshape(apart(2)) + above.reshape(apart(1))).reshape(x.shape)
    # Axis by axis: on a CPU, backward of a single broadcast over all axes takes ten times as long.
    for axis, size in enumerate(grid, start=1):
        above = torch.stack([above, above], axis + 1).flatten(axis, axis + 1).narrow(axis, 0, size)
    return x + above


def visible_levels(tree: Tree, mask: Tensor | None) -> list[Tensor | None]:
    """Visible cells of each level, (B, *grid_at(level)) coarse -> fine; None for all."""
    levels = [mask]
    for level in reversed(range(tree.finest)):
        if mask is not None:
            mask = by_parent(mask[..., None], tree.grid_at(level)).any(dim=-2)[..., 0]
        levels.append(mask)
    return list(reversed(levels))


def mean_over_children(x: Tensor, visible: Tensor | None, parents: Sequence[int]) -> Tensor:
    """Mean over the visible children of every cell: (B, *grid, C) -> (B, *parents, C)."""
    if visible is None:
        visible = x.new_ones(1, *x.shape[1:-1], dtype=torch.bool)
    total = by_parent(hide(x, visible.expand(x.shape[:-1])), parents)
    total = total.sum(dim=-2, dtype=accumulation_dtype(x.dtype))
    count = by_parent(visible[..., None], parents).sum(dim=-2).clamp(min=1)
    return (total / count).to(x.dtype)


def norm_of_maps(
    x: Tensor, visible: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """Group norm with one group and statistics over visible cells only.

    Shapes: (B, *grid, C) with (B, *grid) bool or None -> (B, *grid, C)
    """
    wide = x.to(accumulation_dtype(x.dtype))
    if visible is None and x.is_cpu and not is_transformed(x):
        # A tenth of the time on a CPU; a GPU would copy the maps. In torch 2.11, `group_norm` of
        # channels-last maps raises in forward mode and in `vmap`
        weight, bias = weight.to(wide.dtype), bias.to(wide.dtype)
        return F.group_norm(wide.movedim(-1, 1), 1, weight, bias, eps).movedim(1, -1).to(x.dtype)
    axes = tuple(range(1, x.ndim))
    if visible is None:
        variance, mean = torch.var_mean(wide, dim=axes, correction=0, keepdim=True)
    else:
        shown = visible[..., None]
        count = (shown.sum(dim=axes, keepdim=True) * x.shape[-1]).clamp(min=1)
        mean = torch.where(shown, wide, 0).sum(dim=axes, keepdim=True) / count
        variance = torch.where(shown, wide - mean, 0).square().sum(dim=axes, keepdim=True)
        variance = variance / count
    scale = (variance + eps).rsqrt() * weight  # (B, ..., C): one pass over the map
    return torch.addcmul(bias - mean * scale, wide, scale).to(x.dtype)


class NormActLinear(nn.Module):
    """`linear(activation(norm(x)))` of cells, or of the concatenated children of a cell.

    The norm is `norm_of_maps`. The module has no submodules that could be replaced or hooked, so
    that fused kernels can be used.

    Args:
        dim: Channels.
        num_children: Children of a cell; 1: single cells.
        activation: "gelu" or "relu".
    """

    eps = NORM_EPS
    fused = False  # see `fuse_for_inference`

    def __init__(
        self,
        dim: int,
        num_children: int,
        activation: Activation,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.dim, self.num_children, self.activation = dim, num_children, activation
        self.norm_weight = nn.Parameter(torch.ones(dim, **dd))
        self.norm_bias = nn.Parameter(torch.zeros(dim, **dd))
        self.weight = nn.Parameter(torch.empty(dim, num_children * dim, **dd))
        self.bias = nn.Parameter(torch.empty(dim, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as torch's norms and linear layers."""
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        x: Tensor,
        visible: Tensor | None,
        parents: Sequence[int] | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """(B, *grid, C) -> (B, *grid, C), or (B, *parents, C) of all children of a cell.

        Args:
            x: Maps.
            visible: Boolean (B, *grid), True = visible, or None for all.
            parents: Grid of the parents; None: single cells.
            backend: Backend of the enclosing call.
        """
        is_map = visible is None and x.ndim == 4 and x.shape[-1] == self.dim
        if is_map and can_fuse(x, backend, asked=self.fused):
            return norm_act_linear(
                x, self.norm_weight, self.norm_bias, self.weight, self.bias, self.eps,
                self.activation, by_parent=parents is not None,
            )  # fmt: skip
        if is_map and can_fuse_map(x, backend):
            x = map_norm(
                x, self.norm_weight, self.norm_bias, self.eps, self.activation,
                by_parent=parents is not None,
            )  # fmt: skip
        else:
            x = norm_of_maps(x, visible, self.norm_weight, self.norm_bias, self.eps)
            x = hide(_ACTIVATIONS[self.activation](x), visible)
            if parents is not None:
                x = by_parent(x, parents).flatten(-2)
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.dim}, num_children={self.num_children}, activation={self.activation!r}"


class ValueBranch(nn.Module):
    """One step of the value pyramid, from a level to the next coarser one.

    It applies norm, activation and a convolution over the children of a cell (`reduce`), then norm,
    activation and a 1x1 convolution (`mix`).

    Args:
        dim: Channels.
        num_children: Children of a cell.
        activation: "gelu" or "relu".
    """

    OLD_NAMES: ClassVar = {
        f"{norm}.{kind}": f"{part}.norm_{kind}"
        for norm, part in (("norm1", "reduce"), ("norm2", "mix"))
        for kind in ("weight", "bias")
    }

    def __init__(
        self,
        dim: int,
        num_children: int,
        activation: Activation = "gelu",
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise OptionError(
                f"value_act must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}; "
                "classification uses gelu, detection and segmentation use relu"
            )
        self.dim = dim
        self.num_children = num_children
        self.activation = activation
        self.reduce = NormActLinear(dim, num_children, activation, device=device, dtype=dtype)
        self.mix = NormActLinear(dim, 1, activation, device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(rename_on_load)

    def forward(
        self,
        x: Tensor,
        parents: Sequence[int],
        visible: Tensor | None,
        visible_above: Tensor | None,
        backend: str = "auto",
    ) -> Tensor:
        """(B, *grid, C) -> (B, *parents, C); the masks are of x and of the result."""
        x = self.reduce(x, visible, parents, backend)
        return hide(self.mix(x, visible_above, None, backend), visible_above)
