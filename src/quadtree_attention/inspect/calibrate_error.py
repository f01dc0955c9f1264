# SPDX-License-Identifier: Apache-2.0
"""K by error: for layers of an accelerated model the smallest K near dense attention."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.models.accelerate import accelerated_layers
from quadtree_attention.models.parts.dense_layers import Call, DenseLayer

TOPK = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class ErrorCalibration(dict[str, int | None]):
    """K by the name of a layer, None where it stays dense; `set_topk(model, ...)` applies it.

    Attributes:
        target: The largest relative error that was asked for.
        images: Images that it was measured on.
        errors: By layer and K: relative error of the attention's result.
        seconds: By layer and K: time of the attention over all images; K 0 is dense attention.

    Example:
        found = calibrate_topk(model, images, error=0.05)    # of an accelerated model
        print(found.to_text())
        set_topk(model, found)
    """

    def __init__(
        self,
        topk: Mapping[str, int | None],
        target: float,
        images: int,
        errors: Mapping[str, Mapping[int, float]],
        seconds: Mapping[str, Mapping[int, float]],
    ) -> None:
        super().__init__(topk)
        self.target, self.images = target, images
        self.errors = {name: dict(found) for name, found in errors.items()}
        self.seconds = {name: dict(seconds.get(name, {})) for name in topk}

    def error(self, name: str) -> float:
        """Return the relative error that is expected of a layer; 0 where it stays dense."""
        k = self[name]
        return 0.0 if k is None else self.errors[name][k]

    def within(self, name: str, error: float) -> int | None:
        """Return the smallest K of a layer within an error, whatever its time; None: no K is."""
        return min((k for k, e in self.errors[name].items() if e <= error), default=None)

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
            "error": self.target, "images": self.images, "speedup": round(self.speedup(), 2),
            "layers": layers,
        }  # fmt: skip

    def to_text(self) -> str:
        """Return a table: K, expected error and speed-up per layer."""
        rows = [("layer", "K", "error", "speed-up")]
        for name, k in self.items():
            shown = "dense" if k is None else str(k)
            rows.append((name, shown, f"{self.error(name):.4f}", f"{self.speedup(name):.2f}x"))
        rows.append(("all", "", "", f"{self.speedup():.2f}x"))
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
        self.warm: set[Any] = set()

    def __call__(self, layer: DenseLayer, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def attend_densely() -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=call.mask, dropout_p=call.dropout, is_causal=call.is_causal,
                scale=call.scale, enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip

        squares = self.squares.setdefault(layer.name, {})
        seconds = self.seconds.setdefault(layer.name, {})
        if layer.placed(call, TOPK[0], by_plan=False)[0] is None:
            return attend_densely()
        dense = self._timed(seconds, 0, (layer.name, 0, call.shape), attend_densely)
        wide = dense.double()
        squares[0] = squares.get(0, 0.0) + float(wide.square().sum())
        self.calls[layer.name, 0] += 1
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


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def calibrate_error(model: nn.Module, images: Sequence[Any], error: float) -> ErrorCalibration:
    """Return the smallest K per layer whose result is near enough to dense attention.

    Every layer sees the inputs that it has in the dense network. A layer stays dense where no K
    reaches the error, or where the K that does takes as long as dense attention.

    Args:
        model: A model that `accelerate` was called on.
        images: Inputs of the model; every one is passed as `model(item)`, once.
        error: Largest relative error of the result of a layer.
    """
    layers = accelerated_layers(model)
    probe = _Probe()
    try:
        for layer in layers.values():
            layer.probe = probe
        for item in images:
            model(item)
    finally:
        for layer in layers.values():
            layer.probe = None
    topk: dict[str, int | None] = {}
    errors: dict[str, dict[int, float]] = {}
    for name in layers:
        squares, calls = probe.squares.get(name, {}), probe.calls
        total = squares.get(0, 0.0)
        found = {
            k: (s / total) ** 0.5 if total else 0.0
            for k, s in squares.items()
            if k and calls[name, k] == calls[name, 0]  # smaller calls have not so many cells
        }
        seconds = probe.seconds.get(name, {})
        enough = [k for k, e in found.items() if e <= error and seconds[k] < seconds[0]]
        topk[name] = min(enough) if enough else None
        errors[name] = found
    return ErrorCalibration(topk, error, len(images), errors, probe.seconds)
