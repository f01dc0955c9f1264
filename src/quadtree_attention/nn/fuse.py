# SPDX-License-Identifier: Apache-2.0
"""Fusion of layers for inference, with fewer kernel launches."""

from typing import TypeVar

from torch import nn

from quadtree_attention.errors import OptionError
from quadtree_attention.nn.attention import QuadtreeAttention
from quadtree_attention.nn.graphs import graphed, without_graphs
from quadtree_attention.nn.merged import MergedLinear, can_merge
from quadtree_attention.nn.position import DepthwiseConv
from quadtree_attention.nn.value_pyramid import NormActLinear

Model = TypeVar("Model", bound=nn.Module)
_FUSED = (QuadtreeAttention, DepthwiseConv, NormActLinear)


def fuse_for_inference(model: Model, *, graphs: bool = False) -> Model:
    """Merge and fuse layers of a model in place for inference, and return the model.

    Without gradients, one matrix product computes queries, keys and values of an attention (keys
    and values in cross attention). On a GPU, learned value pyramids, position encodings and the
    convolutions of MLPs use fused kernels. Results are the same up to rounding.

    Parameters keep their names. Weights may be changed in place, replaced or moved afterwards.
    Linear layers that are replaced or get hooks, also later, run one by one. With gradients and in
    compiled models, all linear layers run one by one.

    Args:
        model: Any model with layers of this package; weights are not cast: use
            `model.to(torch.bfloat16)` or autocast.
        graphs: Capture a CUDA graph at the second call with an input shape, and replay it from
            then on. The model must launch the same kernels for all inputs of a shape.

    Example:
        >>> import torch
        >>> from quadtree_attention import QuadtreeAttention, fuse_for_inference
        >>> attention = fuse_for_inference(QuadtreeAttention(64, num_heads=2).eval())
        >>> with torch.inference_mode():
        ...     out = attention(torch.randn(1, 20, 27, 64))
        >>> out.shape
        torch.Size([1, 20, 27, 64])
    """
    layers = [module for module in model.modules() if isinstance(module, _FUSED)]
    if not layers:
        raise OptionError(
            f"fuse_for_inference needs a model with QuadtreeAttention, got {type(model).__name__}; "
            "there is nothing to fuse in it"
        )
    for layer in layers:
        layer.fused = True
        if isinstance(layer, QuadtreeAttention) and layer.merged is None:
            three = [layer.q_proj, layer.k_proj, layer.v_proj]
            layer.merged = MergedLinear(three) if can_merge(three) else None
    return graphed(model) if graphs else model


def unfuse(model: Model) -> Model:
    """Undo `fuse_for_inference` in place, and return the model."""
    without_graphs(model)
    for module in model.modules():
        if isinstance(module, _FUSED):
            module.fused = False
        if isinstance(module, QuadtreeAttention) and module.merged is not None:
            module.merged.release()
            module.merged = None
    return model
