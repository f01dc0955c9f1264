# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every kind: right by the reference, refused in one sentence by all else."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from quadtree_attention import BackendUnsupportedError, quadtree_attention, use_backend
from quadtree_attention.nn import QuadtreeBlock
from quadtree_attention.nn.norm import TokenNorm
from quadtree_attention.nn.value_pyramid import ValueBranch
from quadtree_attention.ops.attention import reference
from quadtree_attention.ops.transport.functional import sinkhorn

STEP = 1e-6


def slope(function, x, along):
    """Of a function at x, by finite differences."""
    return (function(x + STEP * along) - function(x - STEP * along)) / (2 * STEP)


def squares(function):
    return lambda x: function(x).square().sum()


def first(function, x, *, constant=False):
    """Gradient of a sum that can be differentiated again.

    Its incoming gradient follows from x, or is a constant: then x is reached by way of tensors that
    were saved alone.
    """
    x = x.clone().requires_grad_()
    y = function(x)
    loss = (y * torch.linspace(-1, 1, y.numel()).to(y).view_as(y)).sum()
    if not constant:
        loss = y.square().sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    return x, dx


def by_forward_ad(function, x, along):
    with forward_ad.dual_level():
        y = function(forward_ad.make_dual(x, along))
        return forward_ad.unpack_dual(y).tangent, slope(function, x, along)


def by_jvp(function, x, along):
    return jvp(function, (x,), (along,))[1], slope(function, x, along)


def by_grad(function, x, along):
    loss = squares(function)
    return (grad(loss)(x) * along).sum(), slope(loss, x, along)


def by_jacrev(function, x, along):
    jacobian = jacrev(function)(x).flatten(-x.ndim)
    return jacobian @ along.flatten(), slope(function, x, along)


def by_hessian(function, x, along):
    loss = squares(function)
    return (hessian(loss)(x).flatten(-x.ndim) @ along.flatten()), slope(grad(loss), x, along)


def by_vmap(function, x, along):
    return vmap(function)(torch.stack([x, along])), torch.stack([function(x), function(along)])


def by_backward_twice(function, x, along):
    leaf, dx = first(function, x)
    (second,) = torch.autograd.grad((dx * along).sum(), leaf)
    return second, slope(lambda x: first(function, x)[1].detach(), x, along)


def by_penalty(function, x, along):
    """The incoming gradient is a constant, and there is another path beside the function's."""

    def penalty(x):
        leaf, dx = first(function, x, constant=True)
        return leaf, dx.square().sum() + leaf.pow(3).sum()

    leaf, value = penalty(x)
    (second,) = torch.autograd.grad(value, leaf)
    return (second * along).sum(), slope(lambda x: penalty(x)[1].detach(), x, along)


TRANSFORMS = (by_forward_ad, by_jvp, by_grad, by_jacrev, by_hessian, by_vmap)
TRANSFORMS += (by_backward_twice, by_penalty)
each_transform = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)


def attention(backend, variant="B"):
    def call(x):  # (1, Y, X, 1, D); all of q, k and v depend on it
        return quadtree_attention(
            x, x.sin(), x.cos(), num_levels=2, topk=1, variant=variant, backend=backend
        )

    return call


def numbers(*shape, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng, dtype=dtype) for _ in range(2)]


def compare(transform, function, *inputs):
    got, expected = transform(function, *inputs)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-7)


@each_transform
@pytest.mark.parametrize("variant", ["A", "B"])
def test_reference(transform, variant):
    compare(transform, attention("reference", variant), *numbers(1, 3, 4, 1, 2))


@each_transform
def test_reference_in_chunks(transform, monkeypatch):
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 2_000)
    with torch.set_grad_enabled(transform is not by_vmap):  # it recomputes in backward alone
        compare(transform, attention("reference"), *numbers(1, 3, 4, 1, 2))


def block(backend):
    torch.manual_seed(0)
    options = {"num_levels": 2, "topk": 1, "value_pyramid": "conv", "lepe": True, "mlp_ratio": 2}
    return QuadtreeBlock(4, 1, **options, backend=backend).double()


@each_transform
def test_block(transform):
    compare(transform, block("reference"), *numbers(1, 3, 2, 4))


def test_parameters_of_a_block():
    """`functional_call` and `jvp`: a derivative along all parameters at once."""
    module, (x, _) = block("reference"), numbers(1, 3, 2, 4)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss(parameters):
        return functional_call(module, parameters, (x,)).square().sum()

    def moved(step):
        return loss({name: p + step * along[name] for name, p in parameters.items()})

    expected = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    torch.testing.assert_close(jvp(loss, (parameters,), (along,))[1], expected, rtol=1e-6, atol=0)


def check_refused(transform, function, inputs, what):
    twice = transform in (by_backward_twice, by_penalty)
    sentence = "second derivatives" if twice else "forward-mode"
    with pytest.raises(BackendUnsupportedError, match=f"{what} has no {sentence}") as caught:
        transform(function, *inputs)
    text = str(caught.value)
    assert text.endswith("; use backend='reference', or use_backend('reference') around a model")
    assert "\n" not in text


@each_transform
@pytest.mark.parametrize("variant", ["A", "B"])
def test_cpu_refuses(transform, variant):
    pytest.importorskip("numba", reason="the cpu backend needs numba")
    what = "the cpu backend of quadtree attention"
    for width in (2, 8):  # without and with pyramids by kernels
        check_refused(transform, attention("cpu", variant), numbers(1, 3, 4, 1, width), what)


@each_transform
def test_a_block_refuses_what_its_backend_does(transform):
    pytest.importorskip("numba", reason="the cpu backend needs numba")
    what = "the cpu backend of quadtree attention"
    check_refused(transform, block("cpu"), numbers(1, 3, 2, 4), what)


def check_triton(transform, variant):
    inputs = numbers(1, 2, 3, 1, 8, dtype=torch.float32)
    what = "the triton backend of quadtree attention"
    check_refused(transform, attention("triton", variant), inputs, what)


def check_layer_norm(transform):
    norm = TokenNorm(8).requires_grad_(False)
    torch.nn.init.normal_(norm.weight)  # or its squares would add up to a constant
    check_refused(transform, norm, numbers(3, 8, dtype=torch.float32), "the fused norm")
    with use_backend("reference"):
        compare(transform, norm.double(), *numbers(3, 8))


def check_map_norm(transform):
    branch = ValueBranch(8, 4).requires_grad_(False)
    inputs = numbers(1, 2, 2, 8, dtype=torch.float32)
    check_refused(transform, lambda x: branch(x, (1, 1), None, None), inputs, "the fused norm")


def check_sinkhorn(transform):
    def call(scores):
        return sinkhorn(scores, scores.new_zeros(()), 2)[0]

    what = "the fused Sinkhorn iteration"
    check_refused(transform, call, numbers(1, 3, 4, dtype=torch.float32), what)


@each_transform
@pytest.mark.parametrize("variant", ["A", "B"])
def test_triton_refuses(transform, variant, interpreter):
    interpreter(check_triton, transform, variant)


@each_transform
@pytest.mark.parametrize("check", [check_layer_norm, check_map_norm, check_sinkhorn])
def test_fused_pieces_refuse(check, transform, interpreter):
    interpreter(check, transform)


def test_gradients_that_nobody_asks_for():
    """A graph of a backward pass is no second derivative: what is not differentiated may be."""
    pytest.importorskip("numba", reason="the cpu backend needs numba")
    x = numbers(1, 3, 4, 1, 8)[0].requires_grad_()
    (dx,) = torch.autograd.grad(attention("cpu")(x).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(attention("cpu")(x).square().sum(), x)
    assert torch.equal(dx, expected)
    other = x.detach().requires_grad_()
    (found,) = torch.autograd.grad((dx.detach() * other.square()).sum(), other)
    torch.testing.assert_close(found, 2 * dx * other)
