# SPDX-License-Identifier: Apache-2.0
"""The kernel of position encodings against convolutions, in Triton's interpreter and on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")

from quadtree_attention.ops.depthwise.position import add_positions

# batch, grid, channels, levels
CASES = ((1, (4, 6), 8, 2), (2, (5, 3), 12, 3), (1, (1, 1), 5, 1), (1, (3, 4), 136, 2))
LARGE_CASES = (*CASES, (2, (201, 335), 32, 4), (1, (100, 167), 64, 3), (8, (14, 14), 320, 2))


def numbers(batch, grid, channels, levels, device):
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=rng).to(device)

    grids = [grid]
    for _ in range(levels - 1):
        grids.insert(0, tuple((side + 1) // 2 for side in grids[0]))
    values = [draw(batch, *size, channels) for size in grids]
    weights = [draw(channels, 1, 3, 3) for _ in grids]
    biases = [draw(channels) for _ in grids]
    return draw(batch, *grid, channels), values, weights, biases, draw(levels)


def truth(message, values, weights, biases, logits):
    """In float64, every cell of every level copied to all cells below it."""
    total = message.double()
    for i, share in enumerate(logits.double().softmax(dim=0)):
        maps = values[i].double().movedim(-1, 1)
        local = torch.nn.functional.conv2d(
            maps, weights[i].double(), biases[i].double(), padding=1, groups=maps.shape[1]
        ).movedim(1, -1)
        for axis in (1, 2):
            local = local.repeat_interleave(2 ** (len(values) - 1 - i), dim=axis)
            local = local.narrow(axis, 0, message.shape[axis])
        total = total + share * local
    return total


def check(batch, grid, channels, levels, device):
    message, values, *rest = numbers(batch, grid, channels, levels, device)
    expected = truth(message, values, *rest)
    got = add_positions(message, values, *rest)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    half, halves = message.bfloat16(), [x.bfloat16() for x in values]  # weights stay in float32
    got = add_positions(half, halves, *rest)
    assert got.dtype == torch.bfloat16
    rounding = 2**-8 if message.is_cuda else 2**-7  # the interpreter cuts off
    torch.testing.assert_close(
        got.double(), truth(half, halves, *rest), rtol=rounding, atol=rounding
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_in_the_interpreter(case, interpreter):
    interpreter(check, *case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE_CASES)
def test_on_a_gpu(case):
    check(*case, "cuda")
