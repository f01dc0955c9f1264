# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against the reference: in Triton's interpreter here, for real on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from quadtree_attention import BackendUnsupportedError, quadtree_attention
from quadtree_attention.ops.backends import TRITON
from quadtree_attention.ops.problem import make_problem
from tests.conftest import ROOT
from tests.ops.cases import CASES, Case, check, every_case

# Tiny: the interpreter runs one program after the other, in Python.
INTERPRETED = (
    Case("interpreted_b", 1, (4, 6), (4, 5), 1, 8, 8, 2, 2, "B", 0.0, 0.3),
    Case("interpreted_a", 1, (4, 6), (4, 5), 1, 8, 5, 2, 2, "A", 0.3, 0.3),
    Case("interpreted_row_b", 1, (7,), (9,), 2, 8, 8, 3, 3, "B"),
    Case("interpreted_row_a", 1, (7,), (9,), 2, 8, 8, 3, 3, "A"),
    Case("interpreted_volume_b", 1, (2, 3, 2), (3, 2, 2), 1, 8, 8, 2, 1, "B"),
    Case("interpreted_one_level_b", 1, (3, 4), (2, 5), 1, 8, 8, 1, 1, "B"),
)

INTERPRET = """
import sys, torch
from tests.ops import test_triton
torch.use_deterministic_algorithms(sys.argv[1] == "deterministic")
for case in test_triton.INTERPRETED:
    test_triton.check(case, "triton", torch.float32)
    print(case.name, flush=True)
"""


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
def test_in_the_interpreter(mode):
    pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET, mode],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [case.name for case in INTERPRETED]


def test_reasons_are_all_given():
    q, k, v = torch.randn(3, 1, 4, 6, 1, 300, dtype=torch.float64).unbind()
    problem = make_problem(q, k, v, num_levels=2, topk=500)
    reasons = TRITON.reasons(problem)
    assert "it needs a CUDA device, the tensors are on cpu" in reasons
    assert "it computes in float32 at most, the tensors are float64" in reasons
    assert "head dims go up to 256, got 300 and 300" in reasons
    with pytest.raises(BackendUnsupportedError, match="backend 'triton' cannot run this problem"):
        quadtree_attention(q, k, v, num_levels=2, topk=500, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_case
def test_on_a_gpu(case, dtype):
    check(case, "triton", dtype, "cuda")


@pytest.mark.gpu
def test_deterministic_backward_is_bitwise_equal():
    case = next(case for case in CASES if case.name == "four_levels_b")
    q = torch.randn(2, *case.grid, 2, 16, device="cuda", requires_grad=True)

    def gradient():
        out = quadtree_attention(q, q, q, num_levels=4, topk=3, backend="triton")
        return torch.autograd.grad(out.square().sum(), q)[0]

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(gradient(), gradient())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_runs_in_a_cuda_graph():
    q, k, v = torch.randn(3, 1, 20, 28, 2, 32, device="cuda", dtype=torch.bfloat16).unbind()

    def run():
        return quadtree_attention(q, k, v, num_levels=3, topk=4, backend="triton")

    expected = run()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
