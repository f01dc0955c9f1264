# SPDX-License-Identifier: Apache-2.0
"""Launches that are repeated give what launching anew gives: in the interpreter, and on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from quadtree_attention import quadtree_attention, quadtree_attention_pyramid
from quadtree_attention.ops.norms import map_norm
from tests.conftest import ROOT

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")

from quadtree_attention.ops.backends.triton import replay

OPTIONS = {"num_levels": 2, "topk": 2, "backend": "triton"}


def self_attention(draw):
    x = draw(1, 3, 5, 1, 8)
    return quadtree_attention(x, x, x, **OPTIONS)


def cross_attention(draw):
    q, k, v = draw(1, 3, 5, 1, 8), draw(1, 3, 5, 1, 8), draw(1, 3, 5, 1, 8)
    return quadtree_attention(q, k, v, **OPTIONS)


def in_one_tensor(draw):
    q, k, v = draw(1, 3, 5, 3, 1, 8).unbind(3)
    return quadtree_attention(q, k, v, **OPTIONS)


def unaligned(draw):
    q = draw(1 + 3 * 5 * 8)[1:].view(1, 3, 5, 1, 8)
    return quadtree_attention(q, draw(1, 3, 5, 1, 8), draw(1, 3, 5, 1, 5), **OPTIONS)


def masked_with_selection(draw):
    q, k, v = draw(1, 3, 5, 2, 8), draw(1, 4, 5, 2, 8), draw(1, 4, 5, 2, 8)
    masks = {"query_mask": draw(1, 3, 5) > -0.5, "key_mask": draw(1, 4, 5) > -0.5}
    options = OPTIONS | {"num_levels": 3, "return_selection": True}
    out, levels = quadtree_attention(q, k, v, level_weights=draw(3), **masks, **options)
    return torch.cat([out.flatten(), *(x.flatten().float() for level in levels for x in level)])


def variant_a(draw):
    q, k, v = draw(1, 3, 5, 1, 8), draw(1, 4, 5, 1, 8), draw(1, 4, 5, 1, 8)
    return quadtree_attention(q, k, v, variant="A", **OPTIONS | {"num_levels": 3})


def pyramids(draw):
    qs, ks, vs = ([draw(1, 2, 3, 1, 8), draw(1, 3, 5, 1, 8)] for _ in range(3))
    return quadtree_attention_pyramid(qs, ks, vs, topk=2, backend="triton")


def norm_of_maps(draw):
    x, weight, bias = draw(2, 4, 6, 8), draw(8), draw(8)
    return map_norm(x, weight, bias, 1e-5, "relu", by_parent=True)


def gradients(draw):
    q, k, v = (draw(1, 3, 5, 1, 8).requires_grad_() for _ in range(3))
    loss = quadtree_attention(q, k, v, **OPTIONS).square().sum()
    return torch.cat(torch.autograd.grad(loss, (q, k, v)))


REPEATED = (
    self_attention, cross_attention, in_one_tensor, unaligned, masked_with_selection, variant_a,
    pyramids, norm_of_maps,
)  # fmt: skip


def check_replays(device: str) -> None:
    """Every call twice, with other numbers: the first is noted, the second repeats it."""
    replay._plans.clear()
    for i, call in enumerate(REPEATED, start=1):
        for seed in range(2):
            _check_call(call, seed, device)
            assert len(replay._plans) == i, call.__name__
    _check_call(gradients, 0, device)  # forward is that of cross attention
    assert len(replay._plans) == i


def _check_call(call, seed, device):
    results = []
    for on in (True, False):
        replay.SWITCHED_ON = on
        rng = torch.Generator().manual_seed(seed)
        results.append(call(lambda *shape, rng=rng: torch.randn(shape, generator=rng).to(device)))
    assert results[0].isfinite().all()
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def check_what_is_not_repeated(device: str) -> None:
    """Copies and zeros are no launches of ours, and nothing has nothing to launch."""
    replay.SWITCHED_ON = True
    replay._plans.clear()
    x = torch.randn(1, 5, 3, 1, 8, device=device).transpose(1, 2)
    expected = quadtree_attention(x.contiguous(), x.contiguous(), x.contiguous(), **OPTIONS)
    replay._plans.clear()
    torch.testing.assert_close(quadtree_attention(x, x, x, **OPTIONS), expected)
    empty = x[:0].contiguous()
    assert quadtree_attention(empty, empty, empty, **OPTIONS).shape == empty.shape
    weight = torch.ones(8, device=device)
    map_norm(x[..., 0, :], weight, weight, 1e-5, "relu", by_parent=True)  # zeros past the edge
    assert not replay._plans


def check_too_many(device: str) -> None:
    replay.SWITCHED_ON, replay.MOST_PLANS = True, 2
    replay._plans.clear()
    counts = []
    for width in range(3, 7):
        x = torch.randn(1, 2, width, 1, 8, device=device)
        quadtree_attention(x, x, x, **OPTIONS)
        counts.append(len(replay._plans))
    assert counts == [1, 2, 1, 2]


CHECKS = (check_replays, check_what_is_not_repeated, check_too_many)


def test_in_the_interpreter():
    names = ", ".join(check.__name__ for check in CHECKS)
    script = f"from tests.ops.test_replay import {names}\nfor f in {names}: f('cpu'); print('ok')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["ok"] * len(CHECKS)


@pytest.fixture
def _as_before(monkeypatch):
    monkeypatch.setattr(replay, "SWITCHED_ON", False)
    monkeypatch.setattr(replay, "MOST_PLANS", replay.MOST_PLANS)
    monkeypatch.setattr(replay, "_plans", {})


@pytest.mark.gpu
@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_gpu(check):
    check("cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("_as_before")
def test_in_a_cuda_graph():
    replay.SWITCHED_ON = True
    x = torch.randn(1, 20, 28, 2, 32, device="cuda")
    expected = quadtree_attention(x, x, x, **OPTIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = quadtree_attention(x, x, x, **OPTIONS)
    got.zero_()
    graph.replay()
    assert len(replay._plans) == 1
    torch.testing.assert_close(got, expected)


def test_a_call_that_fails_is_not_noted():
    def fail():
        raise RuntimeError("of the call")

    with pytest.raises(RuntimeError, match="of the call"):
        replay.replayed(fail, [torch.zeros(3)], ())
    assert not replay.is_noted()
    assert not replay._plans
