# SPDX-License-Identifier: Apache-2.0
"""K by error: for layers of an accelerated model the smallest K near the output of the dense model.

The error of a layer says little about the error that it causes in the output: some layers tolerate
half of their result, others a hundredth. Both are measured, and K is chosen by the latter.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from quadtree_attention.models.accelerate import accelerated_layers
from quadtree_attention.models.parts.dense_layers import Call, DenseLayer

TOPK = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PROBED = 0.2  # error of a layer, about, at which its effect on the output is measured
ROUNDS = 6  # of K chosen and measured, at most
NEAR = 0.8  # part of the error asked for that is near enough to it


class ErrorCalibration(dict[str, int | None]):
    """K per layer name, None for layers that stay dense; `set_topk(model, ...)` applies it.

    Attributes:
        target: The largest relative error of the output that was asked for.
        images: Images that it was measured on.
        errors: By layer and K: relative error of the attention's result.
        effects: By layer: relative error of the output over that of the attention's result.
        seconds: By layer and K: time of the attention over all images; K 0 is dense attention.
        output_error: Relative error of the output with all chosen K, as measured.

    Example:
        found = calibrate_topk(model, images, error=0.05)    # of an accelerated model
        print(found.to_text())
        set_topk(model, found)
    """

    def __init__(
        self,
        target: float,
        images: int,
        errors: Mapping[str, Mapping[int, float]],
        effects: Mapping[str, float],
        seconds: Mapping[str, Mapping[int, float]],
    ) -> None:
        super().__init__(dict.fromkeys(errors))
        self.target, self.images = target, images
        self.errors = {name: dict(found) for name, found in errors.items()}
        self.effects = dict(effects)
        self.seconds = {name: dict(seconds.get(name, {})) for name in errors}
        self.output_error = 0.0

    def error(self, name: str) -> float:
        """Return the relative error that a layer is expected to cause in the output."""
        k = self[name]
        return 0.0 if k is None else self.effects[name] * self.errors[name][k]

    def speedup(self, name: str | None = None) -> float:
        """Return dense time over the expected time, of one layer or of all attention together."""
        names = [name] if name is not None else [n for n in self if self.seconds[n]]
        dense = sum(self.seconds[n].get(0, 0.0) for n in names)
        own = sum(self.seconds[n].get(self[n] or 0, 0.0) for n in names)
        return dense / own if own else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return target, K, expected errors and speed-ups as plain data."""
        layers = {
            name: {
                "topk": k, "error": round(self.error(name), 5),
                "speedup": round(self.speedup(name), 2),
            }
            for name, k in self.items()
        }  # fmt: skip
        return {
            "error": self.target, "output_error": round(self.output_error, 5),
            "images": self.images, "speedup": round(self.speedup(), 2), "layers": layers,
        }  # fmt: skip

    def to_text(self) -> str:
        """Return a table: K, error caused in the output and speed-up per layer, and of all."""
        rows = [("layer", "K", "error", "speed-up")]
        for name, k in self.items():
            shown = "dense" if k is None else str(k)
            rows.append((name, shown, f"{self.error(name):.4f}", f"{self.speedup(name):.2f}x"))
        rows.append(("all", "", f"{self.output_error:.4f}", f"{self.speedup():.2f}x"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )


class _Probe:
    """Runs every call densely and, beside it, at every K."""

    def __init__(self) -> None:
        self.squares: dict[str, dict[int, float]] = {}
        self.seconds: dict[str, dict[int, float]] = {}
        self.calls: Counter[tuple[str, int]] = Counter()
        self.cells: dict[str, int] = {}
        self.warm: set[Any] = set()

    def __call__(self, layer: DenseLayer, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def attend_densely() -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=call.mask, dropout_p=call.dropout, is_causal=call.is_causal,
                scale=call.scale, enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip

        squares = self.squares.setdefault(layer.name, {})
        seconds = self.seconds.setdefault(layer.name, {})
        first = layer.placed(call, TOPK[0], by_plan=False)[0]
        if first is None:
            return attend_densely()
        dense = self._timed(seconds, 0, (layer.name, 0, call.shape), attend_densely)
        wide = dense.double()
        squares[0] = squares.get(0, 0.0) + float(wide.square().sum())
        self.calls[layer.name, 0] += 1
        whole = call.key_shape[2] // 2 ** len(first.key_grids[0])  # K that keeps everything
        self.cells[layer.name] = max(self.cells.get(layer.name, 1), whole)
        for topk in TOPK:
            places, _ = layer.placed(call, topk, by_plan=False)
            if places is None:  # with so many cells it is dense attention
                break
            out = self._timed(
                seconds, topk, (topk, call.shape, call.key_shape, call.dtype),
                lambda places=places, topk=topk: layer.quadtree(places, call, q, k, v, topk),
            )  # fmt: skip
            squares[topk] = squares.get(topk, 0.0) + float((out - wide).square().sum())
            self.calls[layer.name, topk] += 1
        return dense

    def _timed(self, seconds: dict[int, float], topk: int, key: Any, run: Any) -> Tensor:
        if key not in self.warm:  # kernels are compiled
            self.warm.add(key)
            run()
        began = _now()
        out = run()
        seconds[topk] = seconds.get(topk, 0.0) + _now() - began
        return out

    def errors(self, name: str) -> dict[int, float]:
        """Relative error of a layer by K; of K that all of its calls could run with."""
        squares = self.squares.get(name, {})
        total = squares.get(0, 0.0)
        return {
            k: (s / total) ** 0.5 if total else 0.0
            for k, s in squares.items()
            if k and self.calls[name, k] == self.calls[name, 0]
        }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def calibrate_error(
    model: nn.Module,
    images: Sequence[Any],
    error: float,
    *,
    by_time: bool = True,
    progress: bool = False,
) -> ErrorCalibration:
    """Return the smallest K per layer with which the output is near that of the dense model.

    One pass runs every layer densely and at all K beside it, and one pass per layer measures how
    the output follows the error of this layer. From this the error of the output is predicted for
    any choice of K, as if the layers' errors were independent, and the smallest K are chosen. The
    output with them is measured; where the prediction was wrong, they are chosen again.

    Args:
        model: A model that `accelerate` was called on.
        images: Inputs of the model; every one is passed as `model(item)`.
        error: Largest relative error of the output: of its floating-point tensors the one that
            differs most. Tensors whose shapes vary are ignored; without others the error of a
            layer's own result counts.
        by_time: A layer stays dense where no K that is enough is faster than dense attention.
        progress: Show a progress bar in a terminal.
    """
    layers = accelerated_layers(model)
    bar = tqdm(unit="pass", leave=False, disable=None if progress else True)
    bar.reset(len(images) * (1 + len(layers)))
    with _set_apart(layers):
        probe = _Probe()
        for layer in layers.values():
            layer.probe = probe
        dense = _outputs(model, images, bar)
        for layer in layers.values():
            layer.probe, layer.topk = None, None
        errors = {name: probe.errors(name) for name in layers}
        effects = {}
        for name, layer in layers.items():
            effects[name] = 0.0
            layer.topk = probed = _probed(errors[name])
            if probed is not None:
                changed = _error(_outputs(model, images, bar), dense)
                effects[name] = 1.0 if changed is None else changed / errors[name][probed]
            layer.topk = None
        found = ErrorCalibration(error, len(images), errors, effects, probe.seconds)
        predicted, low, high = error, 0.0, inf
        best: dict[str, int | None] = dict.fromkeys(found)
        tried: list[dict[str, int | None]] = []
        while len(tried) < ROUNDS:
            found.update(_chosen(found, predicted, probe.cells, by_time))
            if dict(found) in tried:
                break
            tried.append(dict(found))
            for name, layer in layers.items():
                layer.topk = found[name]
            bar.total += len(images)
            measured = _error(_outputs(model, images, bar), dense)
            if measured is None:
                measured = sum(found.error(name) ** 2 for name in found) ** 0.5
            if measured <= error:
                low, best, found.output_error = predicted, dict(found), measured
            else:
                high = predicted
            if NEAR * error <= measured <= error:
                break
            if low > 0 and high < inf:
                predicted = (low * high) ** 0.5
            else:
                predicted *= min(4.0, max(0.25, 0.9 * error / max(measured, 1e-9)))
        found.update(best)
    bar.close()
    return found


@contextmanager
def _set_apart(layers: Mapping[str, DenseLayer]) -> Iterator[None]:
    """Gives layers their K back; within, `plan` decides nothing."""
    before = [(layer.topk, layer.by_plan) for layer in layers.values()]
    try:
        for layer in layers.values():
            layer.by_plan = False
        yield
    finally:
        for layer, (topk, by_plan) in zip(layers.values(), before, strict=True):
            layer.topk, layer.by_plan, layer.probe = topk, by_plan, None


def _probed(errors: Mapping[int, float]) -> int | None:
    """The K whose error is nearest to `PROBED`, by their ratio; None: there is none but zero."""
    distances = {k: abs(log(e / PROBED)) for k, e in errors.items() if e > 0}
    return min(distances, key=distances.__getitem__, default=None)


def _chosen(
    found: ErrorCalibration, error: float, cells: Mapping[str, int], by_time: bool
) -> dict[str, int | None]:
    """The smallest K whose predicted error of the output is small enough; None: dense.

    All layers start at their smallest K. Then, time and again, the K is raised that lowers the
    squared error most per cell, at last to all cells.
    """
    steps: dict[str, list[tuple[int, float]]] = {}
    for name, errors in found.errors.items():
        seconds = found.seconds[name]
        able = [
            (k, (found.effects[name] * e) ** 2)
            for k, e in sorted(errors.items())
            if k < cells[name] and (not by_time or seconds[k] < seconds[0])
        ]
        if able:
            steps[name] = [*able, (cells[name], 0.0)]
    at = dict.fromkeys(steps, 0)
    while sum(steps[name][i][1] for name, i in at.items()) > error**2:
        gains = [
            ((one[i][1] - squared) / (k - one[i][0]), name, j)
            for name, i in at.items()
            for one in (steps[name],)
            for j, (k, squared) in enumerate(one[i + 1 :], i + 1)
        ]
        _, name, j = max(gains)
        at[name] = j
    chosen: dict[str, int | None] = dict.fromkeys(found)
    for name, i in at.items():
        if i < len(steps[name]) - 1:
            chosen[name] = steps[name][i][0]
    return chosen


def _outputs(model: nn.Module, images: Sequence[Any], bar: Any) -> list[list[Tensor]]:
    """The floating-point tensors of the output, per image."""
    outputs = []
    for item in images:
        out = model(item)
        leaves = tree_leaves(vars(out) if hasattr(out, "__dataclass_fields__") else out)
        outputs.append([x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()])
        bar.update()
    return outputs


def _error(outputs: Sequence[Sequence[Tensor]], dense: Sequence[Sequence[Tensor]]) -> float | None:
    """The largest relative error of a tensor over all images; None: nothing can be compared."""
    largest = None
    for i in range(min(len(one) for one in (*outputs, *dense))):
        pairs = [(a[i], b[i]) for a, b in zip(outputs, dense, strict=True)]
        if any(a.shape != b.shape for a, b in pairs):
            continue
        changed = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
        total = sum(float(b.double().square().sum()) for _, b in pairs)
        if total > 0:
            largest = max(largest or 0.0, (changed / total) ** 0.5)
    return largest
