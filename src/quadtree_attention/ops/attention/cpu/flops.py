# SPDX-License-Identifier: Apache-2.0
"""FLOPs of the operators, from the shapes of their arguments."""

from collections.abc import Callable
from typing import Any

from quadtree_attention.ops.planning.flops import backward_flops, pair_flops


def _forward(
    q: Any, k: Any, v: Any, visible: Any, weight: Any, parents: Any, *args: Any, **options: Any
) -> int:
    batch, heads, cells, dim = q
    candidates = k[2] if parents is None else parents[3] * (cells // parents[2])
    return pair_flops(batch * heads * cells * candidates, dim, v[3])


def _backward(grad: Any, grad_scores: Any, *args: Any, **options: Any) -> int:
    return backward_flops(_forward(*args))


FORMULAS: dict[str, Callable[..., int]] = {"cpu_attend": _forward, "cpu_attend_backward": _backward}
