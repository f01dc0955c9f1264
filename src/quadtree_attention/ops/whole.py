# SPDX-License-Identifier: Apache-2.0
"""All of an attention as one torch operator, where nobody differentiates.

Linear layers, a value pyramid, the attention and its position encodings are a dozen small
operators. On one image the host takes longer for each of them than the GPU does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops.attention.problem import Problem, needs_grad
from quadtree_attention.ops.attention.triton.limits import map_reasons
from quadtree_attention.ops.backends import choose
from quadtree_attention.ops.dispatch import (
    are_plain_tensors,
    autocast_dtype,
    is_plain,
    is_profiled,
)
from quadtree_attention.ops.norms.functional import KERNEL_DTYPES, activation_code


class Parameters(NamedTuple):
    """Those of an attention.

    Attributes:
        weights: (C, C) of the layers that make queries, keys, values and the result.
        biases: (C,) of all four, or of the last alone.
        branches: Of every level but the finest, coarse -> fine, eight of each: weight and bias of
            the first norm, of the layer that reduces, of the second norm, and of the layer that
            mixes.
        positions: Weight (C, 1, 3, 3) and bias (C,) of the convolution at every level; or nothing.
        logits: (L,), whose softmax weighs the levels.
    """

    weights: list[Tensor]
    biases: list[Tensor]
    branches: list[Tensor]
    positions: list[Tensor]
    logits: Tensor

    def tensors(self) -> list[Tensor]:
        return [*self.weights, *self.biases, *self.branches, *self.positions, self.logits]

    def contiguous(self) -> "Parameters":
        weights, biases, branches, positions = (
            [x.contiguous() for x in part]
            for part in (self.weights, self.biases, self.branches, self.positions)
        )
        return Parameters(weights, biases, branches, positions, self.logits.contiguous())


def dtype_of_layers(x: Tensor) -> torch.dtype:
    """What linear layers multiply and give out for a map."""
    return autocast_dtype(x.device.type) or x.dtype


def can_attend_whole(
    problem: Problem, backend: str, maps: Sequence[Tensor], parameters: Parameters
) -> bool:
    """Whether the operator takes a problem with these maps and parameters."""
    tensors = [*maps, *parameters.tensors()]
    if torch.compiler.is_compiling():
        concerns_nobody = are_plain_tensors(tensors) and not needs_grad(*tensors)
    else:
        concerns_nobody = is_plain(*tensors)
    return (
        concerns_nobody
        and _fit_together(tensors)
        and problem.query_tree.ndim == 2
        and problem.batch > 0
        and not any(map_reasons(x.shape) for x in maps)
        and choose(backend, problem).name == "triton"
    )


def _fit_together(tensors: Sequence[Tensor]) -> bool:
    """Whether linear layers would take these tensors: of one device, and of one dtype.

    Autocast brings them to one dtype, but never float64.
    """
    dtypes, device = {x.dtype for x in tensors}, tensors[0].device
    return (
        dtypes <= KERNEL_DTYPES
        and (len(dtypes) == 1 or autocast_dtype(device.type) is not None)
        and all(x.device == device for x in tensors)
    )


def attend_whole(
    problem: Problem,
    x: Tensor,
    context: Tensor | None,
    parameters: Parameters,
    eps: float,
    activation: str | None,
) -> Tensor:
    """Linear layers, learned value pyramid, attention, position encodings if there are any.

    Only where `can_attend_whole`.

    Args:
        problem: Of variant B, without masks.
        x: (B, Y, X, C).
        context: The other map (B, Y', X', C); None: x itself.
        parameters: Of the attention.
        eps: Added to variances.
        activation: "gelu" or "relu"; None where there are no branches.

    Returns:
        (B, Y, X, C) in the dtype of the problem.
    """
    run = _whole if torch.compiler.is_compiling() or is_profiled() else _run
    return run(
        x, context, *parameters, problem.num_heads, list(problem.topk), problem.scale, eps,
        0 if activation is None else activation_code(activation), problem.dtype,
    )  # fmt: skip


def _run(
    x: Tensor,
    context: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor],
    branches: list[Tensor],
    positions: list[Tensor],
    logits: Tensor,
    heads: int,
    topk: list[int],
    scale: float,
    eps: float,
    act: int,
    dtype: torch.dtype,
) -> Tensor:
    from quadtree_attention.ops.attention.triton.launch import Options
    from quadtree_attention.ops.attention.triton.whole import attend_whole

    maps = [x] if context is None else [x, context]
    parameters = Parameters(weights, biases, branches, positions, logits)
    options = Options(tuple(topk), scale, "B", False, None)
    return attend_whole(maps, parameters, heads, options, eps, act, dtype)


# Not by `torch.library.custom_op`, whose checks of every call take the host longer than a launch.
_library = torch.library.Library("quadtree_attention", "FRAGMENT")
_library.define(
    "whole(Tensor x, Tensor? context, Tensor[] weights, Tensor[] biases, Tensor[] branches, "
    "Tensor[] positions, Tensor logits, int heads, SymInt[] topk, float scale, float eps, int act, "
    "ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("whole", _run, "CompositeExplicitAutograd")
_whole = torch.ops.quadtree_attention.whole.default


@torch.library.register_fake("quadtree_attention::whole", lib=_library)
def _(x, *others):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=others[-1])
