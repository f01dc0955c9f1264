# SPDX-License-Identifier: Apache-2.0
"""All kernels compile to machine code of a GPU, on machines without one.

Triton needs no GPU to compile for one. What comes out is run by the tests marked `gpu`.
"""

import re
from typing import Any

import pytest
import torch

from tests.support.commands import python

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")

HOPPER = ("cuda", 90, 32)
SHARED_MEMORY = 64 * 1024  # bytes of the smallest GPU that Triton runs on


class Hopper:
    """As much of a driver as compiling needs."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*HOPPER)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_all() -> None:
    """Every kernel, by calls whose launches compile and do no more."""
    from triton.runtime import driver

    from quadtree_attention.ops import kernel as launching
    from quadtree_attention.ops import replay

    compiled: dict[str, int] = {}

    def compile_only(kernel, grid):
        def launch(*arguments, **constants):
            code = kernel.jit.warmup(*arguments, grid=grid, **constants)
            assert "cubin" in code.asm
            name = kernel.__name__
            compiled[name] = max(compiled.get(name, 0), code.metadata.shared)

        return launch

    driver.set_active(Hopper())
    launching.Kernel.__getitem__ = compile_only
    replay.SWITCHED_ON = False
    for dtype in (torch.float32, torch.bfloat16):
        calls(dtype)
    assert set(compiled) == {kernel.__name__ for kernel in all_kernels()}
    print("too much shared memory:", [k for k, size in compiled.items() if size > SHARED_MEMORY])


def all_kernels() -> list[Any]:
    from quadtree_attention.ops.attention.flat import triton_kernels as flat
    from quadtree_attention.ops.attention.triton.kernels import coarse, fine, pyramid, users
    from quadtree_attention.ops.depthwise import kernels as depthwise
    from quadtree_attention.ops.kernel import Kernel
    from quadtree_attention.ops.norms import kernels as norms
    from quadtree_attention.ops.transport import kernels as transport
    from quadtree_attention.ops.values import kernels as values

    modules = coarse, fine, users, flat, norms, depthwise, pyramid, transport, values
    return [
        item
        for part in modules
        for item in vars(part).values()
        if isinstance(item, Kernel) and item.__module__ == part.__name__
    ]


def calls(dtype: torch.dtype) -> None:
    """Calls that launch every kernel; their numbers mean nothing."""
    from quadtree_attention.ops.attention.triton.operator import _backward, _run
    from quadtree_attention.ops.norms import kernels as norms
    from quadtree_attention.ops.transport import kernels as transport
    from quadtree_attention.ops.values import kernels as values

    def zeros(*shape):
        return torch.zeros(shape, dtype=dtype)

    channels, levels = 64, 3
    maps, x = zeros(1, 12, 20, 2, 32), zeros(1, 12, 20, channels)
    weight = zeros(channels)
    for variant in ("A", "B"):
        weights = torch.zeros(levels) if variant == "B" else None
        lists = [maps], [maps], [maps], [], [], weights
        options = [8, 8], 0.1, variant, variant == "A"
        out, rest = _run(*lists, *options, True)
        _backward(maps, out.zero_(), rest.zero_(), *lists, *options, False)
    convolutions(dtype)
    variant_c(dtype)
    norms.layer_norm(x, weight, weight, 1e-5, dtype)
    norms.layer_norm_backward(x, x, weight, 1e-5)
    flat = x.flatten(1, 2)
    _, stats = norms.map_norm(flat, weight, weight, 1e-5, norms.GELU, 20)
    norms.map_norm_backward(flat, flat, weight, weight, stats, norms.GELU, 20)
    for children in (1, 4):
        matrix = torch.zeros(channels, children * channels)
        given = weight, weight, matrix
        y, _, stats = values.norm_linear(
            x, norms.moments_of(flat), *given, weight, 1e-5, norms.RELU,
            by_parent=children == 4, with_moments=True,
        )  # fmt: skip
        values.norm_linear_backward(y, x, stats, *given, norms.RELU, by_parent=children == 4)
    if dtype == torch.float32:
        scores, dustbin = torch.zeros(2, 40, 50), torch.zeros(())
        sides = transport.sinkhorn(scores, dustbin, 3)
        dlast = torch.zeros(2, 40), torch.zeros(2, 50), torch.zeros(2, 1)
        transport.sinkhorn_backward(scores, dustbin, *sides, dlast)


def variant_c(dtype: torch.dtype) -> None:
    """A level below the coarsest, with and without what it may have."""
    from quadtree_attention.ops.attention.flat.triton import _level, _level_backward

    cells, keys, children, kept, dim = 64, 128, 4, 16, 64
    q, k, v, below = (torch.zeros(1, 2, n, dim, dtype=dtype) for n in (cells, keys, keys, 4 * keys))
    parents = torch.zeros(1, 2, cells // children, kept, dtype=torch.int32)
    for bias, rows, topk in ((None, 1, 0), (torch.zeros(1, keys), 1, 16), (None, 4, 16)):
        tokens = torch.zeros(1, 2, cells * rows, dim, dtype=dtype)
        states = cells * rows if rows > 1 else cells // children
        state = torch.zeros(1, 2, states, dim), torch.zeros(1, 2, states)
        next_k = below if topk and rows > 1 else None
        out, lse, _, chosen, _ = _level(
            q, k, v, bias, parents, *state, tokens if rows > 1 else None, next_k, None,
            0.0, 0.0, 0.1, topk, True, topk > 0,
        )  # fmt: skip
        _level_backward(
            out, None, tokens, k, v, bias, parents, *state, chosen, out, lse, cells, 0.0, 0.1
        )


def convolutions(dtype: torch.dtype) -> None:
    """Depthwise ones of maps and of trees; parameters are in float32, as under autocast."""
    from quadtree_attention.ops.depthwise import launch
    from quadtree_attention.ops.norms.kernels import GELU

    for grid, levels in (((12, 20), 1), ((12, 20), 4), ((4, 6, 8), 1 + (dtype.itemsize != 2))):
        sizes = [[-(-side // 2**i) for side in grid] for i in reversed(range(levels))]
        values = [torch.zeros(1, *size, 64, dtype=dtype) for size in sizes]
        weights = [torch.zeros(64, 1, *(3,) * len(grid)) for _ in sizes]
        biases = [torch.zeros(64) for _ in sizes]
        logits = torch.zeros(levels) if levels > 1 else None
        message = values[-1] if levels > 1 else None
        options = launch.Options(levels - 1, 0 if levels > 1 else GELU, False)
        launch.forward(message, None, values, weights, biases, logits, options, dtype)
        launch.backward(values[-1], values, weights, biases, logits, options, False)


def test_sizes_of_maps_compile_nothing_anew():
    """But for transport, whose sizes kernels are compiled for; channels may divide by 16 or not."""
    from quadtree_attention.ops.kernel import SIZES

    numbers = {"scale", "share", "eps", "number", "next_number", "C"}
    for kernel in all_kernels():
        if ".transport." in kernel.__module__:
            continue
        for parameter in kernel.jit.params:
            name = parameter.name
            pointer_or_stride = name.startswith("p_") or re.fullmatch(r"s[a-z]*_[a-z]", name)
            if not (parameter.is_constexpr or pointer_or_stride or name in numbers):
                assert name in SIZES, (kernel.__name__, name)


def test_all_kernels_compile():
    printed = python("from tests.ops.test_gpu_code import compile_all; compile_all()")
    assert printed == "too much shared memory: []\n"
