# SPDX-License-Identifier: Apache-2.0
"""Value pyramids on the grid: every coarser map is a function of the next finer one.

Maps are (B, *grid, C), and a level has one cell for every 2 cells of each axis of the next finer
one, rounded up. So every cell of every level covers part of the map, and without a mask all are
visible, whatever the size.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.nn.untouched import is_everything_watched, is_untouched
from quadtree_attention.ops.norms import can_fuse_map, map_norm
from quadtree_attention.ops.tree import Tree, accumulation_dtype, hide, is_known

Activation = Literal["gelu", "relu"]
NORM_EPS = 1e-5
_ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


def by_parent(x: Tensor, parents: Sequence[int]) -> Tensor:
    """Cells under their parents: (B, *grid, C) -> (B, *parents, F, C), zeros past the edge."""
    grid, ndim = x.shape[1:-1], len(parents)
    missing = [2 * above - size for size, above in zip(grid, parents, strict=True)]
    if not all(is_known(count == 0) for count in missing):
        x = F.pad(x, [0, 0, *(side for count in reversed(missing) for side in (0, count))])
    x = x.reshape(x.shape[0], *(side for above in parents for side in (above, 2)), x.shape[-1])
    outer, inner = range(1, 2 * ndim, 2), range(2, 2 * ndim + 1, 2)
    return x.permute(0, *outer, *inner, 2 * ndim + 1).flatten(ndim + 1, 2 * ndim)


def plus_parents(x: Tensor, above: Tensor) -> Tensor:
    """Adds to every cell what its parent has: x (B, *grid, C), above (B, *parents, C)."""
    (batch, *grid, channels), parents = x.shape, above.shape[1:-1]

    def apart(siblings: int) -> list[int]:
        """(B, p0, siblings, p1, siblings, ..., C)"""
        return [batch, *(side for size in parents for side in (size, siblings)), channels]

    shared = above.reshape(apart(1))
    if all(is_known(size == 2 * over) for size, over in zip(grid, parents, strict=True)):
        return (x.reshape(apart(2)) + shared).reshape(x.shape)  # broadcast, not copied
    copied = shared.expand(apart(2)).reshape(batch, *(2 * size for size in parents), channels)
    for axis, size in enumerate(grid, start=1):
        copied = copied.narrow(axis, 0, size)
    return x + copied


def visible_levels(tree: Tree, mask: Tensor | None) -> list[Tensor | None]:
    """Which cells of each level may be seen, (B, *grid_at(level)) coarse -> fine; None for all."""
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


class VisibleNorm(nn.Module):
    """Group norm with one group whose statistics come from visible cells only.

    Args:
        dim: Channels.
        eps: Added to the variance.
    """

    def __init__(
        self, dim: int, eps: float = NORM_EPS, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """(B, *grid, C) with (B, *grid) bool or None -> (B, *grid, C)"""
        wide = x.to(accumulation_dtype(x.dtype))
        axes = tuple(range(1, x.ndim))
        if visible is None:
            variance, mean = torch.var_mean(wide, dim=axes, correction=0, keepdim=True)
        else:
            shown = visible[..., None]
            count = (shown.sum(dim=axes, keepdim=True) * x.shape[-1]).clamp(min=1)
            mean = torch.where(shown, wide, 0).sum(dim=axes, keepdim=True) / count
            variance = torch.where(shown, wide - mean, 0).square().sum(dim=axes, keepdim=True)
            variance = variance / count
        scale = (variance + self.eps).rsqrt() * self.weight  # (B, ..., C): one pass over the map
        return torch.addcmul(self.bias - mean * scale, wide, scale).to(x.dtype)


class ValueBranch(nn.Module):
    """One step of the value pyramid, from a level to the next coarser one.

    Norm, activation, convolution over the children of a cell, norm, activation, 1x1 convolution.

    Args:
        dim: Channels.
        num_children: Children of a cell.
        activation: "gelu" or "relu".
    """

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
        self.activation = activation
        self.norm1 = VisibleNorm(dim, device=device, dtype=dtype)
        self.reduce = nn.Linear(num_children * dim, dim, device=device, dtype=dtype)
        self.norm2 = VisibleNorm(dim, device=device, dtype=dtype)
        self.mix = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.act = _ACTIVATIONS[activation]()
        vector, wide = torch.Size([dim]), torch.Size([dim, num_children * dim])
        square = torch.Size([dim, dim])
        self._shapes = [vector, vector, wide, vector, vector, vector, square, vector]

    def forward(
        self,
        x: Tensor,
        parents: Sequence[int],
        visible: Tensor | None,
        visible_above: Tensor | None,
        backend: str = "auto",
    ) -> Tensor:
        """(B, *grid, C) -> (B, *parents, C); the masks are those of x and of the result."""
        plain = self._are_norms_plain() and not is_everything_watched() and x.shape[-1] == self.dim
        if plain and visible is None and len(parents) == 2 and can_fuse_map(x, backend):
            x = self.reduce(self._fused(self.norm1, x, by_parent=True))
            return self.mix(self._fused(self.norm2, x, by_parent=False))
        x = hide(self.act(self.norm1(x, visible)), visible)
        x = self.reduce(by_parent(x, parents).flatten(-2))
        x = self.mix(self.act(self.norm2(x, visible_above)))
        return hide(x, visible_above)

    def parameters_if_untouched(self) -> list[Tensor] | None:
        """Weight and bias of its layers in order; None where one was changed or is watched."""
        layers: Any = self._modules  # attributes of a module are slow to look up
        if not (
            is_untouched(self, ValueBranch)
            and self._are_norms_plain()
            and is_untouched(layers.get("reduce"), nn.Linear)
            and is_untouched(layers.get("mix"), nn.Linear)
        ):
            return None
        parameters = [
            layers[name]._parameters.get(kind)
            for name in ("norm1", "reduce", "norm2", "mix")
            for kind in ("weight", "bias")
        ]
        if any(x is None for x in parameters) or [x.shape for x in parameters] != self._shapes:
            return None
        return parameters

    def _are_norms_plain(self) -> bool:
        """Whether norms and activation do what the fused kernels do."""
        layers: Any = self._modules
        norm1, norm2, act = layers.get("norm1"), layers.get("norm2"), layers.get("act")
        return (
            is_untouched(norm1, VisibleNorm)
            and is_untouched(norm2, VisibleNorm)
            and is_untouched(act, _ACTIVATIONS[self.activation])
            and (self.activation == "relu" or act.approximate == "none")
            and norm1.eps == norm2.eps == NORM_EPS
        )

    def _fused(self, norm: VisibleNorm, x: Tensor, *, by_parent: bool) -> Tensor:
        return map_norm(x, norm.weight, norm.bias, norm.eps, self.activation, by_parent=by_parent)
