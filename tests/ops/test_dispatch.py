# SPDX-License-Identifier: Apache-2.0
"""Who listens to operators, and has to be told of them."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from quadtree_attention.ops.dispatch import nobody_listens


@pytest.fixture
def x():
    return torch.ones(3)


def test_plain_tensors(x):
    assert nobody_listens(x, torch.nn.Parameter(x, requires_grad=False))


def test_gradients(x):
    x.requires_grad_()
    assert not nobody_listens(torch.ones(3), x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert nobody_listens(x)


def test_subclasses(x):
    assert not nobody_listens(x, TwoTensor(x, x))


def test_modes(x):
    with FlopCounterMode(display=False):
        assert not nobody_listens(x)
    with torch._subclasses.FakeTensorMode():
        assert not nobody_listens(x)


def test_function_modes(x):
    class Listener(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Listener():
        assert not nobody_listens(x)
    with torch.device("cpu"):  # a default device is such a mode, too
        assert nobody_listens(x)


def test_transforms(x):
    told = []

    def call(row):
        told.append(nobody_listens(row))
        return row

    torch.func.vmap(call)(x)
    torch.func.jvp(call, (x,), (x,))
    assert told == [False, False]


def test_forward_gradients(x):
    with forward_ad.dual_level():
        assert not nobody_listens(forward_ad.make_dual(x, x))


def test_profilers(x):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not nobody_listens(x)
    assert nobody_listens(x)


def test_tracers_and_compilers(x):
    told = []

    def call(x):
        told.append(nobody_listens(x))
        return x + 1

    torch.jit.trace(call, x, check_trace=False)
    assert told == [False]
    compiled = torch.compile(
        lambda x: x + 1 if nobody_listens(x) else x - 1, backend="eager", fullgraph=True
    )
    assert compiled(x).tolist() == [0.0] * 3
