# SPDX-License-Identifier: Apache-2.0
"""Merging of attention over disjoint sets of keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quadtree_attention.errors import DTypeError, ShapeError
from quadtree_attention.ops.attention.tree import accumulation_dtype


def merge_attentions(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the attentions of the same queries over disjoint sets of keys.

    The result is the attention over the union of the sets. Merging is associative and commutative
    up to rounding. A part without visible keys has a log-sum-exp of -inf and weight 0.

    Args:
        outs: Results (..., Dv) of the parts.
        lses: Log-sum-exp (...) of the scores of each part, see `return_lse`.

    Returns:
        The result (..., Dv) in the dtype of the first part, and its log-sum-exp (...).

    Raises:
        ShapeError: There is no part, or the parts do not fit.
        DTypeError: A part is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from quadtree_attention import quadtree_attention
        >>> q, k, v = torch.randn(3, 1, 8, 12, 2, 16).unbind()
        >>> whole = {"num_levels": 1, "topk": 1, "variant": "C", "return_lse": True}
        >>> top = quadtree_attention(q, k[:, :4], v[:, :4], **whole)
        >>> bottom = quadtree_attention(q, k[:, 4:], v[:, 4:], **whole)
        >>> out, lse = merge_attentions(*zip(top, bottom))
        >>> torch.allclose(out, quadtree_attention(q, k, v, **whole)[0], atol=1e-6)
        True
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ShapeError(
            "merge_attentions needs as many log-sum-exps as results and at least one, got "
            f"{len(outs)} results and {len(lses)} log-sum-exps; pass both of every part"
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, x in (("outs", out), ("lses", lse)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                got = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise DTypeError(
                    f"{name}[{i}] must be a floating-point tensor, got {got}; convert it first, "
                    "for example with Tensor.float"
                )
        if out.shape != outs[0].shape or lse.shape != outs[0].shape[:-1]:
            raise ShapeError(
                f"parts must have one shape, results (..., Dv) and log-sum-exps (...), got "
                f"outs[{i}].shape={tuple(out.shape)}, lses[{i}].shape={tuple(lse.shape)} beside "
                f"outs[0].shape={tuple(outs[0].shape)}; pass parts of the same queries"
            )
    dtype = accumulation_dtype(outs[0].dtype)
    sums = torch.stack([lse.to(dtype) for lse in lses])
    shift = sums.detach().amax(dim=0)
    shift = shift.masked_fill(shift == -torch.inf, 0)
    weights = (sums - shift).exp()
    total = weights.sum(dim=0)
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    shares = weights / total
    out = sum(
        (
            share * part.to(dtype).masked_fill(share == 0, 0)  # a part without keys may be NaN
            for share, part in zip(shares[..., None], outs, strict=True)
        ),
        start=torch.zeros((), dtype=dtype, device=outs[0].device),
    )
    lse = (shift + total.log()).masked_fill(nothing, -torch.inf)
    return out.to(outs[0].dtype), lse
