# SPDX-License-Identifier: Apache-2.0
"""The counting rule behind the paper's FLOPs, next to ours (`benchmarks.speed.counts`).

The authors count with mmcv's counter, which sees modules, and add attention by a formula. One
multiply-add counts once. Beside the products of convolutions and linear layers the rule counts one
per bias of a convolution, two per normalised value and one per ReLU; nothing for GELU, softmax,
pooling and biases of linear layers. Attention: 2 h w 4K C for every level but the coarsest, and
2 (h w)^2 C there; spatial reduction: 2 (h w) (h/r w/r) C. The formula takes h and w as the image's
sides divided by the stride and rounded down, which matters for an image 1333 wide only.

The 1x1 convolutions of the official code (projections, value branch) are linear layers here; their
biases count as those of convolutions.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.models.pvt_v2 import Attention as SpatialReduction
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.nn.position import DepthwiseConv
from quadtree_attention.nn.value_pyramid import NormActLinear

PARTS = ("products", "norms", "biases", "relu", "attention")
POINTWISE = ("q_proj", "k_proj", "v_proj")  # 1x1 convolutions in the official code


def count(model: nn.Module, image: Sequence[int]) -> dict[str, int]:
    """The parts of the count of one image, by name."""
    found: Counter[str] = Counter(dict.fromkeys(PARTS, 0))

    def add(name: str, *called: Any) -> None:
        found.update(_parts(name, image, *called))

    hooks = [
        module.register_forward_hook(partial(add, name.rpartition(".")[2]))
        for name, module in model.named_modules()
    ]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            model.eval()(torch.zeros(1, 3, *image))
    finally:
        for hook in hooks:
            hook.remove()
    return dict(found)


def _parts(
    name: str, image: Sequence[int], module: nn.Module, inputs: tuple[Any, ...], out: Any
) -> dict[str, int]:
    """What one call of a layer adds."""
    if isinstance(module, QuadtreeAttention):
        return {"attention": _quadtree(module, inputs[0], image)}
    if isinstance(module, SpatialReduction):
        x, size = inputs
        rows, columns = _sides(size[0], image)
        ratio = 1 if module.sr is None else module.sr.stride[0]
        cells = rows * columns * (rows // ratio) * (columns // ratio)
        return {"attention": 2 * cells * x.shape[-1]}
    if isinstance(module, nn.Conv2d | DepthwiseConv):
        per_value = module.weight.numel() // module.weight.shape[0]
        biases = 0 if module.bias is None else out.numel()
        relu = out.numel() if getattr(module, "relu", False) else 0
        return {"products": out.numel() * per_value, "biases": biases, "relu": relu}
    if isinstance(module, nn.Linear):
        biases = out.numel() if name in POINTWISE and module.bias is not None else 0
        return {"products": out.numel() * module.in_features, "biases": biases}
    if isinstance(module, NormActLinear):
        values = inputs[0].numel()
        return {
            "products": out.numel() * module.weight.shape[1],
            "biases": out.numel(),
            "norms": 2 * values,
            "relu": values if module.activation == "relu" else 0,
        }
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        return {"norms": 2 * inputs[0].numel()}
    if isinstance(module, nn.ReLU):
        return {"relu": out.numel()}
    return {}


def _quadtree(module: QuadtreeAttention, x: Tensor, image: Sequence[int]) -> int:
    rows, columns = _sides(x.shape[1], image)
    cells = [(rows >> level) * (columns >> level) for level in range(module.num_levels)]
    kept = reversed(module.topk)  # fine to coarse, as the cells
    fine = sum(4 * topk * count for topk, count in zip(kept, cells[:-1], strict=True))
    return 2 * x.shape[-1] * (cells[-1] ** 2 + fine)


def _sides(rows: int, image: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a map as the authors' formula has them, from its rows."""
    stride = 2 ** round(math.log2(image[0] / rows))
    return image[0] // stride, image[1] // stride
