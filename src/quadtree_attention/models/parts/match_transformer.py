# SPDX-License-Identifier: Apache-2.0
"""Transformers on a pair of maps with alternating self and cross attention."""

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.models.parts.masks import stack_masks
from quadtree_attention.nn.block import ContextBlock, ConvMlp
from quadtree_attention.nn.norm import TokenNorm
from quadtree_attention.nn.position import DepthwiseConv
from quadtree_attention.ops.attention.tree import is_exporting

BlockKind = Literal["loftr", "vit"]
CPU_NUMBERS = 2**18  # numbers in a map; smaller maps are processed together
MakeAttention = Callable[[], nn.Module]


class LoftrBlock(nn.Module):
    """Post-norm block: the MLP gets the concatenation of a cell and its message.

    Args:
        dim: Channels.
        attn: The attention, with the interface of `QuadtreeAttention`.
    """

    def __init__(self, dim: int, attn: nn.Module, **dd: Any) -> None:
        super().__init__()
        self.attn = attn
        self.norm1 = TokenNorm(dim, 1e-5, before_linear=True, **dd)
        self.mlp = nn.Sequential(
            nn.Linear(2 * dim, 2 * dim, bias=False, **dd),
            nn.ReLU(),
            nn.Linear(2 * dim, dim, bias=False, **dd),
        )
        self.norm2 = TokenNorm(dim, 1e-5, **dd)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """See `QuadtreeAttention.forward`."""
        message = self.norm1(self.attn(x, context, mask=mask, context_mask=context_mask))
        return x + self.norm2(self.mlp(torch.cat([x, message.to(x.dtype)], dim=-1)))


class MatchTransformer(nn.Module):
    """Pairs of a self and a cross block, shared by the two maps.

    Args:
        dim: Channels.
        num_pairs: Number of pairs of blocks.
        make_attention: Creates the attention of one block.
        block: "loftr": cross blocks update map 0, then map 1 from the new map 0. "vit": cross
            blocks update both maps at once, symmetric in the maps.
    """

    def __init__(
        self,
        dim: int,
        num_pairs: int,
        make_attention: MakeAttention,
        block: BlockKind = "vit",
        **dd: Any,
    ) -> None:
        super().__init__()
        checks.one_of(get_args(BlockKind), block=block)
        self.one_after_the_other = block == "loftr"
        layers: list[nn.Module]
        if block == "loftr":
            layers = [LoftrBlock(dim, make_attention(), **dd) for _ in range(2 * num_pairs)]
            for layer in layers:
                _init_loftr(layer)
        else:  # as in the original, all blocks have the same initial weights
            attn, mlp = make_attention(), ConvMlp(dim, 4 * dim, extra_relu=True, **dd)
            first = ContextBlock(dim, attn, mlp, norm_eps=1e-5, **dd)
            first.apply(_init_vit)
            layers = [first, *(copy.deepcopy(first) for _ in range(2 * num_pairs - 1))]
        self.layers = nn.ModuleList(layers)  # self, cross, self, cross, ...

    def forward(
        self, map0: Tensor, map1: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, *grid0, C) and (B, *grid1, C), masks without C -> the same shapes"""
        return self._from(0, map0, map1, mask0, mask1)

    def begin(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The first self block of one map, (B, *grid, C), for `go_on`."""
        return self.layers[0](x, mask=mask)

    def go_on(
        self, map0: Tensor, map1: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Results of `forward` (up to rounding) from both results of `begin`."""
        return self._from(1, map0, map1, mask0, mask1)

    def both_ways(self, map0: Tensor, map1: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the results of (map0, map1) and (map1, map0), computing the first block once."""
        map0, map1 = _both(self.layers[0], (map0, map1), None, (None, None))
        return self._from(1, map0, map1), self._from(1, map1, map0)

    def _from(
        self,
        first: int,
        map0: Tensor,
        map1: Tensor,
        mask0: Tensor | None = None,
        mask1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        masks = (mask0, mask1)
        for i, layer in list(enumerate(self.layers))[first:]:
            if i % 2 == 0:
                map0, map1 = _both(layer, (map0, map1), None, masks)
            elif self.one_after_the_other:
                map0 = layer(map0, map1, mask=mask0, context_mask=mask1)
                map1 = layer(map1, map0, mask=mask1, context_mask=mask0)
            else:
                map0, map1 = _both(layer, (map0, map1), (map1, map0), masks)
        return map0, map1


def _both(
    layer: nn.Module,
    maps: tuple[Tensor, Tensor],
    contexts: tuple[Tensor, Tensor] | None,
    masks: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Apply a layer to both maps, as one batch if they have the same size.

    On a CPU without gradients, large maps are processed one by one, for half of the memory.
    """
    if not is_exporting() and maps[0].shape == maps[1].shape and not _is_large(maps[0]):
        mask = stack_masks(*masks)
        context = None if contexts is None else torch.cat(contexts)
        context_mask = None if contexts is None else stack_masks(masks[1], masks[0])
        out = layer(torch.cat(maps), context, mask=mask, context_mask=context_mask)
        first, second = out.chunk(2)
        return first, second
    if contexts is None:
        return layer(maps[0], mask=masks[0]), layer(maps[1], mask=masks[1])
    return (
        layer(maps[0], contexts[0], mask=masks[0], context_mask=masks[1]),
        layer(maps[1], contexts[1], mask=masks[1], context_mask=masks[0]),
    )


def _is_large(x: Tensor) -> bool:
    return x.is_cpu and x.numel() > CPU_NUMBERS and not torch.is_grad_enabled()


def _init_loftr(block: nn.Module) -> None:
    for name, parameter in block.named_parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def _init_vit(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
    elif isinstance(module, DepthwiseConv):
        nn.init.normal_(module.weight, std=math.sqrt(2.0 / 3**module.ndim))
    if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
        nn.init.zeros_(bias)
