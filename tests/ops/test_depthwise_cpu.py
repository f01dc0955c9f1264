# SPDX-License-Identifier: Apache-2.0
"""Maps of levels added along their tree by Numba kernels, against plain PyTorch."""

import pytest
import torch

from quadtree_attention import BackendUnsupportedError, use_backend
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.nn.value_pyramid import plus_parents
from quadtree_attention.ops.attention.tree import Tree
from quadtree_attention.ops.depthwise.cpu import add_levels, can_add

pytest.importorskip("numba", reason="the cpu backend needs numba")

# batch, grid, channels, levels
CASES = (
    (2, (4, 6), 16, 2),
    (1, (5, 3), 21, 3),
    (3, (1, 7), 8, 4),
    (2, (13,), 9, 3),
    (1, (40, 37), 64, 5),
)


def plainly(message, maps):
    total = maps[0]
    for finer in maps[1:]:
        total = plus_parents(finer, total)
    return message + total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_plain_pytorch(case, dtype):
    batch, grid, channels, levels = case
    grids = [Tree(grid, levels).grid_at(level) for level in range(levels)]
    maps = [torch.randn(batch, *size, channels, dtype=dtype) for size in [grid, *grids]]
    maps[-1] = maps[-1].transpose(0, -1).contiguous().transpose(0, -1)  # any layout
    given = [x.requires_grad_() for x in maps]
    assert can_add(given, "cpu")
    got, expected = add_levels(given[0], given[1:]), plainly(given[0], given[1:])
    torch.testing.assert_close(got, expected)
    dy = torch.randn_like(got)
    gradients = (torch.autograd.grad(y, given, dy) for y in (got, expected))
    torch.testing.assert_close(*gradients)


def test_second_derivatives_are_refused():
    maps = [torch.randn(1, *grid, 8, requires_grad=True) for grid in ((4, 4), (2, 2), (4, 4))]
    out = add_levels(maps[0], maps[1:]).square().sum()
    (grad,) = torch.autograd.grad(out, maps[1], create_graph=True)
    with pytest.raises(BackendUnsupportedError, match="no second derivatives"):
        grad.sum().backward()


def test_what_is_left_to_pytorch():
    maps = [torch.randn(1, 4, 4, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 4, 4, 8)]
    assert can_add(maps, "cpu")
    assert not can_add(maps, "reference")
    assert not can_add([x[..., :5] for x in maps], "cpu")
    assert not can_add([x.half() for x in maps], "cpu")
    assert not can_add([x[:, None] for x in maps], "cpu")


def test_a_module_takes_it():
    attention = QuadtreeAttention(16, 2, num_levels=3, topk=2, value_pyramid="conv", lepe=True)
    x = torch.randn(2, 9, 7, 16)
    with torch.profiler.profile() as events:
        out = attention(x)
    assert "quadtree_attention::cpu_add_levels" in {event.key for event in events.key_averages()}
    with use_backend("reference"):
        torch.testing.assert_close(out, attention(x), rtol=1e-4, atol=1e-5)
