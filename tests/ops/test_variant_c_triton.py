# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of variant C against the reference, in Triton's interpreter."""

from itertools import product

import torch

from quadtree_attention import BackendUnsupportedError, quadtree_attention, quadtree_sdpa
from tests.interpreter import kernels
from tests.support import raises

CASES = {
    # grid, key grid, levels, topk, masked, prefix, options
    "image": ((5, 6), (6, 7), 3, 2, False, 0, {}),
    "masked": ((6, 4), (5, 7), 3, (3, 2), True, 2, {}),
    "row": ((11,), (9,), 3, (2, 9), True, 0, {}),
    "volume": ((2, 3, 4), (3, 2, 2), 2, 2, True, 0, {}),
    "exact": ((7, 8), (6, 5), 3, 2, True, 0, {"exact_queries": True}),
    "lookahead": ((6, 5), (5, 6), 3, 2, True, 0, {"lookahead": True}),
    "many candidates": ((4, 5), (9, 11), 3, (6, 11), False, 1, {}),
}  # fmt: skip


def run(backend, q, k, v, prefix, masks, options):
    first = {}
    if prefix[0].shape[1]:
        first = dict(zip(("prefix_keys", "prefix_values"), prefix, strict=True))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, selection, lse = quadtree_attention(
        *leaves, variant="C", scale=0.7, backend=backend, return_selection=True, return_lse=True,
        **masks, **first, **options,
    )  # fmt: skip
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    seen = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out.float() * weights).sum() + seen.square().sum() / 8, leaves)
    return out, lse, grads, selection


def check(name, dtype, tolerance, device):
    grid, key_grid, levels, topk, masked, prefix, options = CASES[name]
    q = torch.randn(2, *grid, 2, 8, device=device)
    k, v = (torch.randn(2, *key_grid, 2, d, device=device) for d in (8, 5))
    first = [torch.randn(2, prefix, 2, d, device=device) for d in (8, 5)]
    masks = {}
    if masked:
        masks["query_mask"] = torch.rand(2, *grid, device=device) > 0.3
        masks["key_mask"] = torch.rand(2, *key_grid, device=device) > 0.4
        masks["key_mask"][1] = False  # an entry of the batch that sees nothing
    options = {"num_levels": levels, "topk": topk, **options}
    tensors = [x.to(dtype) for x in (q, k, v)]
    first = [x.to(dtype) for x in first]
    out, lse, grads, selection = run("triton", *tensors, first, masks, options)
    assert out.dtype == dtype
    expected = run("reference", *tensors, first, masks, options)
    for (got, scores), (cells, wanted) in zip(selection, expected[3], strict=True):
        if dtype == torch.float32:
            assert torch.equal(got, cells)
        torch.testing.assert_close(scores, wanted, rtol=0, atol=max(tolerance, 1e-5))
    torch.testing.assert_close(out, expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected[1], rtol=tolerance, atol=tolerance)
    for a, b in zip(grads, expected[2], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=4 * tolerance)


LOW = {torch.float16: 1e-2, torch.bfloat16: 8e-2}


@kernels(
    check,
    [*product(CASES, [torch.float32], [1e-5]), ("masked", torch.float16, 1e-2)],
    [(name, *way) for name in CASES for way in ((torch.float32, 1e-4), *LOW.items())],
)
def test_equals_the_reference(run):
    run()


def check_dense(device):
    q, k, v = torch.randn(3, 1, 2, 2 + 5 * 7, 8, device=device).unbind()
    options = {"grid": (5, 7), "prefix": 2, "num_levels": 3, "topk": 10**6, "backend": "triton"}
    for grid, tokens in (((5, 7), 37), ([(3, 4), (4, 4)], 30)):
        maps = [x[:, :, :tokens] for x in (q, k, v)]
        out = quadtree_sdpa(*maps, **options | {"grid": grid})
        expected = torch.nn.functional.scaled_dot_product_attention(*maps)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    q, options = q.new_zeros(1, 1, 64 * 64, 8), options | {"grid": (64, 64), "prefix": 0}
    words = "chooses among 1024 cells"
    raises(BackendUnsupportedError, words, quadtree_sdpa, q, q, q, **options)


@kernels(check_dense)
def test_keeping_all_is_dense_attention(run):
    run()
