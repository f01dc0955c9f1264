# SPDX-License-Identifier: Apache-2.0
"""Fused depthwise convolutions against torch's, in Triton's interpreter here and on a GPU."""

import os
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")

from quadtree_attention.ops.attention.tree import Tree
from quadtree_attention.ops.depthwise import plain
from quadtree_attention.ops.depthwise.functional import add_positions, depthwise
from tests.interpreter import kernels
from tests.ops.cases import compare, draw

# batch, grid, channels, ReLU before, activation after
CASES = (
    (2, (7,), 12, False, None),
    (1, (5, 6), 8, False, "gelu"),
    (2, (3, 5), 5, True, "gelu"),
    (1, (1, 1), 3, False, "relu"),
    (1, (2, 9), 136, False, None),
    (2, (3, 2, 5), 6, True, "gelu"),
    (1, (2, 3, 4), 5, False, None),
)
LARGE_CASES = (*CASES, (2, (201, 335), 32, False, "gelu"), (8, (28, 28), 640, True, "gelu"))
# batch, grid, channels, levels
TREES = (
    (1, (4, 6), 8, 2),
    (2, (5, 3), 12, 3),
    (1, (1, 1), 5, 1),
    (1, (11, 13), 5, 4),
    (1, (3, 4), 136, 2),
    (1, (9, 17), 4, 5),
    (2, (9,), 4, 5),
    (1, (3, 2, 5), 4, 4),
)
LARGE_TREES = (*TREES, (2, (201, 335), 32, 4), (1, (100, 167), 64, 3), (8, (14, 14), 320, 2))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_depthwise(case, dtype, device):
    batch, grid, channels, relu, activation = case
    options = {"relu": relu, "activation": activation}
    inputs = draw(batch, *grid, channels), draw(channels, 1, *(3,) * len(grid)), draw(channels)
    os.environ["QUADTREE_FUSED"] = "1"
    compare(
        lambda *tensors: depthwise(*tensors, **options),
        lambda *tensors: plain.depthwise(*tensors, **options),
        [x.to(device) for x in inputs],
        [dtype, torch.float32, torch.float32],  # parameters as under autocast
    )


def tree(batch, grid, channels, levels):
    grids = [Tree(grid, levels).grid_at(level) for level in range(levels)]
    values = [draw(batch, *size, channels) for size in grids]
    weights = [draw(channels, 1, *(3,) * len(grid)) for _ in grids]
    biases = [draw(channels) for _ in grids]
    return [draw(batch, *grid, channels), draw(levels), *values, *weights, *biases]


def add_plainly(message, values, weights, biases, logits):
    """Every cell of every level is copied to all cells below it."""
    total = message
    for i, share in enumerate(logits.softmax(dim=0)):
        local = plain.depthwise(values[i], weights[i], biases[i])
        for axis in range(1, message.ndim - 1):
            local = local.repeat_interleave(2 ** (len(values) - 1 - i), dim=axis)
            local = local.narrow(axis, 0, message.shape[axis])
        total = total + share * local
    return total


def check_positions(case, dtype, device):
    levels = case[-1]

    def by(function):
        def call(message, logits, *rest):
            lists = [rest[i * levels : (i + 1) * levels] for i in range(3)]
            return function(message, *lists, logits)

        return call

    dtypes = [dtype, torch.float32] + [dtype] * levels + [torch.float32] * 2 * levels
    compare(by(add_positions), by(add_plainly), [x.to(device) for x in tree(*case)], dtypes)


@kernels(
    check_depthwise,
    [*product(CASES, DTYPES[:1]), *product(CASES[1:3], DTYPES[1:])],
    product(LARGE_CASES, DTYPES),
)
def test_kernels(run):
    run()


@kernels(
    check_positions,
    [*product(TREES, DTYPES[:1]), *product(TREES[1:2], DTYPES[1:])],
    product(LARGE_TREES, DTYPES),
)
def test_levels(run):
    run()
