# SPDX-License-Identifier: Apache-2.0
"""K by attention mass: the smallest K per layer and level whose kept cells contain a share."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.images import Array
from quadtree_attention.inspect.attention import mass_inside
from quadtree_attention.inspect.calibrate_error import ErrorCalibration, calibrate_error
from quadtree_attention.inspect.recorder import record, refuse_compiled
from quadtree_attention.models.accelerate import accelerated_layers
from quadtree_attention.models.topk import quadtree_layers

if TYPE_CHECKING:
    from PIL import Image

    from quadtree_attention.files import StrPath

QUERIES = 256  # query cells measured per sample
SAMPLES = 8  # samples measured per layer and image, such as rows of the stereo network
ALL = 2**20  # more cells than any level has


class Calibration(dict[str, tuple[int, ...]]):
    """K per layer name, coarse -> fine; `set_topk(model, calibration)` applies it.

    Attributes:
        target: Requested share of the probability of full attention.
        images: Number of images used.
        curves: By layer, per selecting level: the share contained in the best 1, 2, ... cells.
    """

    def __init__(
        self, topk: Mapping[str, tuple[int, ...]], target: float, images: int,
        curves: Mapping[str, Sequence[Array]],
    ) -> None:  # fmt: skip
        super().__init__(topk)
        self.target, self.images = target, images
        self.curves = dict(curves)

    def mass(self, name: str) -> tuple[float, ...]:
        """Return the share contained in the kept cells of a layer, per level."""
        levels = zip(self[name], self.curves[name], strict=True)
        return tuple(float(curve[min(k, len(curve)) - 1]) for k, curve in levels)

    def to_dict(self) -> dict[str, Any]:
        """Return target, K and shares as plain data."""
        layers = {
            name: {
                "topk": list(topk),
                "mass": [round(share, 4) for share in self.mass(name)],
                "cells": [len(curve) for curve in self.curves[name]],
            }
            for name, topk in self.items()
        }
        return {"mass": self.target, "images": self.images, "layers": layers}

    def to_text(self) -> str:
        """Return a table: K, candidates and share, per layer and level."""
        rows = [("layer", "level", "K", "of", "mass")]
        for name, topk in self.items():
            for level, (k, share) in enumerate(zip(topk, self.mass(name), strict=True)):
                cells = len(self.curves[name][level])
                rows.append((name, str(level), str(k), str(cells), f"{share:.3f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )

    def draw(self, path: "StrPath | None" = None) -> "Image.Image":
        """Draw the share over K, one panel per layer, and the chosen K."""
        from quadtree_attention.inspect.still import draw_curves

        return draw_curves(self, path)


@overload
def calibrate_topk(
    model: nn.Module,
    images: Iterable[Any],
    *,
    mass: float,
    error: None = None,
    progress: bool = False,
) -> Calibration: ...


@overload
def calibrate_topk(
    model: nn.Module,
    images: Iterable[Any],
    *,
    mass: None = None,
    error: float,
    progress: bool = False,
) -> ErrorCalibration: ...


def calibrate_topk(
    model: nn.Module,
    images: Iterable[Any],
    *,
    mass: float | None = None,
    error: float | None = None,
    progress: bool = False,
) -> Calibration | ErrorCalibration:
    """Return the smallest K per layer by attention mass, or by the error of an accelerated model.

    With `mass`, K is chosen per level so that the kept cells contain a share of full attention, the
    softmax of the same queries over all keys of the finest map. With n selecting levels, the cells
    kept on level i (from 0) may miss a share of (1 - mass) (i + 1) / n, so that those of the last
    selecting level contain `mass`. K of a level is chosen after K of the coarser levels. K of the
    model is unchanged: apply the result with `set_topk`.

    Args:
        model: A model with quadtree attention, in evaluation mode.
        images: Inputs of the model: floating-point tensors, or lists or dicts of tensors;
            `model(item)` is called once per item and level.
        mass: Share of the probability of full attention, in (0, 1].
        error: For models of `accelerate`: largest relative error of the output, above 0. The effect
            of each layer on the output is measured, with one pass per layer and image and a few
            more. The error of the output is the largest over its floating-point tensors, relative
            to the dense model. Layers whose K would be too large, or no faster than dense
            attention, stay dense.
        progress: Show a progress bar in a terminal.

    Raises:
        OptionError: An argument is not accepted, or the model has no quadtree layers.

    Example:
        >>> import torch
        >>> from quadtree_attention import QuadtreeAttention, calibrate_topk, set_topk
        >>> attention = QuadtreeAttention(16, num_heads=2, num_levels=3).eval()
        >>> found = calibrate_topk(attention, [torch.randn(1, 16, 24, 16)], mass=0.9)
        >>> set_topk(attention, found)
    """
    if (mass is None) == (error is None):
        raise OptionError(
            f"calibrate_topk takes exactly one of mass and error, got {mass=}, {error=}; pass one"
        )
    items = _checked_items(images)
    if error is not None:
        checks.above(0, error=error)
        if not accelerated_layers(model):
            raise OptionError(
                "error is measured on models of accelerate(), which this is none of; call "
                "accelerate(model) first, or pass mass"
            )
        return calibrate_error(model, items, error, progress=progress)
    assert mass is not None
    if not 0 < mass <= 1:
        raise OptionError(f"mass must be above 0 and at most 1, got {mass}; 0.95 is usual")
    refuse_compiled(model)
    layers: dict[str, Any] = {
        name: layer
        for name, layer in quadtree_layers(model).items()
        if layer.num_levels > 1  # type: ignore[operator]
    }
    if not layers:
        raise OptionError(
            f"{type(model).__name__} has no quadtree layers of several levels, whose K could be "
            "chosen; pass a model that has"
        )
    chosen: dict[str, list[int]] = {name: [] for name in layers}
    curves: dict[str, list[Array]] = {name: [] for name in layers}
    levels = max(layer.num_levels for layer in layers.values()) - 1
    bar = tqdm(total=levels * len(items), unit="pass", leave=False, disable=None if progress else 1)
    for level in range(levels):
        open_ones = {n: layer for n, layer in layers.items() if level < layer.num_levels - 1}
        found = _curves(model, items, {n: chosen[n] for n in open_ones}, level, bar)
        for name, curve in found.items():
            selecting = layers[name].num_levels - 1
            goal = 1 - (1 - mass) * (level + 1) / selecting
            enough = np.flatnonzero(curve >= goal - 1e-6)
            chosen[name].append(int(enough[0]) + 1 if len(enough) else len(curve))
            curves[name].append(curve)
    bar.close()
    topk = {name: tuple(values) for name, values in chosen.items()}
    return Calibration(topk, mass, len(items), curves)


def _checked_items(images: Any) -> list[Any]:
    """Return the inputs of the model as a list; refuse what no model takes."""
    if isinstance(images, Tensor | Mapping | str | PathLike | None):
        raise OptionError(
            f"images must be a list of inputs of the model, got {type(images).__name__}; pass a "
            "list of tensors (1, 3, H, W), for example"
        )
    items = list(images)
    if not items:
        raise OptionError("calibrate_topk needs at least one image, got none; pass some")
    for i, item in enumerate(items):
        leaves = tree_leaves(item)
        has_tensors = any(hasattr(x, "to") for x in leaves)  # or objects that can be moved as well
        is_bytes = isinstance(item, Tensor) and not item.is_floating_point()
        if is_bytes or isinstance(item, tuple) or not has_tensors:
            raise OptionError(
                f"images[{i}] must be an input of the model, a floating-point tensor, or a list or "
                f"dict of tensors, got {item.dtype if is_bytes else type(item).__name__}; convert "
                "it first"
            )
        if any(isinstance(x, Tensor) and x.isnan().any() for x in leaves):
            raise OptionError(f"images[{i}] has NaN; pass images without")
    return items


def _curves(
    model: nn.Module, items: Sequence[Any], above: Mapping[str, Sequence[int]], level: int, bar: Any
) -> dict[str, Array]:
    """Return the share over K at one level, by layer: mean over images, samples, queries, heads."""
    sums: dict[str, list[Array]] = {name: [] for name in above}
    counts: dict[str, list[int]] = {name: [] for name in above}
    for item in items:
        with torch.no_grad(), record(model, layers=list(above)) as seen:
            model(item)
        bar.update()
        for name, layer in seen.items():
            rest = layer.num_levels - 2 - level
            step = -(-len(layer) // SAMPLES)
            for i in range(0, len(layer), max(1, step)):
                inside = mass_inside(layer[i], [*above[name], ALL, *[1] * rest], QUERIES)[level]
                sums[name].append(inside.double().mean(dim=1).sum(dim=0).cumsum(dim=0).numpy())
                counts[name].append(inside.shape[0])
    return {name: _mean(sums[name], counts[name]) for name in above}


def _mean(sums: Sequence[Array], counts: Sequence[int]) -> Array:
    """Return the mean of curves; short curves are extended by their last value."""
    longest = max(len(curve) for curve in sums)
    padded = [np.pad(curve, (0, longest - len(curve)), mode="edge") for curve in sums]
    return np.sum(padded, axis=0) / sum(counts)
