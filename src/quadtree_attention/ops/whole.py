# SPDX-License-Identifier: Apache-2.0
"""All of an attention between its projections as one torch operator, where nobody differentiates.

A step of a value pyramid, the attention and its position encodings are a dozen small operators. On
one image the host takes longer for each of them than the GPU does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quadtree_attention.ops.backends import choose_backend
from quadtree_attention.ops.dispatch import are_plain_tensors, is_plain, is_profiled
from quadtree_attention.ops.norms import LARGEST_DIM, activation_code
from quadtree_attention.ops.problem import Problem, needs_grad

LARGEST_BATCH = 2**16 - 1  # programs along an axis


def can_attend_whole(problem: Problem, backend: str, tensors: Sequence[Tensor]) -> bool:
    """Whether the operator takes a problem with these maps and parameters."""
    if torch.compiler.is_compiling():
        concerns_nobody = are_plain_tensors(tensors) and not needs_grad(*tensors)
    else:
        concerns_nobody = is_plain(*tensors)
    return (
        concerns_nobody
        and problem.query_tree.ndim == 2
        and 0 < problem.batch <= LARGEST_BATCH
        and problem.num_heads * problem.head_dim <= LARGEST_DIM
        and choose_backend(backend, problem).name == "triton"
    )


def attend_whole(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branches: Sequence[Tensor],
    positions: Sequence[Tensor],
    logits: Tensor,
    eps: float,
    activation: str | None,
) -> Tensor:
    """Attention to a learned value pyramid, plus position encodings of its levels if there are any.

    Only where `can_attend_whole`.

    Args:
        problem: Of variant B, without masks.
        q: (B, Y, X, N, D).
        k: (B, Y', X', N, D), of the same map or another.
        v: (B, Y', X', C).
        branches: Parameters of every level but the finest, coarse -> fine, eight of each: weight
            and bias of the first norm, of the layer that reduces, of the second norm, and of the
            layer that mixes.
        positions: Weight (C, 1, 3, 3) and bias (C,) of the convolution at every level; or nothing.
        logits: (L,), whose softmax weighs the levels.
        eps: Added to variances.
        activation: "gelu" or "relu"; None where there are no branches.

    Returns:
        (B, Y, X, C)
    """
    run = _whole if torch.compiler.is_compiling() or is_profiled() else _run
    return run(
        q, k, v, list(branches), list(positions), logits, list(problem.topk), problem.scale, eps,
        0 if activation is None else activation_code(activation),
    )  # fmt: skip


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branches: list[Tensor],
    positions: list[Tensor],
    logits: Tensor,
    topk: list[int],
    scale: float,
    eps: float,
    act: int,
) -> Tensor:
    from quadtree_attention.ops.backends.triton.launch import Options
    from quadtree_attention.ops.backends.triton.whole import attend_whole

    options = Options(tuple(topk), scale, "B", False, None)
    return attend_whole((q, k, v), branches, positions, logits, options, eps, act)


# Not by `torch.library.custom_op`, whose checks of every call take the host longer than a launch.
_library = torch.library.Library("quadtree_attention", "FRAGMENT")
_library.define(
    "whole(Tensor q, Tensor k, Tensor v, Tensor[] branches, Tensor[] positions, Tensor logits, "
    "SymInt[] topk, float scale, float eps, int act) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("whole", _run, "CompositeExplicitAutograd")
_whole = torch.ops.quadtree_attention.whole.default


@torch.library.register_fake("quadtree_attention::whole", lib=_library)
def _(q, k, v, *others):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:-2], v.shape[-1])
