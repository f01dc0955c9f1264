# SPDX-License-Identifier: Apache-2.0
"""The reference against finite differences and its own promises."""

import pytest
import torch

from quadtree_attention import quadtree_attention, quadtree_attention_pyramid
from quadtree_attention.ops.attention import reference
from tests.support.commands import python

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.mark.parametrize("variant", ["A", "B"])
def test_chunks_do_not_change_the_result(variant, monkeypatch):
    leaf = {"dtype": torch.float64, "requires_grad": True}
    q = torch.randn(2, 9, 13, 2, 4, **leaf)
    k = torch.randn(2, 7, 10, 2, 4, **leaf)
    v = torch.randn(2, 7, 10, 2, 3, **leaf)

    def run():
        out = quadtree_attention(q, k, v, num_levels=3, topk=(3, 2), variant=variant)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    whole = run()
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 20_000)
    for a, b in zip(run(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


MEMORY_PROBE = """
import resource, sys, torch
from quadtree_attention import quadtree_attention
torch.set_num_threads(2)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def run(side, levels):
    q, k, v = torch.randn(3, 1, side, side + 8, 1, 32, requires_grad=True).unbind()
    out = quadtree_attention(q, k, v, num_levels=levels, topk=32, backend="reference")
    torch.autograd.grad(out.sum(), (q, k, v))
run(32, 3)
start = peak()
run(int(sys.argv[1]), int(sys.argv[2]))
print(peak() - start)
"""


def test_working_memory_is_bounded():
    """216x224 tokens with K 32 gather 1.6 GB of candidates; far less may be held at any time."""
    side, levels = 216, 4
    freed_at_once = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}  # glibc would keep large blocks
    grown = float(python(MEMORY_PROBE, side, levels, **freed_at_once))
    tokens_mib = side * (side + 8) * 32 * 4 / 2**20
    linear = 30 * tokens_mib  # q, k, v, pyramids, their gradients, selections, messages
    assert grown < reference.WORKSPACE_BYTES / 2**20 + linear
    gathered = side * (side + 8) * 128 * 32 * 2 * 4 / 2**20
    assert gathered > 3 * (reference.WORKSPACE_BYTES / 2**20 + linear)  # the bound means something


@pytest.mark.parametrize("variant", ["A", "B"])
def test_nan_in_a_query_reaches_only_its_family(variant):
    q, k, v = torch.randn(3, 2, 8, 12, 2, 4).unbind()
    q[0, 5, 9, 1] = torch.nan
    out = quadtree_attention(q, k, v, num_levels=3, topk=3, variant=variant)
    touched = out.isnan().any(-1)
    expected = torch.zeros_like(touched)
    expected[0, 4:8, 8:12, 1] = True  # the cell of level 0 that holds it
    assert torch.equal(touched, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_key_stays_in_its_batch_entry_and_head(bad):
    q, k, v = torch.randn(3, 2, 7, 10, 2, 4).unbind()
    k[1, 3, 3, 0] = bad
    for num_levels in (1, 3):
        out = quadtree_attention(q, k, v, num_levels=num_levels, topk=3)
        touched = out.isnan().flatten(1, 2).any(1).any(-1)  # (B, N)
        assert touched.tolist() == [[False, False], [True, False]]


def test_bad_value_reaches_only_queries_that_see_it():
    """Far from the kept cells a bad value has no effect: pyramids that do not pool it tell."""
    qs, ks, vs = ([torch.randn(1, *g, 1, 4) for g in ((2, 3), (4, 6))] for _ in range(3))
    vs[1][0, 1, 4] = torch.nan
    out, selection = quadtree_attention_pyramid(qs, ks, vs, topk=2, return_selection=True)
    sees = (selection[0].cells == torch.tensor([0, 2])).all(-1).any(-1)[..., 0]  # (1, 2, 3)
    assert sees.any() and not sees.all()
    sees = sees.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.equal(out.isnan().any(-1)[..., 0], sees)


def test_ties_go_to_the_first_candidate():
    q = k = torch.ones(1, 4, 6, 1, 2)
    v = torch.randn(1, 4, 6, 1, 2)
    _, selection = quadtree_attention(q, k, v, num_levels=2, topk=3, return_selection=True)
    expected = torch.tensor([[0, 0], [0, 1], [0, 2]])
    assert (selection[0].cells[0, ..., 0, :, :] == expected).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["A", "B"])
def test_low_precision(variant, dtype):
    """At most twice the error of PyTorch's own attention in that dtype, on the same inputs."""
    exact = [torch.randn(1, 9, 14, 2, 16, dtype=torch.float64) for _ in range(3)]
    low = [x.to(dtype) for x in exact]
    exact = [x.double() for x in low]
    everything = {"num_levels": 2, "topk": 10**6, "variant": variant}  # no selection to flip
    truth = quadtree_attention(*exact, **everything)
    got = quadtree_attention(*low, **everything)
    assert got.dtype == dtype

    def dense(q, k, v):
        q, k, v = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    floor = (dense(*low).double() - dense(*exact)).abs().max()
    assert (got.double() - truth).abs().max() <= 2 * floor
