# SPDX-License-Identifier: Apache-2.0
"""Models changed for inference: the same results, weights that change are seen, and back again."""

import copy
import os
from unittest.mock import patch

import pytest
import torch
from torch import nn

from quadtree_attention import OptionError, QuadtreeAttention, QuadtreeBlock
from quadtree_attention.nn import fuse_for_inference, unfuse
from quadtree_attention.nn.graphs import Graphs, graphed
from quadtree_attention.ops.launches import record
from tests.support import raises

OPTIONS = {
    "mean": {"num_levels": 2, "topk": 2},
    "conv": {"num_levels": 3, "topk": 2, "value_pyramid": "conv", "lepe": True, "qkv_bias": True},
}
X = (1, 5, 6, 16)


def block(options="conv"):
    torch.manual_seed(0)
    return QuadtreeBlock(16, 2, **OPTIONS[options]).eval()


def run(model, *inputs):
    with torch.inference_mode():
        return model(*inputs)


def products(model, *inputs):
    """Matrix products of a call without gradients."""
    with torch.profiler.profile() as events:
        run(model, *inputs)
    return sum(e.count for e in events.key_averages() if e.key == "aten::linear")


@pytest.mark.parametrize("options", OPTIONS)
def test_results_stay(options):
    model, x = block(options), torch.randn(X)
    before, count = run(model, x), products(model, x)
    assert fuse_for_inference(model) is model
    torch.testing.assert_close(run(model, x), before)
    assert products(model, x) == count - (1 if options == "conv" else 2)
    assert products(unfuse(model), x) == count
    torch.testing.assert_close(run(model, x), before)


def test_keys_and_values_of_a_context():
    attention = QuadtreeAttention(16, 2, num_levels=2, topk=2)
    x, context = torch.randn(2, *X).unbind()
    before, count = run(attention, x, context), products(attention, x, context)
    fuse_for_inference(attention)
    torch.testing.assert_close(run(attention, x, context), before)
    assert products(attention, x, context) == count - 1


def test_gradients_reach_every_layer():
    model, x = block(), torch.randn(X)
    model(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    fused = fuse_for_inference(block())
    fused(x).square().sum().backward()
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def in_place(model, state):
    model.load_state_dict(state)


def behind_autograd(model, state):
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def other_memory(model, state):
    model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)


def one_weight(model, state):
    in_place(model, state)
    model.attn.k_proj.weight.data = state["attn.k_proj.weight"].clone()


def other_dtype(model, state):
    in_place(model, state)
    model.double().float()


def a_copy(model, state):
    in_place(model, state)
    return copy.deepcopy(model)


@pytest.mark.parametrize(
    "change", [in_place, behind_autograd, other_memory, one_weight, other_dtype, a_copy]
)
def test_weights_that_change_are_seen(change):
    model, x = fuse_for_inference(block()), torch.randn(X)
    run(model, x)
    torch.manual_seed(1)
    other = QuadtreeBlock(16, 2, **OPTIONS["conv"]).eval()
    model = change(model, other.state_dict()) or model
    torch.testing.assert_close(run(model, x), run(other, x))
    assert products(model, x) == products(other, x) - 1  # merged again


def test_layers_with_hooks_and_other_layers_run():
    model, x, seen = fuse_for_inference(block()), torch.randn(X), []
    before = run(model, x)
    handle = model.attn.k_proj.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(run(model, x), before)
    assert seen == [1]
    handle.remove()
    model.attn.v_proj = nn.Sequential(model.attn.v_proj, nn.Identity())
    model.attn.v_proj[0].weight.data.mul_(2)
    assert not torch.allclose(run(model, x), before)


def test_weights_are_saved_under_their_names(tmp_path):
    from safetensors.torch import load_file, save_file

    model = fuse_for_inference(block())
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    loaded, expected = load_file(tmp_path / "w.safetensors"), block().state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_a_model_without_attention_is_refused():
    message = "got Linear; there is nothing to fuse"
    raises(OptionError, message, fuse_for_inference, nn.Linear(2, 2))


def test_a_fused_model_compiles():
    model, x = fuse_for_inference(block("mean")), torch.randn(X)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, x), run(model, x))


def check_kernels():
    model, x = fuse_for_inference(block()), torch.randn(X)
    with torch.inference_mode(), record() as launches:
        model(x)
    names = [launch.name for launch in launches]
    assert names.count("norm_linear_kernel") == 4
    assert names.count("depthwise_fwd_kernel") == 2  # all levels of LePE, and the MLP
    got = run(model, x)
    torch.testing.assert_close(got, run(unfuse(model), x), rtol=1e-4, atol=1e-5)


def test_kernels_in_the_interpreter(interpreter):
    interpreter(check_kernels)


def step(model, x):
    """Result and gradients of a training step, and its matrix products of linear layers."""
    inputs = [x, *(p for p in model.parameters() if p.requires_grad)]
    with torch.profiler.profile() as events:
        out = model(x)
        grads = torch.autograd.grad(out.square().sum(), inputs)
    return [out, *grads], sum(e.count for e in events.key_averages() if e.key == "aten::linear")


def check_training(options):
    """One product for queries, keys and values, but not of layers with hooks or frozen ones."""
    model, x, seen = block(options), torch.randn(X, requires_grad=True), []
    key = model.attn.k_proj
    expected, _ = step(model, x)
    with patch.dict(os.environ, QUADTREE_FUSED="1"):
        got, count = step(model, x)
        handle = key.register_full_backward_hook(lambda *_: seen.append(1))
        observed, by_one = step(model, x)
        handle.remove()
        key.weight.requires_grad_(False)
        assert step(model, x)[1] == by_one == count + 2
    assert seen == [1]
    for results in (got, observed):
        torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_training_in_the_interpreter(options, interpreter):
    interpreter(check_training, options)


# ---- graphs, with a stand-in for the capture ---------------------------------------------------


class Captured:
    """Captures by keeping the function; counts."""

    def __init__(self):
        self.captures = self.replays = 0

    def __call__(self, function):
        self.captures += 1
        out = function()

        def replay():
            self.replays += 1
            fresh = function()
            for kept, new in zip(out, fresh, strict=True):
                kept.copy_(new)
            return out

        return replay


def pair(x):
    return [x + 1, x * 2]


def test_a_shape_is_captured_when_it_comes_again():
    capture = Captured()
    graphs = Graphs(pair, nn.Identity(), capture)
    results = []
    for i in range(4):
        x = torch.full((2, 3), float(i))
        results.append(graphs(x))
        assert (capture.captures, capture.replays) == (min(i, 1), i)
    for i, (plus, times) in enumerate(results):  # later calls have not changed them
        assert plus.eq(i + 1).all()
        assert times.eq(i * 2).all()
    graphs(torch.zeros(3, 2))
    assert capture.captures == 1


def test_the_shape_used_least_recently_makes_room():
    capture = Captured()
    graphs = Graphs(pair, nn.Identity(), capture, most=2)
    for size in (1, 1, 2, 2, 1, 3, 3):
        graphs(torch.zeros(size))
    assert capture.captures == 3
    graphs(torch.zeros(1))  # dropped for 3? no: 2 was older
    assert capture.captures == 3
    graphs(torch.zeros(2))
    graphs(torch.zeros(2))
    assert capture.captures == 4


def test_graphs_are_dropped_with_the_weights_they_read():
    capture, layer = Captured(), nn.Linear(2, 2)
    graphs = Graphs(lambda x: [layer(x)], layer, capture)
    x = torch.zeros(1, 2)
    with torch.no_grad():
        for _ in range(3):
            graphs(x)
        layer.bias.zero_()  # in place: seen
        assert graphs(x)[0].eq(0).all()
        assert capture.captures == 1
        layer.bias.data = torch.ones(2)
        assert graphs(x)[0].eq(1).all()
        assert graphs(x)[0].eq(1).all()
        assert capture.captures == 2


def test_training_and_gradients_leave_the_graphs():
    capture = Captured()
    model = graphed(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), lambda f: capture(lambda: [f()]))
    x = torch.zeros(1, 2)
    for _ in range(3):
        model(x)
        run(model.train(), x)
        model.eval()
    assert capture.captures == 0
    for _ in range(3):
        run(model, x)
    assert capture.captures == 1
    unfuse(model)
    run(model, x)
    assert "forward" not in model.__dict__


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(graphs):
    model = block().cuda()
    inputs = [torch.randn(X, device="cuda") for _ in range(4)]
    expected = [run(model, x) for x in inputs]
    fuse_for_inference(model, graphs=graphs)
    for x, before in zip(inputs, expected, strict=True):
        torch.testing.assert_close(run(model, x), before, rtol=1e-4, atol=1e-5)
