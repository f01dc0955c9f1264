# SPDX-License-Identifier: Apache-2.0
"""Sorting of points along a space-filling curve for LightGlue-like networks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

STEPS = 2**15  # cells of the curve along every axis


def curve_order(points: Tensor) -> Tensor:
    """Return indices (B, M) that sort points (B, M, 2) along a Hilbert curve.

    The curve covers the bounding box of the points.

    Example:
        >>> points = torch.tensor([[[9.0, 0.0], [0.0, 0.0], [9.0, 9.0], [0.0, 9.0]]])
        >>> curve_order(points).tolist()  # the corners, around a square
        [[1, 3, 2, 0]]
    """
    low = points.amin(dim=1, keepdim=True)
    extent = (points.amax(dim=1, keepdim=True) - low).amax(dim=-1, keepdim=True)
    scaled = (points - low) / extent.clamp(min=torch.finfo(points.dtype).tiny)
    x, y = (scaled * (STEPS - 1)).nan_to_num().long().clamp(0, STEPS - 1).unbind(-1)
    distance = torch.zeros_like(x)
    side = STEPS // 2
    while side:
        right, top = (x & side) > 0, (y & side) > 0
        distance += side * side * ((3 * right.long()) ^ top.long())
        flip = right & ~top  # rotate the quarters so that the curve is connected
        x, y = (torch.where(flip, STEPS - 1 - c, c) for c in (x, y))
        x, y = torch.where(top, x, y), torch.where(top, y, x)
        side //= 2
    return distance.argsort(dim=1, stable=True)


class SortedPoints:
    """`forward` of a network like LightGlue, on points sorted along the curve.

    Indices in the results refer to the original order.
    """

    def __init__(self, dense: Callable[..., Any]) -> None:
        self.dense = dense

    def __call__(self, data: Mapping[str, Any]) -> dict[str, Any]:
        orders = [curve_order(data[name]["keypoints"]) for name in ("image0", "image1")]
        images = {
            f"image{i}": _permuted(data[f"image{i}"], order) for i, order in enumerate(orders)
        }
        return _unsorted(self.dense({**data, **images}), orders)


def _permuted(image: Mapping[str, Any], order: Tensor) -> dict[str, Any]:
    """Return the data of an image with all per-point entries (B, M, ...) reordered."""
    return {
        key: _take(x, order)
        if key != "image" and isinstance(x, Tensor) and x.shape[:2] == order.shape
        else x
        for key, x in image.items()
    }


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Return `x[b, order[b]]` for every b."""
    index = order.reshape(*order.shape, *(1,) * (x.ndim - 2)).expand(*order.shape, *x.shape[2:])
    return x.gather(1, index)


def _unsorted(found: Mapping[str, Any], orders: list[Tensor]) -> dict[str, Any]:
    """Map results of sorted points to the original order."""
    result = dict(found)
    for i, order in enumerate(orders):
        other = orders[1 - i]
        ranks = order.argsort(dim=1)
        for key in (f"matches{i}", f"matching_scores{i}", f"prune{i}"):
            if key not in found:
                continue
            x = found[key]
            if key == f"matches{i}":
                named = other.gather(1, x.clamp(min=0)) if other.shape[1] else x
                x = torch.where(x < 0, x, named)
            result[key] = x.gather(1, ranks)
    if "matches" in found and len(found["matches"]) == len(orders[0]):
        pairs = [
            torch.stack([order[one[:, side]] for side, order in enumerate(both)], dim=-1)
            for one, *both in zip(found["matches"], *orders, strict=True)
        ]
        by_first = [one[:, 0].argsort() for one in pairs]
        result["matches"] = [one[at] for one, at in zip(pairs, by_first, strict=True)]
        if "scores" in found:
            result["scores"] = [x[at] for x, at in zip(found["scores"], by_first, strict=True)]
    return result
