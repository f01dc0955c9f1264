# SPDX-License-Identifier: Apache-2.0
"""Replacement of calls of `scaled_dot_product_attention` by variant C.

A layer of an accelerated model runs its own `forward` while `Interception` intercepts its calls of
`scaled_dot_product_attention`. A call whose tokens have known positions runs `quadtree_sdpa`; other
calls run unchanged, and the layer records the reason.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quadtree_attention.errors import OptionError
from quadtree_attention.ops import plan, quadtree_sdpa
from quadtree_attention.ops.attention.flat.functional import default_levels
from quadtree_attention.ops.attention.problem import check_depth

Grids = tuple[tuple[int, ...], ...]
MOST_PREFIX = 16  # maximum number of prefix tokens if it is not given
Probe = Callable[["DenseLayer", "Call", Tensor, Tensor, Tensor], Tensor]


class Places(NamedTuple):
    """Grid positions of the tokens of a call.

    Attributes:
        grids, key_grids: Sizes of the grids, in the order of the sequence.
        prefix: Number of tokens without a position, at the beginning.
        order: Permutation (T,) of the tokens into this order, or None; with a permutation, queries
            and keys are the same tokens.
    """

    grids: Grids
    key_grids: Grids
    prefix: int = 0
    order: Tensor | None = None


class Call(NamedTuple):
    """Arguments of a call of `scaled_dot_product_attention`, with sizes in place of tensors."""

    shape: tuple[int, ...]  # of q
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    mask: Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None


FindPlaces = Callable[["Call"], Places | str]  # positions, or the reason why they are unknown


class DenseLayer:
    """An attention layer of an accelerated model.

    Attributes:
        name: Name of the module in the model.
        topk: Cells kept per query cell: one number, or one per selecting level; None: the layer
            stays dense.
        calls: Descriptions of the calls of the last forward pass, with their counts.
    """

    def __init__(
        self,
        name: str,
        topk: int | tuple[int, ...] | None,
        *,
        find: FindPlaces,
        min_tokens: int,
        by_plan: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.name, self.topk = name, topk
        self.find = find
        self.min_tokens, self.by_plan = min_tokens, by_plan
        self.options = dict(options)
        self.calls: Counter[str] = Counter()
        self.probe: Probe | None = None

    def why_dense(self, call: Call) -> tuple[Places | None, str]:
        """Return the positions of the tokens, or None and the reason for dense attention."""
        if self.topk is None:
            return None, "K is None"
        return self.placed(call, self.topk)

    def placed(
        self, call: Call, topk: int | tuple[int, ...], *, by_plan: bool | None = None
    ) -> tuple[Places | None, str]:
        """Return the result of `why_dense` at another K."""
        if len(call.shape) != 4:
            return None, f"tensors with {len(call.shape)} axes instead of 4"
        if call.is_causal:
            return None, "causal attention"
        if call.dropout > 0:
            return None, "dropout of attention weights"
        if call.mask is not None and key_mask_of(call) is None:
            return None, "a mask that is not one of keys"
        tokens = min(call.shape[2], call.key_shape[2])
        if tokens < self.min_tokens:
            return None, f"{tokens} tokens, fewer than min_tokens={self.min_tokens}"
        places = self.find(call)
        if isinstance(places, str):
            return None, places
        levels = self.levels(places, topk)
        if levels == 1:
            return None, "one level, which is dense attention"
        try:
            check_depth(levels, *places.grids, *places.key_grids)
        except OptionError:
            return None, f"{levels} levels are too many for {_size(places)}"
        if (self.by_plan if by_plan is None else by_plan) and _dense_is_faster(
            _as_one(places.grids), _as_one(places.key_grids), call.shape[0], call.shape[1],
            call.shape[3], call.value_shape[3], levels, topk, call.dtype, call.device.type,
        ):  # fmt: skip
            return None, f"plan() finds dense attention faster for {_size(places)}"
        return places, f"{_size(places)}, {levels} levels, K {topk}"

    def levels(self, places: Places, topk: int | tuple[int, ...]) -> int:
        given = self.options.get("num_levels")
        return given or default_levels(places.grids, places.key_grids, topk)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        """Return the result (B, N, T, Dv) of variant C, or None if the call must run densely."""
        if self.probe is not None:
            return self.probe(self, call, q, k, v)
        places, text = self.why_dense(call)
        self.calls[f"{'dense' if places is None else 'quadtree'}: {text}"] += 1
        return None if places is None else self.quadtree(places, call, q, k, v, self.topk)

    def quadtree(
        self, places: Places, call: Call, q: Tensor, k: Tensor, v: Tensor, topk: Any
    ) -> Tensor:
        """Run variant C on tokens with known positions."""
        mask = key_mask_of(call)
        if places.order is not None:
            q, k, v = (x.index_select(2, places.order) for x in (q, k, v))
            mask = None if mask is None else mask.index_select(1, places.order)
        out = quadtree_sdpa(
            q, k, v, grid=places.grids, key_grid=places.key_grids, prefix=places.prefix, topk=topk,
            scale=call.scale, key_mask=mask, **self.options,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        if places.order is None:
            return out
        return out.index_select(2, places.order.argsort())


def key_mask_of(call: Call) -> Tensor | None:
    """Return the key mask (B, S) equivalent to the mask of a call; None if there is none."""
    mask = call.mask
    if mask is None or mask.dtype != torch.bool or not 2 <= mask.ndim <= 4:
        return None
    mask = mask[(None,) * (4 - mask.ndim)]
    if any(mask.shape[axis] > 1 and mask.stride(axis) != 0 for axis in (1, 2)):
        return None
    return mask[:, 0, 0].expand(call.shape[0], call.key_shape[2])


class Interception(TorchFunctionMode):
    """Redirects calls of `scaled_dot_product_attention` to a layer."""

    def __init__(self, layer: DenseLayer) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        out = self.layer.attend(*_arguments(*args, **kwargs))
        return func(*args, **kwargs) if out is None else out


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Call]:
    call = describe(
        query, key, value, mask=attn_mask, dropout=dropout_p, is_causal=is_causal, scale=scale
    )
    return query, key, value, call


def describe(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Call:
    """Describe a call of `scaled_dot_product_attention` with these tensors."""
    return Call(tuple(q.shape), tuple(k.shape), tuple(v.shape), q.dtype, q.device, **options)


class Intercepted:
    """`forward` of a layer whose calls of `scaled_dot_product_attention` are intercepted."""

    def __init__(self, layer: DenseLayer, dense: Callable[..., Any]) -> None:
        self.layer, self.dense = layer, dense

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Interception(self.layer):
            return self.dense(*args, **kwargs)


class InterceptedMultihead(Intercepted):
    """`forward` of `nn.MultiheadAttention`, which does not call this function in Python."""

    def __init__(
        self, layer: DenseLayer, module: nn.MultiheadAttention, dense: Callable[..., Any]
    ) -> None:
        super().__init__(layer, dense)
        self.module = module

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        m = self.module
        out = None
        if need_weights:
            self.layer.calls["dense: the caller wants the weights (need_weights=True)"] += 1
        elif attn_mask is not None or is_causal:
            self.layer.calls["dense: a mask that is not one of keys"] += 1
        elif query.is_nested:
            self.layer.calls["dense: nested tensors"] += 1
        elif query.ndim != 3 or m.bias_k is not None or m.add_zero_attn:
            self.layer.calls["dense: tokens without a batch, bias_kv or add_zero_attn"] += 1
        else:
            out = self._quadtree(query, key, value, key_padding_mask)
        if out is not None:
            return out, None
        return self.dense(
            query, key, value, key_padding_mask=key_padding_mask, need_weights=need_weights,
            attn_mask=attn_mask, average_attn_weights=average_attn_weights, is_causal=is_causal,
        )  # fmt: skip

    def _quadtree(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None
    ) -> Tensor | None:
        m = self.module
        if not m.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        mask = None
        if padding is not None:  # True = hidden; a float mask is added to the scores
            mask = (~padding if padding.dtype == torch.bool else padding)[:, None, None]
        batch, tokens, width = query.shape
        shape = (batch, m.num_heads, tokens, width // m.num_heads)
        keys = (batch, m.num_heads, key.shape[1], width // m.num_heads)
        dropout = m.dropout if m.training else 0.0
        call = Call(shape, keys, keys, query.dtype, query.device, mask, dropout)
        if self.layer.probe is None and self.layer.why_dense(call)[0] is None:
            self.layer.calls[f"dense: {self.layer.why_dense(call)[1]}"] += 1
            return None
        weights: Sequence[Tensor] = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
        if m.in_proj_weight is not None:
            weights = m.in_proj_weight.chunk(3)
        biases = (None,) * 3 if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (m.num_heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        attended = self.layer.attend(q, k, v, call)
        if attended is None:
            return None
        out = m.out_proj(attended.transpose(1, 2).flatten(2))
        return out if m.batch_first else out.transpose(0, 1)


class InterceptedCross(Intercepted):
    """`forward` of LightGlue's cross attention, which shares the scores of both directions."""

    def __init__(self, layer: DenseLayer, module: Any, dense: Callable[..., Any]) -> None:
        super().__init__(layer, dense)
        self.module = module

    def __call__(self, x0: Tensor, x1: Tensor, mask: Tensor | None = None) -> Any:
        block = self.module
        if mask is not None:
            self.layer.calls["dense: a mask that is not one of keys"] += 1
            return self.dense(x0, x1, mask)
        heads = (block.heads, -1)
        qk0, qk1, v0, v1 = (
            projection(x).unflatten(-1, heads).transpose(1, 2)
            for projection in (block.to_qk, block.to_v)
            for x in (x0, x1)
        )
        m0 = self.layer.attend(qk0, qk1, v1, describe(qk0, qk1, v1))
        m1 = None if m0 is None else self.layer.attend(qk1, qk0, v0, describe(qk1, qk0, v0))
        if m0 is None or m1 is None:
            return self.dense(x0, x1)
        m0, m1 = (block.to_out(m.transpose(1, 2).flatten(-2)) for m in (m0, m1))
        x0 = x0 + block.ffn(torch.cat([x0, m0], -1))
        x1 = x1 + block.ffn(torch.cat([x1, m1], -1))
        return x0, x1


# ---- places --------------------------------------------------------------------------------------


class Seen:
    """Value recorded in a forward pass, per thread.

    A thread without a value uses the last value of any thread: the backward pass may recompute
    checkpointed layers in another thread.
    """

    def __init__(self, value: Any) -> None:
        self._threads = threading.local()
        self._last = value

    def get(self) -> Any:
        return getattr(self._threads, "value", self._last)

    def set(self, value: Any) -> None:
        self._threads.value = self._last = value

    def __reduce__(self) -> Any:
        return type(self), (self._last,)


class GridOfImages:
    """Positions of image tokens, on the grid of the patch embedding or on a given grid.

    Attributes:
        given: Sizes of the grids of one sequence, the same in every forward pass; empty: the size
            recorded from the patch embedding.
        prefix: Number of prefix tokens before every grid; None: inferred from the tokens.
    """

    def __init__(self, prefix: int | None) -> None:
        self.given: Grids = ()
        self.prefix = prefix
        self._seen = Seen(())

    @property
    def grids(self) -> Grids:
        return self.given or self._seen.get()

    def see(self, grids: Grids) -> None:
        self._seen.set(grids)

    def see_patches(self, _module: nn.Module, _args: Any, out: Tensor) -> None:
        """Forward hook of the convolution of the patch embedding."""
        self.see((tuple(out.shape[2:]),))

    def __call__(self, call: Call) -> Places | str:
        tokens, grids = call.shape[2], self.grids
        if not grids:
            return "no grid is known; pass grid=(height, width)"
        if tokens != call.key_shape[2]:
            return f"{tokens} queries of other tokens than the {call.key_shape[2]} keys"
        places = self._fit(tokens, grids, call.device)
        if places is None:
            return f"{tokens} tokens do not fit {_shown(grids)}; pass grid and prefix"
        patches = self._seen.get()
        left = tokens - _cells(patches)
        if self.prefix is None and patches and 0 <= left < places.prefix:
            return (
                f"{_shown(grids)} leaves {places.prefix} prefix tokens, {_shown(patches)} of the "
                f"patch embedding {left}; pass prefix too"
            )
        return places

    def _fit(self, tokens: int, grids: Grids, device: torch.device) -> Places | None:
        cells = _cells(grids)
        most = MOST_PREFIX if self.prefix is None else self.prefix
        if 0 <= tokens - cells <= most and self.prefix in (None, tokens - cells):
            return Places(grids, grids, tokens - cells)
        if len(grids) == 1:  # several frames, each with its own prefix
            for prefix in range(most + 1) if self.prefix is None else [self.prefix]:
                if tokens % (cells + prefix) == 0:
                    return _frames(grids[0], prefix, tokens // (cells + prefix), device)
        return None


def _cells(grids: Grids) -> int:
    return sum(prod(grid) for grid in grids)


def _frames(grid: tuple[int, ...], prefix: int, count: int, device: torch.device) -> Places:
    """Return the positions of consecutive frames, each with its prefix."""
    grids = (grid,) * count
    if prefix == 0:
        return Places(grids, grids)
    numbers = torch.arange(count * (prefix + prod(grid)), device=device).view(count, -1)
    order = torch.cat([numbers[:, :prefix].flatten(), numbers[:, prefix:].flatten()])
    return Places(grids, grids, count * prefix, order)


def of_points(call: Call) -> Places | str:
    """Return the positions of points sorted along a curve: a grid of one axis."""
    grids = [((shape[2],),) for shape in (call.shape, call.key_shape)]
    return Places(grids[0], grids[1])


class GridOfMaps:
    """Positions of the cells of maps, from the arguments of `forward` of this package's layers."""

    def __init__(self, by_row: bool) -> None:
        self.by_row = by_row
        self._seen = Seen(((), ()))

    def see_maps(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of layers with `forward(x, context=None)` on maps (B, *grid, C)."""
        maps = [*args, kwargs["x"]] if "x" in kwargs else list(args)
        context = maps[1] if len(maps) > 1 else kwargs.get("context")
        first = 2 if self.by_row else 1
        sizes = [
            tuple(x.shape[first:-1]) for x in (maps[0], maps[0] if context is None else context)
        ]
        self._seen.set(((sizes[0],), (sizes[1],)))

    def __call__(self, call: Call) -> Places | str:
        return Places(*self._seen.get())


def _as_one(grids: Grids) -> tuple[int, ...]:
    """Return one grid with about as many cells."""
    if len(grids) == 1:
        return grids[0]
    width = prod(grids[0][1:])
    return (_cells(grids) // width, *grids[0][1:])


@lru_cache(maxsize=4096)
def _dense_is_faster(
    grid: tuple[int, ...],
    key_grid: tuple[int, ...],
    batch: int,
    heads: int,
    dim: int,
    value_dim: int,
    levels: int,
    topk: int | tuple[int, ...],
    dtype: torch.dtype,
    device: str,
) -> bool:
    if device not in ("cpu", "cuda"):
        return False
    found = plan(
        grid, key_grid, heads=heads, dim=dim, value_dim=value_dim, batch=batch, num_levels=levels,
        topk=topk, variant="C", dtype=dtype, device=device,
    )  # fmt: skip
    return found.cheaper == "dense"


def _shown(grids: Grids) -> str:
    first = "x".join(map(str, grids[0]))
    if len(grids) == 1:
        return first
    return f"{len(grids)} x {first}" if len(set(grids)) == 1 else f"{len(grids)} grids"


def _size(places: Places) -> str:
    text = _shown(places.grids)
    if places.key_grids != places.grids:
        text += f" to {_shown(places.key_grids)}"
    return text + (f" + {places.prefix}" if places.prefix else "")
