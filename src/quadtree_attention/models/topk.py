# SPDX-License-Identifier: Apache-2.0
"""Get and set K of the quadtree layers of a network."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.models.accelerate import accelerated_layers, checked_topk
from quadtree_attention.models.parts.dense_layers import DenseLayer
from quadtree_attention.models.parts.row_attention import RowAttention
from quadtree_attention.nn.attention import QuadtreeAttention
from quadtree_attention.ops.attention.problem import check_topk


def quadtree_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with quadtree attention by their names in the network."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuadtreeAttention)
        or (isinstance(layer, RowAttention) and layer.attention != "full")
    }


def set_topk(model: nn.Module, topk: Mapping[str, int | Sequence[int] | None]) -> None:
    """Set the number of cells kept per query cell; on an error no layer is changed.

    Args:
        model: A network with quadtree attention, or one that `accelerate` was called on.
        topk: Per layer name: one number, or one per level with a selection, coarse -> fine;
            None keeps a layer of an accelerated network dense.

    Raises:
        OptionError: `topk` is no mapping, a layer does not exist, or a number is not accepted.

    Example:
        >>> from quadtree_attention import models
        >>> model = models.create("test_quadtree")
        >>> set_topk(model, {"stages.0.blocks.0.attn": (8, 4, 2)})
        >>> model.stages[0].blocks[0].attn.topk
        (8, 4, 2)
    """
    if not isinstance(topk, Mapping):
        raise OptionError(
            f"topk must be a mapping by layer name, got {topk!r}; for one K in every layer pass "
            "dict.fromkeys(layers, K)"
        )
    layers: dict[str, Any] = {**quadtree_layers(model), **accelerated_layers(model)}
    checked: dict[str, Any] = {}
    for name, value in topk.items():
        checks.known(name, layers, "a quadtree layer")
        try:
            if isinstance(layers[name], DenseLayer):
                checked[name] = checked_topk(value, layers[name].options["num_levels"])
            else:
                checked[name] = check_topk(cast(Any, value), layers[name].num_levels)
        except OptionError as error:
            raise OptionError(f"{name}: {error}") from error
    for name, values in checked.items():
        layers[name].topk = values
