# SPDX-License-Identifier: Apache-2.0
"""The paper's running time: RetinaNet on the b0 backbone, with quadtree attention and with PVTv2's.

All are the same code but for the attention. PVTv2's is measured as its own code has it, which holds
the scores of all queries, and by PyTorch's fused kernels, which do not. "network" is backbone,
pyramid and heads; "detector" also resizes the images and chooses boxes.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from benchmarks.measure import Call, cpu_peak_mib, scores_held
from benchmarks.suite import Work, cases
from quadtree_attention import models

ATTENTIONS: dict[str, dict[str, Any]] = {  # options of the detector
    "held": {"attention": "spatial_reduction"},
    "sr": {"attention": "spatial_reduction"},
    "quadtree": {},
}
PARTS = ("network", "detector")
CLASSES = 80
SMALL = [64, 64]  # of warm-up
# Off, since with it torch 2.11 fails on PVTv2's attention in bfloat16 ("CantSplit").
INDUCTOR = {"triton.coalesce_tiling_analysis": False}
SEED = 0
LIBRARIES = ("torchvision",)


class Network(nn.Module):
    """A detector from images to logits and boxes of all anchors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, images: Tensor) -> dict[str, list[Tensor]]:
        return self.head(list(self.backbone(images).values()))


def plan(options: Namespace) -> list[list[Work]]:
    """Every call to measure, together with those that it is compared with."""
    planned = cases(model=[options.model], image=options.images, part=options.parts,
                    batch=[options.batch], precision=options.precisions,
                    mode=options.modes)  # fmt: skip
    lists = []
    for case in planned:
        if case["part"] == PARTS[0] or case["mode"] == options.modes[0]:
            case |= {"mode": case["mode"] if case["part"] == PARTS[0] else "eager"}
            works = [case | {"attention": attention} for attention in options.attentions]
            lists.append([Work(work, options.device) for work in works])
    return lists


def prepare(work: Work) -> Call:
    """The call to measure, on a model and images that exist already."""
    torch.manual_seed(SEED)
    width, height = work["image"]
    dtype = getattr(torch, work["precision"])
    limits = {"min_size": min(width, height), "max_size": max(width, height)}
    whole: Any = models.create(
        work["model"], num_classes=CLASSES, **limits, **ATTENTIONS[work["attention"]]
    )
    whole = whole.to(work.device, dtype).eval()
    images = torch.rand(work["batch"], 3, height, width).to(work.device, dtype)
    held = work["attention"] == "held"
    if work["part"] == PARTS[1]:
        return partial(_forward, whole, list(images), held)
    network = Network(whole)
    return partial(_forward, compiled(network) if "compile" in work["mode"] else network, images,
                   held)  # fmt: skip


def peak(work: Work, options: Namespace) -> float | None:
    """Peak memory on a CPU beyond model and images; None of a compiled network."""
    if "compile" in work["mode"]:
        return None
    small = replace(work, case=work.case | {"image": SMALL})
    return cpu_peak_mib(prepare, small, work, threads=options.threads)


def compiled(network: nn.Module) -> Any:
    """The network, compiled apart from all others.

    The compiler's caches do not tell graphs apart by the kernel that attention takes: they would
    return the network with scores held for the fused one. So each network gets a class of its own,
    which is part of the key in memory, and the cache on disk is off from here on.
    """
    kind = type(network)
    network.__class__ = type(kind.__name__, (kind,), {})
    torch._functorch.config.enable_autograd_cache = False
    return torch.compile(network, dynamic=False, options=INDUCTOR)


def _forward(model: Callable[[Any], object], images: Any, held: bool) -> object:
    with torch.no_grad(), scores_held(held):
        return model(images)
