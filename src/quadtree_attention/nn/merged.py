# SPDX-License-Identifier: Apache-2.0
"""Linear layers with the same input, merged into one."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MergedLinear:
    """Linear layers with the same input, in one matrix product.

    Their weights become views of one tensor, so that in-place changes take effect. Weights that
    were replaced (`.data =`, `load_state_dict(assign=True)`, `model.to(...)`) are merged again.

    Args:
        layers: Linear layers of equal size, all of them with a bias or none.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = list(layers)
        self.weight, self.bias = _merged(self.layers, "weight"), _merged(self.layers, "bias")

    def stands_for(self, layers: Sequence[nn.Module]) -> bool:
        """True if it can replace these layers: no gradients, no compilation, no hooks."""
        return (
            not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and all(a is b and is_plain(a) for a, b in zip(layers, self.layers, strict=True))
        )

    def __call__(self, x: Tensor, start: int, end: int) -> tuple[Tensor, ...]:
        """Return the results (..., C) of the layers from `start` to `end`."""
        if not (_is_view(self.layers, "weight", self.weight)):
            self.weight = _merged(self.layers, "weight")
        if not (_is_view(self.layers, "bias", self.bias)):
            self.bias = _merged(self.layers, "bias")
        assert self.weight is not None
        size = self.layers[0].out_features
        rows = slice(start * size, end * size)
        bias = None if self.bias is None else self.bias[rows]
        return F.linear(x, self.weight[rows], bias).split(size, dim=-1)

    def release(self) -> None:
        """Give every layer separate memory again."""
        with torch.inference_mode(mode=False):
            for layer in self.layers:
                for parameter in layer.parameters():
                    parameter.data = parameter.data.clone()


def as_one(layers: Sequence[nn.Linear], x: Tensor) -> tuple[Tensor, ...]:
    """Compute the results (..., C) of layers that `can_merge` by one product, with gradients."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return F.linear(x, weight, bias).split(layers[0].out_features, dim=-1)


def is_plain(layer: nn.Module) -> bool:
    """True for an unmodified `nn.Linear` without hooks."""
    hooks: Any = layer
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and not (hooks._forward_hooks or hooks._forward_pre_hooks)
        and not (hooks._backward_hooks or hooks._backward_pre_hooks)
    )


def can_merge(layers: Sequence[nn.Module]) -> bool:
    if not all(is_plain(layer) for layer in layers):
        return False
    weights: list[Any] = [layer.weight for layer in layers]
    biases: list[Any] = [layer.bias for layer in layers]
    looks = {(x.shape, x.dtype, x.device, x.requires_grad) for x in weights}
    return len(looks) == 1 and len({x is None for x in biases}) == 1


def _merged(layers: Sequence[nn.Linear], name: str) -> Tensor | None:
    """Merge weights or biases into one tensor, of which they become views; None without biases."""
    parts: list[Any] = [getattr(layer, name) for layer in layers]
    if parts[0] is None:
        return None
    with torch.inference_mode(mode=False), torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, whole.split(len(parts[0])), strict=True):
            part.data = view
    return whole


def _is_view(layers: Sequence[nn.Linear], name: str, whole: Tensor | None) -> bool:
    """True if the weights or biases are still views of `whole`, in order."""
    parts: list[Any] = [getattr(layer, name) for layer in layers]
    if whole is None:
        return parts[0] is None
    start, step = whole.data_ptr(), len(parts[0]) * whole.stride(0) * whole.itemsize
    return all(
        part.data_ptr() == start + i * step
        and part.dtype == whole.dtype
        and part.device == whole.device
        and part.shape == parts[0].shape
        and part.is_contiguous()
        for i, part in enumerate(parts)
    )
