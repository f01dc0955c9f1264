# SPDX-License-Identifier: Apache-2.0
"""`torch.compile(fullgraph=True)` gives the same numbers."""

from functools import partial

import pytest
import torch

from quadtree_attention import QuadtreeAttention, quadtree_attention, use_backend
from tests.support.commands import python


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("variant", "backend", "compiler"),
    [("A", "reference", "aot_eager"), ("B", "reference", "inductor"),
     ("A", "cpu", "aot_eager"), ("B", "cpu", "aot_eager")],
)  # fmt: skip
def test_op(variant, backend, compiler):
    if backend == "cpu":
        pytest.importorskip("numba", reason="the cpu backend needs numba")
    leaves = [torch.randn(1, 6, 10, 2, 8, requires_grad=True) for _ in range(3)]
    options = {"num_levels": 2, "topk": 2, "variant": variant, "backend": backend}
    run = partial(quadtree_attention, **options, key_mask=torch.rand(1, 6, 10) > 0.3)
    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend=compiler)):
        out = call(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results)


def test_module():
    module = QuadtreeAttention(16, 2, num_levels=3, topk=2, value_pyramid="conv", lepe=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 6, 9, 16)
    torch.testing.assert_close(compiled(x), module(x))
    with use_backend("reference"):
        torch.testing.assert_close(compiled(x), module(x))


FIRST = """
import torch
from quadtree_attention import quadtree_attention

q, k, v = torch.randn(3, 1, 12, 20, 2, 8)
call = torch.compile(quadtree_attention, fullgraph=True, backend="aot_eager")
found = call(q, k, v, num_levels=2, topk=4)
torch.testing.assert_close(found, quadtree_attention(q, k, v, num_levels=2, topk=4))
"""


def test_first_call_of_a_process():
    """Nothing has to run eagerly before the compiler traces the package."""
    python(FIRST)


def test_changing_sizes():
    run = partial(quadtree_attention, num_levels=3, topk=2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for grid in ((6, 9), (8, 12), (13, 5)):
        maps = torch.randn(3, 1, *grid, 2, 4).unbind()
        torch.testing.assert_close(compiled(*maps), run(*maps))


@pytest.mark.gpu
@pytest.mark.parametrize("train", [False, True])
def test_with_cuda_graphs(train):
    """The mode that takes the time of launching kernels away."""
    options = {"num_levels": 3, "topk": 4, "value_pyramid": "conv", "lepe": True}
    module = QuadtreeAttention(32, 2, **options, device="cuda")
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for seed in range(4):  # it records the second call, and replays later ones
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(1, 24, 36, 32, generator=torch.Generator().manual_seed(seed)).cuda()
        with torch.set_grad_enabled(train):
            got, expected = compiled(x), module(x)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        if not train:
            continue
        parameters = list(module.parameters())
        for a, b in zip(
            torch.autograd.grad(got.square().sum(), parameters),
            torch.autograd.grad(expected.square().sum(), parameters),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3 * b.abs().max().item())
