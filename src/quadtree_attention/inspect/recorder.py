# SPDX-License-Identifier: Apache-2.0
"""Recording of the queries, keys and options of the attention layers of a model.

A record contains the queries and keys of every attention layer, with heads split and position
encodings applied. From these follow the kept cells of a query at any K, their scores, full
attention of the same queries and keys, and the share of it inside the kept cells.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.inspect.attention import Attention, Kind, mass_inside
from quadtree_attention.models.parts.context_attention import ContextAttention
from quadtree_attention.models.parts.context_attention import LinearAttention as LinearContext
from quadtree_attention.models.parts.match_transformer import MatchTransformer
from quadtree_attention.models.parts.row_attention import RowAttention, RowBlock
from quadtree_attention.nn.attention import QuadtreeAttention
from quadtree_attention.nn.baselines import FullAttention, LinearAttention
from quadtree_attention.nn.baselines.reduced import (
    LinearSpatialReductionAttention,
    SpatialReductionAttention,
)
from quadtree_attention.ops.attention.problem import check_topk

if TYPE_CHECKING:
    from PIL import Image

    from quadtree_attention.files import StrPath
    from quadtree_attention.images import Array, ImageLike
    from quadtree_attention.viz.page import Page

LIMIT = 2**31  # bytes
DENSE = (
    FullAttention,
    SpatialReductionAttention,
    LinearSpatialReductionAttention,
    LinearAttention,
    ContextAttention,
)


class Part(NamedTuple):
    """Samples of one shape: queries and keys (B, *grid, N, D), and their masks (B, *grid)."""

    q: Tensor
    k: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None


class Layer:
    """Queries and keys of one attention layer in the last forward pass.

    Calls on maps of equal size are concatenated: the two images of a matcher, and chunks of rows of
    the stereo network, become samples of one batch.

    Attributes:
        name: Name of the layer in the model.
        kind: "quadtree", "softmax" (full attention, or spatial reduction, whose key grid is
            smaller) or "linear".
        cross: Whether the keys are from the other image.
        num_levels: Levels; 1 for attentions without a pyramid.
        topk: Cells kept per query and selecting level, coarse -> fine.
        variant: Variant of quadtree attention.
        scale: Factor on the scores.
        level_weights: Share of every level in the message of variant B, coarse -> fine.
        parts: Queries and keys, one part per size of the maps.
    """

    def __init__(self, name: str, module: nn.Module, *, cross: bool) -> None:
        self.name, self.cross = name, cross
        self.kind: Kind = "softmax"
        self.num_levels, self.variant = 1, "B"
        self.topk: tuple[int, ...] = ()
        self.scale: float | None = None
        self.level_weights: tuple[float, ...] = (1.0,)
        self.parts: list[Part] = []
        if isinstance(module, LinearAttention | LinearContext):
            self.kind = "linear"
        elif is_quadtree(module):
            layer: Any = module
            self.kind, self.num_levels = "quadtree", layer.num_levels
            self.topk = check_topk(layer.topk, layer.num_levels)
            self.variant = getattr(layer, "variant", None) or layer.attention[-1].upper()
            self.scale = getattr(layer, "scale", None)
            if layer.level_logits is not None:
                shares = layer.level_logits.detach().float().softmax(dim=0)
                self.level_weights = tuple(shares.tolist())

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(len(part.q) for part in self.parts)

    def __iter__(self) -> Iterator[Attention]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Attention:
        """Return the attention of one sample: maps of one image, or a row of the stereo network."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} samples, got {index}")
        place = index % len(self)
        for part in self.parts:
            if place < len(part.q):
                break
            place -= len(part.q)
        q, k, query_mask, key_mask = (None if x is None else x[place : place + 1] for x in part)
        assert q is not None and k is not None
        return Attention(
            q,
            k,
            query_mask,
            key_mask,
            kind=self.kind,
            num_levels=self.num_levels,
            topk=self.topk,
            variant=self.variant,
            scale=q.shape[-1] ** -0.5 if self.scale is None else self.scale,
            level_weights=self.level_weights,
        )

    def mass(
        self, k: int | Sequence[int] | None = None, *, queries: int = 512
    ) -> tuple[float, ...]:
        """Return the share of the probability of full attention inside the kept cells, per level.

        Full attention is the softmax over all keys of the finest maps; the mean is over query cells
        and heads. The cells kept at a level are cells of that level, so that the mass does not
        increase from coarse to fine.

        Args:
            k: Cells kept: one number, or one per selecting level; None: `topk`.
            queries: Number of query cells measured per sample, spread evenly.
        """
        topk = self.topk if k is None else check_topk(k, self.num_levels)
        found = [mass_inside(sample, topk, queries) for sample in self]
        levels = (torch.cat([x.sum(dim=-1) for x in level]) for level in zip(*found, strict=True))
        return tuple(float(level.double().mean()) for level in levels)

    def _add(self, part: Part) -> None:
        """Append a call; samples of the same shape are concatenated with the last part."""
        if self.parts and _shapes(self.parts[-1]) == _shapes(part):
            joined = (
                None if a is None or b is None else torch.cat([a, b])
                for a, b in zip(self.parts[-1], part, strict=True)
            )
            self.parts[-1] = Part(*joined)  # type: ignore[arg-type]
        else:
            self.parts.append(part)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(p.q)} x {'x'.join(map(str, p.q.shape[1:-2]))}" for p in self.parts)
        return f"Layer({self.name!r}, {self.kind}, topk={self.topk}, samples={sizes or 'none'})"


class Record(Mapping[str, Layer]):
    """Queries and keys of the attention layers of a model in its last forward pass, by name."""

    def __init__(self, layers: dict[str, Layer], heads: Sequence[int] | None, limit: int) -> None:
        self._layers = layers
        self._heads = None if heads is None else list(heads)
        self._limit = limit
        self._bytes = 0

    def __getitem__(self, name: str) -> Layer:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all queries, keys and masks."""
        return self._bytes

    def mass(
        self, k: int | Sequence[int] | None = None, *, queries: int = 512
    ) -> dict[str, tuple[float, ...]]:
        """Return `Layer.mass` of every layer with quadtree attention."""
        return {
            name: layer.mass(k, queries=queries)
            for name, layer in self.items()
            if layer.kind == "quadtree"
        }

    def draw(
        self,
        images: "ImageLike | Sequence[ImageLike]",
        at: tuple[float, float],
        path: "StrPath | None" = None,
        *,
        layers: Sequence[str] | None = None,
        head: int | None = None,
        sample: int = 0,
    ) -> "Image.Image":
        """Draw the scores of one query at every level, one row per layer.

        Args:
            images: The image, or the two images of a pair.
            at: The query, (x, y) in pixels of the first image.
            path: Picture to write, .png, .jpg or .webp.
            layers: Names of layers; None: the last self and the last cross attention.
            head: One head; None: the mean of all.
            sample: Index of the sample of the first image.

        Raises:
            OptionError: There is no such layer or head, or the point is outside the image.
        """
        from quadtree_attention.inspect.still import draw_record

        return draw_record(self, images, at, path, layers=layers, head=head, sample=sample)

    def show(
        self,
        images: "ImageLike | Sequence[ImageLike]",
        *,
        layers: Sequence[str] | None = None,
        at: tuple[float, float] | None = None,
        matches: "tuple[Array, Array, Array] | None" = None,
        disparity: "Array | None" = None,
    ) -> "Page":
        """Return a page that shows the selection of every query, at any K; displayed in notebooks.

        `show(...).save("explore.html")` writes one file, which needs no server or network. For the
        stereo network, the page contains as many rows as fit into 4 MB.

        Args:
            images: The image, or the two images of a pair, as passed to the network.
            layers: Names of layers; None: the last self and the last cross attention.
            at: The initial query, (x, y) in pixels of the first image.
            matches: Points (N, 2) of the two images, in pixels, and their confidence (N,).
            disparity: Disparity (H, W) of the left image, in its pixels; NaN where occluded.

        Raises:
            OptionError: There is no such layer, or the point is outside the image.
        """
        from quadtree_attention.inspect.explorer import make_explorer

        return make_explorer(
            {"": self}, images, layers=layers, at=at, matches=matches, disparity=disparity
        )

    def _clear(self) -> None:
        self._bytes = 0
        for layer in self._layers.values():
            layer.parts.clear()

    def _keep(self, name: str, part: Part) -> None:
        heads = slice(None) if self._heads is None else self._heads
        kept = Part(
            part.q.detach()[..., heads, :].to("cpu", copy=True),
            part.k.detach()[..., heads, :].to("cpu", copy=True),
            None if part.query_mask is None else part.query_mask.to("cpu", copy=True),
            None if part.key_mask is None else part.key_mask.to("cpu", copy=True),
        )
        self._bytes += sum(x.numel() * x.element_size() for x in kept if x is not None)
        if self._bytes > self._limit:
            raise OptionError(
                f"the record would hold more than limit={self._limit} bytes at {name}; name the "
                f"layers you need (layers=[...]), choose heads, or raise the limit"
            )
        self._layers[name]._add(kept)


@contextmanager
def record(
    model: nn.Module,
    *,
    layers: str | Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    limit: int = LIMIT,
) -> Iterator[Record]:
    """Record the attention layers of a model while the context is open.

    The outputs of the model stay bit-identical, and the model is unchanged afterwards. The record
    contains the last forward pass, on the CPU, and remains valid after the context is closed.

    Args:
        model: A model with quadtree, full, spatial reduction or linear attention, in eager mode.
        layers: Names, or patterns such as "*cross_attn", of the layers to record; None: all.
        heads: Heads to record; None: all.
        limit: Maximum size of the record in bytes.

    Raises:
        OptionError: The model is compiled or has no such layer; in a forward pass: the limit is
            exceeded.

    Example:
        >>> import torch
        >>> from quadtree_attention import QuadtreeAttention, record
        >>> attention = QuadtreeAttention(32, num_heads=2, num_levels=3, topk=4)
        >>> with record(attention) as seen:
        ...     _ = attention(torch.randn(1, 20, 30, 32))
        >>> seen[""][0].selection()[0].cells.shape  # of the coarsest level: (5, 8) query cells
        torch.Size([1, 5, 8, 2, 4, 2])
    """
    refuse_compiled(model)
    found = {name: m for name, m in model.named_modules() if _is_recordable(m)}
    if not found:
        raise OptionError(
            f"{type(model).__name__} has no attention that can be recorded: quadtree, full, "
            "spatial reduction or linear attention of this package; pass a model that has"
        )
    chosen = _chosen(layers, found)
    crossing = _cross_layers(model)
    if heads is not None:
        most = min(int(getattr(found[name], "num_heads", 1)) for name in chosen)
        if not heads or not all(0 <= head < most for head in heads):
            raise OptionError(f"heads must be from 0 to {most - 1}, got {list(heads)}; pass some")
    seen = Record(
        {name: Layer(name, found[name], cross=name in crossing) for name in chosen}, heads, limit
    )
    inside: list[bool] = []  # whether a forward pass is running; empty until the first call

    def begin(*_: Any) -> None:
        seen._clear()
        inside[:] = [True]

    def end(*_: Any) -> None:
        inside[:] = [False]

    hooks = [
        model.register_forward_pre_hook(begin),
        model.register_forward_hook(end, always_call=True),
    ]
    try:
        for name in chosen:
            found[name].attend = partial(_recorded, seen, name, found[name], inside)
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for name in chosen:
            found[name].__dict__.pop("attend", None)


def refuse_compiled(model: nn.Module) -> None:
    """Raise `OptionError` for a model compiled by `torch.compile`, in whole or in part."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise OptionError(
                f"recording needs the eager model, got one that torch.compile has compiled "
                f"({type(module).__name__}); record the model before compiling it, or its _orig_mod"
            )


def is_quadtree(module: nn.Module) -> bool:
    """Return True for a layer with quadtree attention."""
    if isinstance(module, RowAttention):
        return module.attention != "full"
    return isinstance(module, QuadtreeAttention)


def _is_recordable(module: nn.Module) -> bool:
    return isinstance(module, (QuadtreeAttention, RowAttention, *DENSE))


def _recorded(
    seen: Record, name: str, module: Any, inside: list[bool], *args: Any, **kwargs: Any
) -> Any:
    """Return `attend` of a layer wrapped so that its arguments are copied to the record."""
    if torch.compiler.is_compiling():
        raise OptionError("recording needs the eager model, got a call under torch.compile")
    attend = type(module).attend
    if not inside or inside[0]:  # not if a layer is recomputed in the backward pass
        given = inspect.signature(attend).bind(module, *args, **kwargs).arguments
        key_mask = given.get("context_mask", given.get("visible"))
        seen._keep(name, Part(given["q"], given["k"], given.get("mask"), key_mask))
    return attend(module, *args, **kwargs)


def _chosen(layers: str | Sequence[str] | None, names: Mapping[str, Any]) -> list[str]:
    """Return the names that match one of the patterns, in the order of the model."""
    if layers is None:
        return list(names)
    patterns = [layers] if isinstance(layers, str) else list(layers)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise OptionError(
                f"no attention layer is called {pattern!r}; there are {', '.join(names)}"
            )
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def _cross_layers(model: nn.Module) -> set[str]:
    """Return the names of the layers that attend to the other image."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, MatchTransformer):
            start = f"{name}.layers" if name else "layers"
            found |= {f"{start}.{i}.attn" for i in range(1, len(module.layers), 2)}
        elif isinstance(module, RowBlock):
            found.add(f"{name}.cross_attn" if name else "cross_attn")
    return found


def _shapes(part: Part) -> list[tuple[int, ...] | None]:
    return [None if x is None else tuple(x.shape[1:]) for x in part]
