# SPDX-License-Identifier: Apache-2.0
"""The fused `NormActLinear` against its plain form, in Triton's interpreter here and on a GPU."""

import os
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")

from quadtree_attention.errors import BackendUnsupportedError
from quadtree_attention.nn.value_pyramid import NormActLinear
from quadtree_attention.ops.launches import record
from tests.interpreter import kernels
from tests.ops.cases import compare, draw

# batch, grid, channels, activation
CASES = (
    (2, (5, 6), 16, "gelu"),
    (1, (4, 4), 80, "relu"),
    (3, (1, 1), 5, "gelu"),
    (1, (17, 9), 24, "relu"),
)
LARGE_CASES = (
    *CASES,
    (1, (200, 335), 32, "gelu"),
    (8, (14, 14), 320, "relu"),
    (1, (3, 5), 1000, "gelu"),
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(case, children, dtype, device):
    """Parameters in float32, as under autocast; maps far from zero."""
    batch, grid, channels, activation = case
    parents = [(size + 1) // 2 for size in grid] if children == 4 else None
    layer = NormActLinear(channels, children, activation, device=device, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    inputs = [2 * draw(batch, *grid, channels) + 5, *(draw(*x.shape) for x in layer.parameters())]
    inputs[names.index("weight") + 1] /= (children * channels) ** 0.5

    def by(backend):
        def call(x, *parameters):
            given = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(layer, given, (x, None, parents, backend))

        return call

    os.environ["QUADTREE_FUSED"] = "1"
    dtypes = [dtype] + [torch.float32] * len(names)
    with record() as recorded:
        by("auto")(*(x.to(device, dtype) for x in inputs))
    assert [launch.name for launch in recorded] == ["map_moments_kernel", "norm_linear_kernel"]
    compare(by("auto"), by("reference"), [x.to(device) for x in inputs], dtypes)


def check_autocast(device):
    """The result in the dtype of autocast, gradients in those of the parameters."""
    os.environ["QUADTREE_FUSED"] = "1"
    layer = NormActLinear(16, 4, "gelu", device=device)
    x = torch.randn(1, 5, 6, 16, device=device, requires_grad=True)
    with torch.autocast(device, torch.float16):  # the interpreter multiplies no bfloat16
        y = layer(x, None, (3, 3))
    assert y.dtype == torch.float16
    expected = layer(x, None, (3, 3), "reference")
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])
    truth = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()])
    for grad, true in zip(grads, truth, strict=True):
        assert grad.dtype == torch.float32
        assert (grad - true).norm() < 2e-2 * true.norm()


def check_second_derivatives(device):
    os.environ["QUADTREE_FUSED"] = "1"
    layer = NormActLinear(8, 1, "gelu", device=device)
    x = torch.randn(1, 3, 4, 8, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x, None).square().sum(), x, create_graph=True)
    with pytest.raises(BackendUnsupportedError, match="no second derivatives"):
        grad.sum().backward()


@kernels(
    check,
    [*product(CASES, (1, 4), DTYPES[:1]), (CASES[0], 4, torch.float16)],
    product(LARGE_CASES, (1, 4), DTYPES),
)
def test_kernels(run):
    run()


@kernels(check_autocast)
def test_autocast(run):
    run()


@kernels(check_second_derivatives)
def test_second_derivatives(run):
    run()
