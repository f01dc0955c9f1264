# SPDX-License-Identifier: Apache-2.0
"""Layers of equal structure as functions of an ONNX model."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("timm", reason="networks need the extra 'models'")
pytest.importorskip("onnxruntime", reason="needs the extra 'export'")

import onnx
import onnxruntime

from quadtree_attention.export import to_onnx
from quadtree_attention.export.layers import (
    Body,
    Operator,
    SharedLayers,
    as_function,
    is_shareable,
    name_sizes,
    structure_of,
)
from quadtree_attention.export.networks import Exportable
from quadtree_attention.export.onnx import OPSET
from quadtree_attention.models.parts.row_attention import RowBlock
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.nn.block import Block, ContextBlock, ConvMlp, QuadtreeBlock

ROWS = {"num_levels": 2, "topk": 2}


def block(kind=Block, **options):
    attention = {"num_heads": 2, "num_levels": 2, "topk": 2, **options}
    return kind(8, QuadtreeAttention(8, **attention), ConvMlp(8, 16)).eval()


def traced(network, *inputs):
    """The layers that are operators, and the graph of the network."""
    layers = SharedLayers(network)
    with layers.replaced():
        program = torch.export.export(network, inputs)
    return layers, program


def operators_in(program):
    symbolic = torch.ops.onnx_symbolic._symbolic.default
    return [node for node in program.graph.nodes if node.target is symbolic]


def test_equal_layers_are_one_operator():
    network = nn.Sequential(block(), block(), block(topk=3), block(qkv_bias=True), block())
    layers, program = traced(network, torch.randn(1, 8, 10, 8))
    assert len(operators_in(program)) == 5
    assert [operator.layer for operator in layers.operators] == [*network[:1], *network[2:4]]
    assert not any("forward" in vars(part) for part in network.modules())


def test_self_and_cross_attention_are_one_operator():
    """The blocks are two, of which the parts are traced with the attention as an operator."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(block(ContextBlock) for _ in range(2))

        def forward(self, x, y):
            return self.layers[1](self.layers[0](x), self.layers[0](y))

    network = Network().eval()
    layers, program = traced(network, torch.randn(2, 8, 10, 8), torch.randn(2, 8, 10, 8))
    assert len(operators_in(program)) == 3 and len(layers.operators) == 2
    for operator in list(layers.operators):
        inputs, dynamic = operator.example()
        with layers.replaced(body=operator.layer):
            body = torch.export.export(Body(operator.layer), inputs, dynamic_shapes=(dynamic,))
        assert len(operators_in(body)) == 1
    assert [type(x.layer) for x in layers.operators] == [*[ContextBlock] * 2, QuadtreeAttention]


def test_sizes_that_are_fixed_are_part_of_an_operator():
    network = nn.Sequential(nn.GroupNorm(2, 4), nn.AvgPool2d(2), nn.GroupNorm(2, 4))
    layers, _ = traced(network, torch.randn(1, 4, 6, 8))
    assert [x.shapes for x in layers.operators] == [((1, 4, 6, 8),), ((1, 4, 3, 4),)]


def test_masks_are_not_left_out():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block()

        def forward(self, x, mask):
            return self.block(x, mask=mask)

    inputs = torch.randn(1, 8, 10, 8), torch.rand(1, 8, 10) < 0.5
    network = Network().eval()
    layers, program = traced(network, *inputs)
    assert layers.operators == []
    mask = inputs[1]  # a hidden query has equal scores, which PyTorch's topk takes in any order
    torch.testing.assert_close(program.module()(*inputs)[mask], network(*inputs)[mask])


def test_a_network_is_restored_after_an_error():
    network = nn.Sequential(block(), block())
    layers = SharedLayers(network)
    with pytest.raises(AttributeError), layers.replaced():
        network[0].missing  # noqa: B018
    assert not any("forward" in vars(part) for part in network.modules())


def changed(part, change):
    other = copy.deepcopy(part)
    change(other)
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(x.attn, "topk", (1,)),
        lambda x: setattr(x, "mlp", nn.Identity()),
        lambda x: setattr(x.attn.q_proj, "bias", nn.Parameter(torch.zeros(8))),
        lambda x: x.mlp.double(),
        lambda x: setattr(x.drop_path, "training", True) or setattr(x.drop_path, "rate", 0.5),
    ],
)
def test_other_structures(change):
    first = block()
    assert structure_of(first) == structure_of(copy.deepcopy(first)) is not None
    assert structure_of(changed(first, change)) not in (structure_of(first), None)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.attn.proj.register_forward_hook(lambda *_: None),
        lambda x: x.mlp.register_forward_pre_hook(lambda *_: None),
        lambda x: x.register_buffer("seen", torch.zeros(1)),
        lambda x: setattr(x.attn, "table", torch.zeros(2)),
        lambda x: setattr(x.attn, "attend", lambda *_: None),
    ],
)
def test_structures_that_cannot_be_compared(change):
    assert structure_of(changed(block(), change)) is None


def test_what_takes_little_time_is_traced_as_it_is():
    assert is_shareable(QuadtreeBlock(8, 2)) and is_shareable(nn.GroupNorm(2, 4))
    assert not is_shareable(block(lambda dim, _, mlp: Block(dim, nn.Identity(), mlp)))
    assert is_shareable(RowBlock(8, 1, 0, ROWS | {"attention": "quadtree_a"}))
    assert not is_shareable(RowBlock(8, 1, 0, {"attention": "full"}))


def test_a_function_with_constants_and_unused_weights():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.weight + torch.tensor([2.0, 3.0])

    layer = Layer()
    operator = Operator("layer0", layer, ((None, 2),), torch.float32)
    inputs, dynamic = operator.example()
    program = torch.onnx.export(
        torch.export.export(Body(layer), inputs, dynamic_shapes=(dynamic,)),
        dynamo=True, optimize=False, verbose=False, opset_version=OPSET,
    )  # fmt: skip
    function = as_function(operator, program.model)
    assert [x.name for x in function.inputs[1:]] == ["layer.unused", "layer.weight"]
    assert "Constant" in [node.op_type for node in function]


class Norms(nn.Module):
    """One norm at two sizes, and an equal one."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(2))
        for weight in self.parameters():
            nn.init.normal_(weight)

    def forward(self, x):
        first, second = self.norms
        small = first(x[:, :, ::2, 1:])
        return first(x), small, second(small) * small.shape[2]


class ExportableNorms(Exportable):
    task = "norms"
    channels = 4
    outputs = {"a": "of the map", "b": "of half of it", "c": "of that"}  # noqa: RUF012

    def forward(self, image):
        return self.network(image)


def test_one_function_at_several_sizes(tmp_path, monkeypatch):
    """Values, and names of sizes, which an ONNX runtime may take for equal sizes."""
    torch.manual_seed(0)
    network = Norms().eval()
    wrapped = ExportableNorms(network).eval()
    monkeypatch.setattr("quadtree_attention.export.onnx.exportable", lambda *_: wrapped)
    functions = []

    def seen(model):
        name_sizes(model)
        functions.extend(model.functions.values())

    monkeypatch.setattr("quadtree_attention.export.onnx.name_sizes", seen)
    path = tmp_path / "norms.onnx"
    to_onnx(network, path)
    graph = onnx.load(path).graph
    assert [node.op_type for node in graph.node].count("InstanceNormalization") == 3
    sizes = [tuple(map(str, function.inputs[0].shape)) for function in functions]
    assert len(set(sizes)) == len(sizes) == 2
    session = onnxruntime.InferenceSession(path)
    for size in ((2, 4, 9, 14), (1, 4, 33, 8)):
        image = torch.randn(size)
        found = session.run(None, {"image": image.numpy()})
        known = {}
        for result, wanted, output in zip(found, wrapped(image), graph.output, strict=True):
            np.testing.assert_allclose(result, wanted.detach().numpy(), atol=1e-4)
            for dim, number in zip(output.type.tensor_type.shape.dim, result.shape, strict=True):
                assert known.setdefault(dim.dim_param or dim.dim_value, number) == number
        assert len(known) == 6  # batch, channels, and two sides of two maps


def test_a_file_has_no_paths_of_the_machine(tmp_path, monkeypatch):
    network = Norms().eval()
    wrapped = ExportableNorms(network).eval()
    monkeypatch.setattr("quadtree_attention.export.onnx.exportable", lambda *_: wrapped)
    to_onnx(network, tmp_path / "norms.onnx", fixed=(64, 64))
    assert b".py" not in (tmp_path / "norms.onnx").read_bytes()
