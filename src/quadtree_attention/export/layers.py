# SPDX-License-Identifier: Apache-2.0
"""Layers of equal structure are traced once per export.

Tracing an attention takes seconds, and a network has many of the same structure. While a network is
traced, each of these layers is one operator, with maps and weights as its inputs. Every structure
is traced by itself afterwards, and becomes a function of the ONNX model that is inlined.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quadtree_attention.models.parts.match_transformer import LoftrBlock
from quadtree_attention.models.parts.row_attention import RowAttention, RowBlock
from quadtree_attention.nn.attention import QuadtreeAttention
from quadtree_attention.nn.block import Block, ContextBlock

DOMAIN = "quadtree_attention"
# Layers of which the result has the shape of the first input, and the number of leading axes that a
# second input has in common with it
COMMON_AXES: dict[type[nn.Module], int] = {
    Block: 1,
    LoftrBlock: 1,
    QuadtreeAttention: 1,
    RowBlock: 0,
    RowAttention: 2,
    nn.GroupNorm: 0,
}
# Sizes of two inputs of an example. The batch of a `RowBlock` is even, and the sides of all levels
# differ: equal ones would become conditions on sizes that the file does not check
EXAMPLES = ((4, 160, 224, 352), (4, 192, 288, 416))
COMPARABLE = (bool, int, float, str, type, type(None))  # attributes that decide if layers are equal

Structure = tuple[Any, ...]


@dataclass(frozen=True)
class Operator:
    """Layers of one structure, called with inputs of the same fixed sizes.

    Attributes:
        name: Name of the function.
        layer: One of the layers.
        shapes: Shapes of the inputs; None for sizes that vary.
        dtype: Of inputs and result.
    """

    name: str
    layer: nn.Module
    shapes: tuple[tuple[int | None, ...], ...]
    dtype: torch.dtype

    def example(self) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
        """Returns inputs of the layer and their axes that vary."""
        inputs, dynamic = [], []
        common = _common_axes(self.layer)
        for shape, own in zip(self.shapes, EXAMPLES, strict=False):
            sizes = (*EXAMPLES[0][:common], *own[common:])
            known = [sizes[i] if size is None else size for i, size in enumerate(shape)]
            inputs.append(torch.zeros(known, dtype=self.dtype))
            axes = [i for i, size in enumerate(shape) if size is None]
            dynamic.append(dict.fromkeys(axes, torch.export.Dim.DYNAMIC))
        return tuple(inputs), tuple(dynamic)


class Body(nn.Module):
    """A layer as a function of one or two maps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *maps: Tensor) -> Any:
        for other in maps[1:]:
            for axis in range(_common_axes(self.layer)):
                torch._check(other.shape[axis] == maps[0].shape[axis])
        return self.layer(*maps)


class SharedLayers:
    """Layers of a network that are operators while it is traced.

    Args:
        network: The network.

    Attributes:
        operators: Operators that all traces so far contain.
    """

    def __init__(self, network: nn.Module) -> None:
        self.operators: list[Operator] = []
        self._by_key: dict[Structure, Operator] = {}
        self._body: nn.Module | None = None
        inner = {  # of blocks that are called in one way only, so that their parts are traced once
            part
            for block in network.modules()
            if isinstance(block, Block) and not isinstance(block, ContextBlock)
            for part in list(block.modules())[1:]
        }
        layers = [x for x in network.modules() if is_shareable(x) and x not in inner]
        structures = ((layer, structure_of(layer)) for layer in layers)
        self._structures = {layer: found for layer, found in structures if found is not None}

    @contextmanager
    def replaced(self, body: nn.Module | None = None) -> Iterator[None]:
        """Replaces layers by operators while the network, or the `body` of a layer, is traced."""
        self._body = body
        try:
            for layer, structure in self._structures.items():
                vars(layer)["forward"] = self._forward(layer, structure)
            yield
        finally:
            for layer in self._structures:
                vars(layer).pop("forward", None)

    def _forward(self, layer: nn.Module, structure: Structure) -> Callable[..., Tensor]:
        def forward(*maps: Tensor | None, **masks: Tensor | None) -> Any:
            if layer is self._body or any(mask is not None for mask in masks.values()):
                return type(layer).forward(layer, *maps, **masks)
            given = [x for x in maps if x is not None]
            if len(given) == 1 and _attends_to_itself(layer):
                given *= 2  # one function for self and cross attention
            operator = self._operator(layer, structure, given)
            return torch.onnx.ops.symbolic(
                f"{DOMAIN}::{operator.name}",
                [*given, *layer.parameters()],
                dtype=operator.dtype,
                shape=given[0].shape,
                version=1,
            )

        return forward

    def _operator(self, layer: nn.Module, structure: Structure, maps: list[Tensor]) -> Operator:
        shapes = tuple(
            tuple(size if isinstance(size, int) else None for size in x.shape) for x in maps
        )
        key = (structure, shapes, maps[0].dtype)
        if key not in self._by_key:
            name = f"layer{len(self.operators)}"
            self._by_key[key] = Operator(name, layer, shapes, maps[0].dtype)
            self.operators.append(self._by_key[key])
        return self._by_key[key]


def structure_of(module: nn.Module) -> Structure | None:
    """Returns what is equal in two modules that differ in nothing but the values of their weights.

    Returns None for a module with hooks, buffers, or attributes that cannot be compared.
    """
    own, usual = vars(module), vars(nn.Module())
    attributes = {name: value for name, value in own.items() if name not in usual}
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    if has_hooks or list(module.buffers(recurse=False)):
        return None
    if not all(map(_is_comparable, attributes.values())):
        return None
    weights = [(name, x.shape, x.dtype) for name, x in module.named_parameters(recurse=False)]
    parts = [(name, structure_of(part)) for name, part in module.named_children()]
    if any(structure is None for _, structure in parts):
        return None
    return type(module), repr(sorted(attributes.items())), tuple(weights), tuple(parts)


def is_shareable(layer: nn.Module) -> bool:
    """Whether a layer can be an operator and contains a part that takes long to trace."""
    return isinstance(layer, tuple(COMMON_AXES)) and any(
        isinstance(part, QuadtreeAttention | nn.GroupNorm)
        or (isinstance(part, RowAttention) and part.attention != "full")
        for part in layer.modules()
    )


def _is_comparable(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_comparable, value))
    return isinstance(value, COMPARABLE)


def _common_axes(layer: nn.Module) -> int:
    return next((n for kind, n in COMMON_AXES.items() if isinstance(layer, kind)), 0)


def _attends_to_itself(layer: nn.Module) -> bool:
    """Whether the layer with one input does what it does with this input twice."""
    is_attention = isinstance(layer, QuadtreeAttention | RowAttention)
    return is_attention and not getattr(layer, "lepe", ())


# ---- ONNX


def as_function(operator: Operator, model: Any) -> Any:
    """Returns the ONNX function of an operator from the exported model of its `Body`."""
    import onnx_ir

    graph = model.graph
    for name, parameter in operator.layer.named_parameters():
        weight = graph.initializers.pop(f"layer.{name}", None)
        if weight is None:  # not used
            shape = onnx_ir.Shape(parameter.shape)
            weight = onnx_ir.Value(name=f"layer.{name}", shape=shape)
        weight.const_value = None
        graph.inputs.append(weight)
    for name, value in list(graph.initializers.items()):  # a function cannot have any
        node = onnx_ir.node("Constant", [], attributes={"value": value.const_value})
        graph.insert_before(graph[0], node)
        value.replace_all_uses_with(node.outputs[0])
        del graph.initializers[name]
    return onnx_ir.Function(DOMAIN, operator.name, graph=graph, attributes=())


def name_sizes(model: Any) -> None:
    """Gives sizes in functions the names that they have in the network.

    Calls with inputs of other sizes get a function of their own. Without the names, ONNX Runtime
    loads a file in several times the duration.
    """
    made: dict[Any, Any] = {}
    _name_calls(model.graph, dict(model.functions), made)
    model.functions.clear()
    model.functions.update({function.identifier(): function for function in made.values()})


def _name_calls(nodes: Any, functions: Any, made: dict[Any, Any]) -> None:
    for node in nodes:
        if node.domain != DOMAIN:
            continue
        function = functions[node.domain, node.op_type, ""]
        names = {
            str(inner): str(outer)
            for own, given in zip(function.inputs, node.inputs, strict=True)
            for inner, outer in zip(own.shape, given.shape, strict=True)
            if not isinstance(inner, int)
        }
        key = (function.name, *names.items())
        if key not in made:
            made[key] = copy = function.clone()
            copy.overload = str(len(made))
            _rename(copy, names)
            _name_calls(copy, functions, made)
        node.overload = made[key].overload


def _rename(function: Any, names: dict[str, str]) -> None:
    """Replaces names in the sizes of all values of a function."""
    import onnx_ir

    def in_brackets(word: re.Match[str]) -> str:
        return f"({names[word[0]]})" if word[0] in names else word[0]

    def renamed(size: Any) -> Any:
        if isinstance(size, int) or size.value is None:
            return size
        if size.value in names:
            return names[size.value]
        return re.sub(r"\w+", in_brackets, size.value)

    for value in (*function.inputs, *(x for node in function for x in node.outputs)):
        if value.shape is not None:
            value.shape = onnx_ir.Shape([renamed(size) for size in value.shape])


def merge_sizes(model: Any) -> None:
    """Derives sizes of the same name from one value, instead of from another one in every layer."""
    first: dict[tuple[str, ...], Any] = {}
    for node in model.graph:
        if node.op_type != "Shape" or node.inputs[0].shape is None:
            continue
        ends = {name: attribute.as_int() for name, attribute in node.attributes.items()}
        sizes = list(node.inputs[0].shape)[ends.get("start", 0) : ends.get("end")]
        if all(isinstance(size, int) or size.value is not None for size in sizes):
            kept = first.setdefault(tuple(map(str, sizes)), node.outputs[0])
            if kept is not node.outputs[0]:
                node.outputs[0].replace_all_uses_with(kept)
