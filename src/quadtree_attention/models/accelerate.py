# SPDX-License-Identifier: Apache-2.0
"""Variant C in networks trained with dense attention, in place and reversible."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import isqrt
from types import CodeType, FunctionType, TracebackType
from typing import Any, NamedTuple, Self

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from quadtree_attention import checks
from quadtree_attention.errors import MissingDependencyError, OptionError
from quadtree_attention.models.parts import context_attention
from quadtree_attention.models.parts.dense_layers import (
    MOST_PREFIX,
    Call,
    DenseLayer,
    FindPlaces,
    GridOfImages,
    GridOfMaps,
    Intercepted,
    InterceptedCross,
    InterceptedMultihead,
    Interception,
    Places,
    of_points,
)
from quadtree_attention.models.parts.points import SortedPoints
from quadtree_attention.models.parts.row_attention import RowAttention
from quadtree_attention.nn.baselines import FullAttention
from quadtree_attention.ops.attention.flat.functional import as_grids, is_whole
from quadtree_attention.ops.backends import BACKENDS

MIN_TOKENS = 1024
TOPK = 16
Grid = Sequence[int]
GivenGrid = Grid | Sequence[Grid] | Callable[..., Grid | Sequence[Grid]]
_OURS = (FullAttention, context_attention.FullAttention)
_SDPA = ("scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS")  # the latter: transformers


class Acceleration(Mapping[str, DenseLayer]):
    """The layers of an accelerated model by name; `restore()` undoes the acceleration.

    Can be used as a context manager, which restores the model on exit.

    Attributes:
        model: The model.
        skipped: Attention layers that were not accelerated, with the reason.
    """

    def __init__(self, model: nn.Module, layers: dict[str, DenseLayer], skipped: dict[str, str]):
        self.model = model
        self.skipped = skipped
        self._layers = layers
        self._undo: list[Callable[[], None]] = []
        self._ran = False

    def __getitem__(self, name: str) -> DenseLayer:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the attention of the model; its outputs are bit-identical to those before."""
        while self._undo:
            self._undo.pop()()

    def to_dict(self) -> dict[str, Any]:
        """Return K and the calls of the last forward pass of every layer as plain data."""
        layers = {
            name: {"topk": layer.topk, "calls": dict(layer.calls)} for name, layer in self.items()
        }
        return {"layers": layers, "skipped": dict(self.skipped)}

    def to_text(self) -> str:
        """Return the report: every layer, its K, and how its calls ran in the last forward pass."""
        rows = []
        for name, layer in self.items():
            calls = [f"{text} ({n} calls)" if n > 1 else text for text, n in layer.calls.items()]
            text = "; ".join(calls) or ("made no call" if self._ran else "not run yet")
            rows.append((name or "(model)", f"K {layer.topk}: {text}"))
        rows += [(name or "(model)", f"left alone: {why}") for name, why in self.skipped.items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)

    def __repr__(self) -> str:
        return f"Acceleration of {type(self.model).__name__}:\n{self.to_text()}"

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        undo: Callable[[], None] = partial(delattr, module, "forward")
        if "forward" in module.__dict__:  # another library has wrapped this instance
            undo = partial(setattr, module, "forward", module.__dict__["forward"])
        module.forward = forward
        self._undo.append(undo)

    def _clear(self, *_: Any) -> None:
        self._ran = True
        for layer in self.values():
            layer.calls.clear()


def accelerate(
    model: nn.Module,
    topk: int | Sequence[int] | Mapping[str, int | Sequence[int] | None] = TOPK,
    *,
    min_tokens: int = MIN_TOKENS,
    skip: str | Sequence[str] = (),
    grid: GivenGrid | None = None,
    prefix: int | None = None,
    num_levels: int | None = None,
    exact_queries: bool = False,
    lookahead: bool = False,
    use_plan: bool = True,
    backend: str = "auto",
) -> Acceleration:
    """Replace dense attention in a trained network by variant C, in place.

    Weights are unchanged. Every layer whose tokens have known positions on a grid runs
    `quadtree_sdpa` instead of dense attention: layers of timm's vision transformers, of
    transformers, torchvision and other networks that call `scaled_dot_product_attention`,
    `nn.MultiheadAttention`, LightGlue (its points are sorted along a space-filling curve), and the
    `full` attention of this package's matcher and stereo network. If `topk` keeps all cells, the
    outputs equal those of dense attention.

    The grid of a vision transformer is the size of the output of its patch embedding: the last
    executed convolution whose stride equals its kernel size. Prefix tokens (class and register
    tokens) attend to all tokens, and all tokens attend to them. A sequence of several frames, each
    with such tokens, is processed as several trees.

    A call runs dense attention if it has fewer than `min_tokens` tokens, if `plan` estimates dense
    attention to be faster, or if variant C does not support it: causal masks, pairwise masks,
    dropout, tokens that do not fit the grid. The report states the reason.

    Args:
        model: A network in eager mode.
        topk: Cells kept per query cell, or a mapping by layer name as returned by `calibrate_topk`;
            layers that are missing or None stay dense.
        min_tokens: Calls with fewer queries or keys stay dense.
        skip: Names, or patterns such as "blocks.0.*", of layers that stay dense.
        grid: Size of the grid, such as (H, W), or of several grids in one sequence; or a function
            of the arguments of the model that returns it. None: the output of the patch embedding.
        prefix: Number of prefix tokens before a grid. None: inferred from the number of tokens.
        num_levels: Levels of the trees. None: chosen so that the coarsest level is cheap.
        exact_queries, lookahead, backend: As for `quadtree_attention`.
        use_plan: Use dense attention for calls where `plan` estimates it to be faster.

    Returns:
        The accelerated layers, with a report of their last calls (`print(...)`) and `restore()`.

    Raises:
        OptionError: The model has no attention that can be accelerated, is compiled or already
            accelerated, or an option is not accepted. The model is then unchanged.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True).eval()
        >>> accelerated = accelerate(model, topk=8, min_tokens=256, use_plan=False)
        >>> _ = model(torch.randn(1, 3, 320, 480))
        >>> print(accelerated.to_text().splitlines()[0])
        blocks.0.attn   K 8: quadtree: 20x30 + 1, 3 levels, K 8
        >>> accelerated.restore()
    """
    min_tokens = _whole("min_tokens", min_tokens, 0)
    prefix = None if prefix is None else _whole("prefix", prefix, 0)
    num_levels = None if num_levels is None else _whole("num_levels", num_levels, 1)
    checks.known(backend, ["auto", *(one.name for one in BACKENDS)], "backend")
    patterns = list(skip) if isinstance(skip, Iterable) and not isinstance(skip, str) else [skip]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"skip must be names of layers, got {skip!r}; pass one or a list")
    _refuse(model)
    options = {
        "num_levels": num_levels, "exact_queries": exact_queries, "lookahead": lookahead,
        "backend": backend,
    }  # fmt: skip
    places = GridOfImages(prefix)
    if grid is not None and not callable(grid):
        places.given = tuple(as_grids("grid", grid))
    make = partial(DenseLayer, min_tokens=min_tokens, by_plan=use_plan, options=options)
    found, skipped = _attention_layers(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise OptionError(
                f"no attention layer is called {pattern!r}; there are {checks.few(found)}"
            )
    for name in [name for name in found if any(fnmatchcase(name, p) for p in patterns)]:
        del found[name]
        skipped[name] = "skip names it"
    kept = _topk_of(topk, found, num_levels)
    layers: dict[str, DenseLayer] = {}
    for name, one in found.items():
        find: FindPlaces = places
        if one.kind == "points":
            find = of_points
        elif one.kind == "maps":
            find = GridOfMaps(by_row=isinstance(one.module, RowAttention))
        layers[name] = make(name, kept[name], find=find)
    if not layers:
        why = next(iter(skipped.values()), "it calls no scaled_dot_product_attention")
        raise OptionError(
            f"{type(model).__name__} has no attention that can be accelerated ({why}); pass a "
            "network with dense attention, and for one of transformers attn_implementation='sdpa'"
        )
    result = Acceleration(model, layers, skipped)
    _install(result, found, places, grid)
    return result


def accelerated_layers(model: nn.Module) -> dict[str, DenseLayer]:
    """Return the layers of an accelerated model by name; empty for other models."""
    return {
        name: forward.layer
        for name, module in model.named_modules()
        if isinstance(forward := module.__dict__.get("forward"), Intercepted)
    }


def _whole(name: str, value: Any, least: int) -> int:
    if not is_whole(value, least):
        raise OptionError(f"{name} must be an integer of at least {least}, got {value!r}; pass one")
    return int(value)


def _refuse(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"accelerate takes a network (nn.Module), got {type(model).__name__}; pass the network"
        )
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise OptionError(
                f"accelerate needs the eager model, got one that torch.compile has compiled "
                f"({type(module).__name__}); pass the model before compiling it, or its _orig_mod"
            )
        if isinstance(module.__dict__.get("forward"), Intercepted | SortedPoints):
            raise OptionError(
                f"{type(model).__name__} is accelerated already; call restore() of what "
                "accelerate() returned first"
            )


class _Found(NamedTuple):
    """An attention layer: its module, and the source of its token positions."""

    module: nn.Module
    kind: str = "images"


def _attention_layers(model: nn.Module) -> tuple[dict[str, _Found], dict[str, str]]:
    """Return dense attention layers by name, and unsupported layers with the reason."""
    found: dict[str, _Found] = {}
    skipped: dict[str, str] = {}
    points = [f"{name}." if name else "" for name, m in model.named_modules() if _sorts(m)]
    crossing: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(one) for one in crossing):
            continue
        kind = "points" if any(name.startswith(one) for one in points) else "images"
        if kind == "points" and all(hasattr(module, x) for x in ("to_qk", "to_v", "to_out")):
            found[name] = _Found(module, kind)
            crossing.append(f"{name}.")  # its children make the calls on a GPU
        elif isinstance(module, RowAttention):
            if module.attention == "full":
                found[name] = _Found(module, "maps")
        elif isinstance(module, nn.MultiheadAttention):
            found[name] = _Found(module, kind)
        elif type(module) in _OURS:
            found[name] = _Found(module, "maps")
        elif type(module).__module__.startswith("quadtree_attention."):
            if isinstance(module, context_attention.FullAttention):
                skipped[name] = "its keys are not the cells of a map"
        elif _calls_sdpa(type(module)):
            if getattr(module, "fused_attn", True):
                found[name] = _Found(module, kind)
            else:
                skipped[name] = "fused_attn is off, so it calls no scaled_dot_product_attention"
    for outer in [one for one in found if any(_is_inside(name, one) for name in found)]:
        del found[outer]  # calls of the inner layer would be intercepted twice
        skipped[outer] = "attention layers inside of it are taken"
    return found, skipped


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _sorts(module: nn.Module) -> bool:
    """Return True for a network with the structure of LightGlue."""
    layers = getattr(module, "transformers", None)
    return (
        isinstance(layers, nn.ModuleList)
        and all(hasattr(module, x) for x in ("posenc", "log_assignment"))
        and all(hasattr(x, "self_attn") and hasattr(x, "cross_attn") for x in layers)
    )


def _calls_sdpa(cls: type) -> bool:
    """Return True if a method of a class, or a function it calls, names an attention function."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == "torch":
            continue
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType) and _names_sdpa(function, depth=2):
                return True
    return False


def _names_sdpa(function: FunctionType, depth: int) -> bool:
    names = set(_names(function.__code__))
    if names.intersection(_SDPA):
        return True
    called = [function.__globals__.get(name) for name in names] if depth > 1 else []
    return any(isinstance(f, FunctionType) and _names_sdpa(f, depth - 1) for f in called)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _topk_of(
    topk: Any, names: Mapping[str, Any], num_levels: int | None
) -> dict[str, int | tuple[int, ...] | None]:
    """Return the checked K by layer."""
    if not isinstance(topk, Mapping):
        return dict.fromkeys(names, checked_topk(topk, num_levels))
    for name in topk:
        checks.known(name, names, "an attention layer")
    return {name: checked_topk(topk.get(name), num_levels) for name in names}


def checked_topk(topk: Any, num_levels: int | None) -> int | tuple[int, ...] | None:
    """Return the checked K of a layer of an accelerated model with `num_levels`.

    Raises:
        OptionError: K is not None, an integer >= 1, or a sequence of such integers.
    """
    if topk is None:
        return None
    values = list(topk) if isinstance(topk, Sequence) else [topk]
    if not values or not all(map(is_whole, values)):
        raise OptionError(
            f"topk must be at least 1, one number or one per level that selects, got {topk!r}; "
            "16 is usual"
        )
    if not isinstance(topk, Sequence):
        return int(topk)
    if num_levels not in (None, len(values) + 1):
        raise OptionError(
            f"topk must be one number or one per level that selects, {num_levels - 1} for "
            f"{num_levels=}, got {topk!r}"
        )
    return tuple(map(int, values))


def _install(
    result: Acceleration,
    found: Mapping[str, _Found],
    places: GridOfImages,
    grid: GivenGrid | None,
) -> None:
    undo, model = result._undo, result.model
    undo.append(model.register_forward_pre_hook(result._clear).remove)
    if callable(grid):
        see = partial(_see_arguments, places, grid)
        undo.append(model.register_forward_pre_hook(see, with_kwargs=True).remove)
    else:
        for module in _patch_embeddings(model, found):
            undo.append(module.register_forward_hook(places.see_patches).remove)
    for name, (module, kind) in found.items():
        layer = result[name]
        forward = _forward_of(module)
        if isinstance(layer.find, GridOfMaps):
            see_maps = layer.find.see_maps
            undo.append(module.register_forward_pre_hook(see_maps, with_kwargs=True).remove)
        if isinstance(module, nn.MultiheadAttention):
            # The fast path of TransformerEncoderLayer bypasses layers without a hook
            undo.append(module.register_forward_pre_hook(_nothing).remove)
            result._replace(module, InterceptedMultihead(layer, module, forward))
        elif kind == "points" and hasattr(module, "to_qk"):
            result._replace(module, InterceptedCross(layer, module, forward))
        else:
            result._replace(module, Intercepted(layer, forward))
    for module in model.modules():
        if _sorts(module):
            result._replace(module, SortedPoints(_forward_of(module)))


def _nothing(*_: Any) -> None:
    pass


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return `module.forward` in a form that can be copied and pickled with the module."""
    own: Callable[..., Any] | None = module.__dict__.get("forward")
    return partial(type(module).forward, module) if own is None else own


def _see_arguments(
    places: GridOfImages,
    grid: Callable[..., Any],
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    places.see(tuple(as_grids("grid", grid(*args, **kwargs))))


def _patch_embeddings(model: nn.Module, found: Mapping[str, _Found]) -> Iterator[nn.Module]:
    """Yield convolutions whose stride equals their kernel size, except inside attention layers."""
    inside = tuple(f"{name}." for name in found if name)
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
            and module.kernel_size == module.stride
            and max(module.stride) > 1
            and not name.startswith(inside)
        ):
            yield module


# ---- transformers --------------------------------------------------------------------------------


def register_transformers() -> None:
    """Register `attn_implementation="quadtree"` with transformers.

    Layers with this implementation run variant C with the defaults of `accelerate` if their tokens
    are a square map with up to 16 prefix tokens, and dense attention otherwise. In an accelerated
    model they use the options of `accelerate`.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import AttentionInterface
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"attn_implementation='quadtree' needs {error.name}, which is not installed; "
            "pip install transformers"
        ) from error
    AttentionInterface.register("quadtree", _attend_transformers)


def _square(call: Call) -> Places | str:
    """Return the positions of tokens that are a square map after a prefix."""
    tokens = call.shape[2]
    side = isqrt(tokens)
    if tokens != call.key_shape[2] or tokens - side**2 > MOST_PREFIX:
        return f"{tokens} tokens are no square map with a prefix"
    return Places(((side, side),), ((side, side),), tokens - side**2)


_OF_TRANSFORMERS = DenseLayer(
    "", TOPK, find=_square, min_tokens=MIN_TOKENS, by_plan=True, options={}
)


def _attend_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with transformers' interface: (B, N, T, D) -> (B, T, N, D), without weights."""
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    arguments: dict[str, Any] = {
        "attn_mask": attention_mask, "dropout_p": dropout, "scale": scaling,
        "is_causal": bool(causal) and attention_mask is None and query.shape[2] > 1,
        "enable_gqa": query.shape[1] != key.shape[1],
    }  # fmt: skip
    if any(isinstance(mode, Interception) for mode in _get_current_function_mode_stack()):
        out = F.scaled_dot_product_attention(query, key, value, **arguments)
    else:
        _OF_TRANSFORMERS.calls.clear()
        with Interception(_OF_TRANSFORMERS):
            out = F.scaled_dot_product_attention(query, key, value, **arguments)
    return out.transpose(1, 2).contiguous(), None
