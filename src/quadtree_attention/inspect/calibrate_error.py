# SPDX-License-Identifier: Apache-2.0
"""K by error: the smallest K per layer of an accelerated model that bounds the error of its output.

The error of a layer does not determine the error of the output: some layers tolerate a relative
error of one half, others of one hundredth. Both are measured, and K is chosen by the error of the
output.
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
PROBED = 0.2  # approximate error of a layer at which its effect on the output is measured
ROUNDS = 6  # maximum number of choices of K that are measured
NEAR = 0.8  # share of the requested error at which the search stops


class ErrorCalibration(dict[str, int | None]):
    """K per layer name, None for layers that stay dense; `set_topk(model, ...)` applies it.

    Attributes:
        target: Requested bound of the relative error of the output.
        images: Number of images used.
        errors: By layer and K: relative error of the result of the attention.
        effects: By layer: relative error of the output per relative error of the attention.
        seconds: By layer and K: time of the attention over all images; K 0 is dense attention.
        output_error: Measured relative error of the output with all chosen K.

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
        """Return the expected relative error of the output due to a layer."""
        k = self[name]
        return 0.0 if k is None else self.effects[name] * self.errors[name][k]

    def speedup(self, name: str | None = None) -> float:
        """Return the expected speed-up over dense attention, of one layer or of all attention."""
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
        """Return a table: K, error of the output and speed-up, per layer and in total."""
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
    """Runs every call with dense attention and, for comparison, at every K."""

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
        whole = call.key_shape[2] // 2 ** len(first.key_grids[0])  # K that keeps all cells
        self.cells[layer.name] = max(self.cells.get(layer.name, 1), whole)
        for topk in TOPK:
            places, _ = layer.placed(call, topk, by_plan=False)
            if places is None:  # such a K keeps all cells: dense attention
                break
            out = self._timed(
                seconds, topk, (topk, call.shape, call.key_shape, call.dtype),
                lambda places=places, topk=topk: layer.quadtree(places, call, q, k, v, topk),
            )  # fmt: skip
            squares[topk] = squares.get(topk, 0.0) + float((out - wide).square().sum())
            self.calls[layer.name, topk] += 1
        return dense

    def _timed(self, seconds: dict[int, float], topk: int, key: Any, run: Any) -> Tensor:
        if key not in self.warm:  # compiles kernels
            self.warm.add(key)
            run()
        began = _now()
        out = run()
        seconds[topk] = seconds.get(topk, 0.0) + _now() - began
        return out

    def errors(self, name: str) -> dict[int, float]:
        """Return the relative error of a layer by K, for every K that all of its calls support."""
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
    """Return the smallest K per layer with which the error of the output is at most `error`.

    One pass runs every layer with dense attention and at all K; one further pass per layer measures
    the effect of its error on the output. This predicts the error of the output for any choice of
    K, assuming independent errors of the layers, and the smallest K are chosen. The error of the
    output with these K is measured, and the choice is repeated if the prediction was wrong.

    Args:
        model: A model passed to `accelerate`.
        images: Inputs of the model; `model(item)` is called.
        error: Largest relative error of the output, over its floating-point tensors. Tensors whose
            shape varies are ignored; if there are no others, the errors of the layers are used.
        by_time: Keep a layer dense if no sufficient K is faster than dense attention.
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
    """Disable `plan` within the context, and restore K of all layers afterwards."""
    before = [(layer.topk, layer.by_plan) for layer in layers.values()]
    try:
        for layer in layers.values():
            layer.by_plan = False
        yield
    finally:
        for layer, (topk, by_plan) in zip(layers.values(), before, strict=True):
            layer.topk, layer.by_plan, layer.probe = topk, by_plan, None


def _probed(errors: Mapping[int, float]) -> int | None:
    """Return the K whose error is nearest to `PROBED` by ratio; None if all errors are 0."""
    distances = {k: abs(log(e / PROBED)) for k, e in errors.items() if e > 0}
    return min(distances, key=distances.__getitem__, default=None)


def _chosen(
    found: ErrorCalibration, error: float, cells: Mapping[str, int], by_time: bool
) -> dict[str, int | None]:
    """Return the smallest K per layer whose predicted error of the output is at most `error`.

    All layers start at their smallest K. Repeatedly, the K is raised that reduces the squared error
    most per cell, finally to all cells; None: dense.
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
    """Return the floating-point tensors of the output, per image."""
    outputs = []
    for item in images:
        out = model(item)
        leaves = tree_leaves(vars(out) if hasattr(out, "__dataclass_fields__") else out)
        outputs.append([x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()])
        bar.update()
    return outputs


def _error(outputs: Sequence[Sequence[Tensor]], dense: Sequence[Sequence[Tensor]]) -> float | None:
    """Return the largest relative error of a tensor over all images; None if none is comparable."""
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
