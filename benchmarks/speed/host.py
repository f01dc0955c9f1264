# SPDX-License-Identifier: Apache-2.0
"""What the host does for the GPU: kernel launches, compiled variants and host time; needs no GPU.

Launches are counted on CPU tensors, where Triton's kernels are recorded in place of being run, and
the others are the operators of ATen that compute (the autocast of CPUs casts almost as the one of
GPUs does). Variants are what Triton would compile at one image size, and at eight others after it,
on tensors without memory. Host time is measured on narrow networks and small images, on one thread:
launches of Triton are left out, and ATen's operators have next to nothing to compute. It compares
versions and networks with each other; it is not the time of a GPU server.
"""

import os
import random
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import quadtree_attention.models.backbone  # registers our models with timm
from benchmarks.measure import Call
from benchmarks.speed.backbones import BASELINES, beside_baseline
from benchmarks.suite import Work
from quadtree_attention import quadtree_attention
from quadtree_attention.ops.launches import record

MODEL = "quadtree_b_b0"
OPERATOR = "quadtree_attention"
# what is called, and whether gradients follow
PARTS = {
    "attention forward": (OPERATOR, False),
    "attention forward + backward": (OPERATOR, True),
    "b0 inference": (MODEL, False),
    "b0 training step": (MODEL, True),
}
SWITCH = "QUADTREE_FUSED"
MAP, LEVELS, TOPK, CHANNELS = (64, 64), 4, 8, 32  # of the attention alone, with one head
IMAGE = 224  # of the networks whose launches are counted
NARROW = {"embed_dims": (8, 16, 40, 64), "num_classes": 10}  # networks to be timed, by default
SMALL = 64  # their images
SIDES = range(256, 1401)
SIZES, SEED = 8, 0
LIBRARIES = ("timm",)
# operators of ATen that launch nothing, beside views
NO_LAUNCH = {
    "_unsafe_view", "alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh",
    "new_empty", "new_empty_strided",
}  # fmt: skip


def plan(options: Namespace) -> list[list[Work]]:
    """Every part, by the kernels of today and by those that a switch turns on."""
    planned = []
    for part in options.parts:
        model, _ = PARTS[part]
        switch = (False, True) if model in BASELINES else (False,)
        planned += [beside_baseline(part, model, fused=fused) for fused in switch]
    return planned


def values(work: Work) -> dict[str, Any]:
    """Launches, and variants of the kernels."""
    _, training = PARTS[work["part"]]
    call = _call(work, IMAGE, {})
    with _environment(work), record():
        call()
    with _environment(work):
        triton, aten = count(call)
        found = {"launches": triton + aten, "triton_launches": triton}
        if work["model"] != MODEL:
            return found
        first, more = variants(work["model"], training)
    return found | {"variants": first, "more_variants": more}


def prepare(work: Work) -> Call:
    """The call to time."""
    from quadtree_attention.ops import kernel

    call = _call(work, SMALL, NARROW)
    launch = kernel.Kernel.__getitem__

    def timed() -> None:
        kernel.Kernel.__getitem__ = lambda *_: lambda *_, **__: None  # type: ignore[method-assign]
        try:
            with _environment(work):
                call()
        finally:
            kernel.Kernel.__getitem__ = launch  # type: ignore[method-assign]

    return timed


@contextmanager
def _environment(work: Work) -> Iterator[None]:
    """Triton's kernels take tensors of CPUs, and are not repeated; it costs a few microseconds."""
    from quadtree_attention.ops import replay

    wanted = {SWITCH: str(int(work["fused"])), "TRITON_INTERPRET": "1"}
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    switched_on, replay.SWITCHED_ON = replay.SWITCHED_ON, False
    os.environ.update(wanted)
    try:
        yield
    finally:
        replay.SWITCHED_ON = switched_on
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


def _attention(training: bool) -> Call:
    """A call of the attention alone."""
    torch.manual_seed(SEED)
    shape = 1, *MAP, 1, CHANNELS
    q, k, v = (torch.randn(shape, requires_grad=training) for _ in range(3))
    logits = torch.zeros(LEVELS, requires_grad=training)
    dout = torch.randn(shape)

    def call() -> Any:
        out = quadtree_attention(
            q, k, v, num_levels=LEVELS, topk=TOPK, level_weights=logits, backend="triton"
        )
        return torch.autograd.grad(out, (q, k, v, logits), dout) if training else out

    return call


def _call(work: Work, side: int, narrow: dict[str, Any]) -> Call:
    """A training step without an optimizer, or inference, both under autocast; or the attention."""
    _, training = PARTS[work["part"]]
    if work["model"] == OPERATOR:
        return _attention(training)
    torch.manual_seed(SEED)
    model = timm.create_model(work["model"], **narrow).train(training)
    images = torch.randn(1, 3, side, side)
    parameters = list(model.parameters())

    def call() -> Any:
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
            loss = model(images).float().sum()
        return torch.autograd.grad(loss, parameters) if training else loss

    return call


def count(call: Call) -> tuple[int, int]:
    """Launches of Triton's kernels, and operators of ATen that compute something."""
    with record() as launches, _Computing() as mode:
        call()
    return len(launches), mode.count


class _Computing(TorchDispatchMode):
    """Counts operators of ATen, also those that are called by ours."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        if function.namespace == "quadtree_attention":
            kernel = torch._C.DispatchKey.CompositeExplicitAutograd
            with self:
                return function._op_dk(kernel, *args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.count += not function.is_view and name not in NO_LAUNCH
        return function(*args, **(kwargs or {}))


def variants(name: str, training: bool) -> tuple[int, int]:
    """What Triton compiles at one size of images, and at others after it."""
    model: nn.Module = timm.create_model(name, num_classes=0).to("meta", torch.bfloat16)
    model.train(training)
    seen: set[Any] = set()
    draw, counts = random.Random(SEED), []
    sides = [(IMAGE, IMAGE)] + [(draw.choice(SIDES), draw.choice(SIDES)) for _ in range(SIZES)]
    for height, width in sides:
        images = torch.empty(1, 3, height, width, device="meta", dtype=torch.bfloat16)
        with record() as launches, torch.set_grad_enabled(training):
            out: Tensor = model(images)
            if training:
                torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True)
        seen |= {launch.variant for launch in launches}
        counts.append(len(seen))
    return counts[0], counts[-1] - counts[0]
