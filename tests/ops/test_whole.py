# SPDX-License-Identifier: Apache-2.0
"""All of an attention in one operator against the same step by step, and when it is taken."""

import pytest
import torch
from torch import nn

import quadtree_attention.nn.attention as attention_module
from quadtree_attention import use_backend
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.nn.value_pyramid import NormActLinear

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")

from quadtree_attention.ops import replay, whole
from quadtree_attention.ops.attention.triton import project
from quadtree_attention.ops.values import kernels as values

# batch, grid, channels, heads, levels, activation
CASES = (
    (2, (5, 6), 16, 2, 3, "relu"),
    (1, (4, 4), 80, 1, 2, "gelu"),
    (1, (9, 7), 24, 3, 4, "gelu"),
    (1, (1, 1), 8, 1, 2, "relu"),
    (2, (3, 5), 16, 2, 1, "gelu"),  # a single level: no pyramid
)
LARGE_CASES = (
    *CASES,
    (1, (200, 334), 32, 1, 4, "relu"),
    (2, (100, 167), 64, 2, 3, "relu"),
    (8, (14, 14), 320, 5, 2, "gelu"),
    (1, (25, 42), 256, 8, 2, "relu"),
)


def module(channels, heads, levels, activation, device, **options):
    torch.manual_seed(0)
    options = {"topk": 3, "value_pyramid": "conv", "value_act": activation, "lepe": True} | options
    options.setdefault("qkv_bias", heads != 2)
    built = QuadtreeAttention(channels, heads, num_levels=levels, **options)
    for parameter in built.parameters():
        if parameter.ndim == 1:  # norms that do something
            nn.init.normal_(parameter, mean=0.5)
    return built.to(device).requires_grad_(False)


def truth(built, *maps):
    with use_backend("reference"):
        exact = built.double()(*(x.double() for x in maps))
    built.float()
    return exact


class Taken:
    """Counts how often the operator is taken."""

    def __enter__(self):
        self.count, self.before = 0, attention_module.attend_whole
        attention_module.attend_whole = self.attend
        return self

    def attend(self, *arguments):
        self.count += 1
        return self.before(*arguments)

    def __exit__(self, *error):
        attention_module.attend_whole = self.before


def check(batch, grid, channels, heads, levels, activation, device, *, lepe=True):
    built = module(channels, heads, levels, activation, device, lepe=lepe)
    replay._plans.clear()
    for seed in range(3):  # the second call is noted, the third repeats it
        rng = torch.Generator().manual_seed(seed)
        x = (torch.randn(batch, *grid, channels, generator=rng) + seed).to(device)
        with Taken() as taken:
            got = built(x)
        assert taken.count == 1
        torch.testing.assert_close(got.double(), truth(built, x), rtol=1e-4, atol=1e-4)
    assert all(isinstance(plan, replay.Plan) for plan in replay._plans.values())


def check_without_positions(device):
    check(*CASES[1], device, lepe=False)


def check_context(device):
    """Attention to another map, of another size."""
    built = module(8, 1, 2, "relu", device, lepe=False)
    x, context = torch.randn(1, 3, 4, 8, device=device), torch.randn(1, 5, 3, 8, device=device)
    expected = truth(built, x, context)
    with Taken() as taken, torch.inference_mode():
        got = built(x, context)
    assert taken.count == 1
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(built, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, context), got.clone())


def check_strides(device):
    built = module(8, 1, 2, "relu", device)
    x = torch.randn(1, 3, 4, 8, device=device)
    expected = built(x)
    for parameter in built.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.transpose(0, -1).contiguous().transpose(0, -1)
    with Taken() as taken:
        torch.testing.assert_close(built(x), expected)
    assert taken.count == 1


def check_many_tiles(device):
    """Too many for each to give its moments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "MOST_TILES", 0)
        check(*CASES[0], device)


def check_large_layers(device):
    """Too large for kernels of our own, and never repeated: of x, or of its context alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(project, "MOST_PRODUCTS", 3 * 4 * 8 * 8)
        for grid, *other in (((5, 6),), ((3, 4), (5, 6))):
            built = module(8, 1, 2, "relu", device, lepe=False)
            replay._plans.clear()
            for seed in range(3):
                torch.manual_seed(seed)
                maps = [torch.randn(1, *size, 8, device=device) for size in (grid, *other)]
                with Taken() as taken:
                    got = built(*maps)
                assert taken.count == 1
                torch.testing.assert_close(got.double(), truth(built, *maps), rtol=1e-4, atol=1e-4)
            assert list(replay._plans.values()) == [None]


def check_far_from_zero(device):
    """Means a thousand times as large as deviations, in maps of several tiles."""
    built = module(8, 1, 3, "relu", device)
    for branch in built.value_branches:
        branch.reduce.bias += 1000
    x = torch.randn(2, 11, 8, 8, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "ROWS", 16)
        torch.testing.assert_close(built(x).double(), truth(built, x), rtol=1e-5, atol=2e-4)


def check_dtypes(device):
    """Layers that do not fit a map are refused as ever; autocast makes them fit, save float64."""
    built, x = module(8, 1, 2, "relu", device), torch.randn(1, 3, 4, 8, device=device)
    expected = truth(built, x)
    with Taken() as taken, torch.autocast(device, dtype=torch.float16):
        got = built.double()(x.double())
    assert taken.count == 0 and got.dtype == torch.float64
    torch.testing.assert_close(got, expected)
    built.float().k_proj.half()
    with taken, pytest.raises(RuntimeError, match="dtype"):
        built(x)
    assert taken.count == 0
    with taken, torch.autocast(device, dtype=torch.float16):
        got = built(x)
    assert taken.count == 1 and got.dtype == torch.float16
    torch.testing.assert_close(got.double(), expected, rtol=0.01, atol=0.01)


def check_what_does_not_fit(device):
    """It is left to torch to say so: kernels would read from anywhere."""
    x = torch.randn(1, 3, 4, 8, device=device)
    with Taken() as taken:
        built = module(8, 1, 2, "relu", device)
        built.lepe[0].bias = nn.Parameter(torch.randn(1, device=device), requires_grad=False)
        with pytest.raises(RuntimeError, match="bias"):
            built(x)
        built = module(8, 1, 2, "relu", device)
        built.value_branches[0] = module(6, 1, 2, "relu", device).value_branches[0]
        with pytest.raises(RuntimeError, match="size"):
            built(x)
        built = module(8, 1, 2, "relu", device)
        built.v_proj.to("meta")
        with pytest.raises(RuntimeError, match="meta"):
            built(x)
    assert taken.count == 0


def check_operator(device):
    """What torch wants of one, for shapes that are not known yet, too."""
    with torch.no_grad():
        built, x = module(8, 1, 2, "relu", device), torch.randn(1, 3, 4, 8, device=device)
        arguments = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(whole, "_run", lambda *given: arguments.extend(given) or given[0])
            built(x)
        torch.library.opcheck(torch.ops.quadtree_attention.whole, tuple(arguments))
        compiled = torch.compile(built, fullgraph=True, backend="aot_eager", dynamic=True)
        for grid in ((3, 4), (2, 5), (7, 3)):
            x = torch.randn(1, *grid, 8, device=device)
            torch.testing.assert_close(compiled(x), built(x))


def check_compiled(device):
    built = module(8, 1, 2, "relu", device)
    x = torch.randn(1, 3, 4, 8, device=device)
    compiled = torch.compile(built, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), built(x))
    called = []

    def note_calls(graph, inputs):
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(built, fullgraph=True, backend=note_calls)(x)
    assert torch.ops.quadtree_attention.whole.default in called
    assert nn.functional.linear not in called and torch._C._nn.linear not in called
    with torch.profiler.profile() as events:
        profiled = built(x)
    torch.testing.assert_close(profiled, built(x))
    assert "quadtree_attention::whole" in {event.key for event in events.key_averages()}


def check_fallbacks(device):
    """Every one gives the same numbers, step by step."""
    x = torch.randn(1, 3, 4, 8, device=device)
    for change in CHANGES:
        built = module(8, 1, 3, "relu", device)
        arguments = change(built, x) or {}
        built.to(device).requires_grad_(change is with_gradients)
        with Taken() as taken:
            got = built(x, **arguments)
        assert taken.count == 0, change
        with use_backend("reference"):
            exact = {k: y.double() if y.is_floating_point() else y for k, y in arguments.items()}
            expected = built.double()(x.double(), **exact)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def with_mask(built, x):
    return {"mask": torch.arange(4, device=x.device).expand(1, 3, 4) > 1}


def with_gradients(built, x):
    """All parameters get them."""


def with_a_hook_on_keys(built, x):
    built.k_proj.register_forward_hook(lambda layer, inputs, out: out + 1)


def with_a_bias_for_queries_alone(built, x):
    built.q_proj = nn.Linear(8, 8)
    built.k_proj = nn.Linear(8, 8, bias=False)


def with_no_last_bias(built, x):
    built.proj = nn.Linear(8, 8, bias=False)


def with_a_narrow_last_layer(built, x):
    built.proj = nn.Linear(8, 6)


def with_a_bias_to_spread(built, x):
    built.proj.bias = nn.Parameter(torch.randn(1))


def with_a_function_for_a_layer(built, x):
    layer = built.q_proj
    del built.q_proj
    built.q_proj = lambda x: layer.to(x)(x)


def with_a_branch_of_another_kind(built, x):
    class Pooled(nn.Module):
        def forward(self, x, parents, *masks):
            x = nn.functional.adaptive_avg_pool2d(x.movedim(-1, 1), parents)
            return x.movedim(1, -1)

    built.value_branches[0] = Pooled()


def with_a_hook(built, x):
    built.value_branches[1].mix.register_forward_hook(lambda layer, inputs, out: out + 1)


def with_a_hook_on_positions(built, x):
    built.lepe[0].register_forward_hook(lambda layer, inputs, out: out + 1)


def with_another_layer(built, x):
    class Shifted(NormActLinear):
        def forward(self, *arguments):
            return super().forward(*arguments) + 1

    shifted = Shifted(8, 4, "relu").to(x.device)
    shifted.load_state_dict(built.value_branches[0].reduce.state_dict())
    built.value_branches[0].reduce = shifted


def with_another_activation(built, x):
    built.value_branches[0].mix.activation = "gelu"


def with_another_epsilon(built, x):
    built.value_branches[0].reduce.eps = 0.5


def with_a_mask_and_a_context(built, x):
    built.lepe = nn.ModuleList()
    return {"context": x[:, 1:].clone()} | with_mask(built, x)


def with_a_bias_to_spread_in_a_branch(built, x):
    built.value_branches[0].mix.bias = nn.Parameter(torch.randn(1))


CHANGES = (
    with_mask,
    with_a_mask_and_a_context,
    with_gradients,
    with_a_hook_on_keys,
    with_a_bias_for_queries_alone,
    with_no_last_bias,
    with_a_narrow_last_layer,
    with_a_bias_to_spread,
    with_a_function_for_a_layer,
    with_a_branch_of_another_kind,
    with_a_hook,
    with_a_hook_on_positions,
    with_another_layer,
    with_another_activation,
    with_another_epsilon,
    with_a_bias_to_spread_in_a_branch,
)


CHECKS = (
    check_compiled,
    check_operator,
    check_context,
    check_strides,
    check_many_tiles,
    check_large_layers,
    check_far_from_zero,
    check_dtypes,
    check_what_does_not_fit,
    check_fallbacks,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_the_interpreter(case, interpreter):
    interpreter(check, *case, "cpu")


def test_without_positions_in_the_interpreter(interpreter):
    interpreter(check_without_positions, "cpu")


@pytest.mark.parametrize("check", CHECKS)
def test_checks_in_the_interpreter(check, interpreter):
    interpreter(check, "cpu")


def test_somebody_who_watches_all_layers():
    seen, built = [], module(16, 2, 3, "relu", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "can_attend_whole", lambda *arguments: True)
        handle = nn.modules.module.register_module_forward_hook(
            lambda layer, inputs, out: seen.append(type(layer))
        )
        try:
            built(torch.randn(1, 4, 4, 16))
        finally:
            handle.remove()
    assert NormActLinear in seen


def test_a_cpu_does_without():
    built = module(16, 2, 3, "relu", "cpu")
    with Taken() as taken:
        built(torch.randn(1, 4, 4, 16))
    assert taken.count == 0


@pytest.mark.gpu
@pytest.mark.parametrize("lepe", [True, False])
@pytest.mark.parametrize("case", LARGE_CASES)
def test_on_a_gpu(case, lepe):
    check(*case, "cuda", lepe=lepe)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_when_it_is_taken_on_a_gpu(check):
    check("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, autocast, monkeypatch):
    """At most twice as far from the truth as step by step."""
    built = module(64, 2, 3, "relu", "cuda")
    x = torch.randn(2, 50, 84, 64, device="cuda")
    expected, errors = truth(built, x), []
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(attention_module, "can_attend_whole", lambda *given: False)
        with Taken() as taken, torch.autocast("cuda", dtype=dtype, enabled=autocast):
            out = built(x) if autocast else built.to(dtype)(x.to(dtype))
        assert (taken.count, out.dtype) == (at_once, dtype)
        errors.append((out.double() - expected).norm() / expected.norm())
    assert errors[0] < 2 * errors[1]
