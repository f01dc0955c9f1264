# SPDX-License-Identifier: Apache-2.0
"""Who listens to operators, and has to be told of them."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from quadtree_attention.ops.dispatch import is_plain, is_profiled


@pytest.fixture
def x():
    return torch.ones(3)


def test_plain_tensors(x):
    assert is_plain(x, torch.nn.Parameter(x, requires_grad=False))


def test_gradients(x):
    x.requires_grad_()
    assert not is_plain(torch.ones(3), x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert is_plain(x)


def test_subclasses(x):
    assert not is_plain(x, TwoTensor(x, x))


def test_modes(x):
    with FlopCounterMode(display=False):
        assert not is_plain(x)
    with torch._subclasses.FakeTensorMode():
        assert not is_plain(x)


def test_function_modes(x):
    class Listener(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Listener():
        assert not is_plain(x)
    with torch.device("cpu"):  # a default device is such a mode, too
        assert is_plain(x)


def test_transforms(x):
    told = []

    def call(row):
        told.append(is_plain(row))
        return row

    torch.func.vmap(call)(x)
    torch.func.jvp(call, (x,), (x,))
    assert told == [False, False]


def test_forward_gradients(x):
    with forward_ad.dual_level():
        assert not is_plain(forward_ad.make_dual(x, x))


def test_profilers(x):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_profiled()
    assert not is_profiled()


def test_tracers_and_compilers(x):
    told = []

    def call(x):
        told.append(is_plain(x))
        return x + 1

    torch.jit.trace(call, x, check_trace=False)
    assert told == [False]
    compiled = torch.compile(
        lambda x: x + 1 if is_plain(x) else x - 1, backend="eager", fullgraph=True
    )
    assert compiled(x).tolist() == [0.0] * 3
