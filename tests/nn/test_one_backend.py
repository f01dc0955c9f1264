# SPDX-License-Identifier: Apache-2.0
"""A module decides once which backend it runs by, and all parts of it obey."""

import pytest
import torch

from quadtree_attention import use_backend
from quadtree_attention.nn import QuadtreeAttention, QuadtreeBlock
from quadtree_attention.ops.launches import record
from quadtree_attention.ops.transport.functional import sinkhorn

OPTIONS = {"num_levels": 2, "topk": 2, "value_pyramid": "conv", "lepe": True}


def kernels_of(module, x, *, with_grad):
    """Names of the kernels that a call launches, those of its backward pass among them."""
    with record() as launches, torch.set_grad_enabled(with_grad):
        out = module(x)
        if with_grad:
            out.sum().backward()
    return {launch.name for launch in launches}


def check_module(kind, with_grad):
    x = torch.randn(1, 5, 6, 16)
    by_name = {
        name: kernels_of(kind(16, 2, **OPTIONS, backend=name), x, with_grad=with_grad)
        for name in ("auto", "triton", "reference", "cpu")
    }
    assert by_name["reference"] == by_name["cpu"] == set()
    assert "fine_fwd_kernel" in by_name["auto"]
    assert "norm_linear_kernel" in by_name["auto"] or "map_norm_fwd_kernel" in by_name["auto"]
    assert ("layer_norm_fwd_kernel" in by_name["auto"]) == (kind is QuadtreeBlock)
    assert by_name["auto"] == by_name["triton"]
    for name in ("reference", "cpu"):
        with use_backend(name):
            assert kernels_of(kind(16, 2, **OPTIONS), x, with_grad=with_grad) == set()


def check_what_the_backend_refuses():
    """float64 is the reference's, so values are not normed by kernels either."""
    attention = QuadtreeAttention(16, 2, **OPTIONS).double()
    x = torch.randn(1, 5, 6, 16, dtype=torch.float64)
    assert kernels_of(attention, x, with_grad=True) == set()


def check_transport():
    scores, dustbin = torch.randn(1, 3, 4), torch.zeros(())
    with record() as launches:
        sinkhorn(scores, dustbin, 2, backend="reference")
        sinkhorn(scores, dustbin, 2, backend="cpu")
    assert launches == []
    with record() as launches, use_backend("reference"):
        sinkhorn(scores, dustbin, 2, backend="triton")
    assert launches != []


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("kind", [QuadtreeAttention, QuadtreeBlock])
def test_a_backend_asked_for_is_that_of_all_parts(kind, with_grad, interpreter):
    interpreter(check_module, kind, with_grad)


def test_what_the_backend_refuses_runs_no_kernel(interpreter):
    interpreter(check_what_the_backend_refuses)


def test_transport(interpreter):
    interpreter(check_transport)
