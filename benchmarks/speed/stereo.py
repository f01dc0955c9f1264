# SPDX-License-Identifier: Apache-2.0
"""What a stereo network costs with full and with quadtree attention: work, time and memory.

Weights are fresh and images are noise: nothing that is measured depends on them. `explicit-*` holds
all scores of a layer, as STTR's own code does; `full-*` is PyTorch's fused attention.
"""

import sys
from argparse import Namespace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.measure import Call, scores_held
from benchmarks.result import PASSES
from benchmarks.speed.counts import counts_of
from benchmarks.suite import Work, cases
from quadtree_attention import models, use_backend
from quadtree_attention.models import registry
from quadtree_attention.tasks.stereo.losses import stereo_losses

PRECISIONS = {"float32": None, "bfloat16 autocast": torch.bfloat16}
# The same convolutional parts and position around every attention; `models.create("sttr")` as it is
# has those of STTR, see `count_of`
OURS = {"layout": "hourglass", "position": "rotation"}
NETWORKS: dict[str, dict[str, Any]] = {
    f"{name}-{stride}": {**OURS, "attention": attention, "stride": stride}
    for stride in (3, 2)
    for name, attention in (("explicit", "full"), ("full", "full"), ("quadtree", "quadtree_b"))
}
SEED = 0


def plan(options: Namespace) -> list[list[Work]]:
    """Every call to measure; those that are compared with each other are adjacent."""
    same = {"precision": options.precisions, "network": options.networks}
    planned = cases(image=options.images, pass_=options.passes, **same)
    planned += cases(image=options.large, pass_=PASSES[:1], **same)
    return [[Work(case, options.device)] for case in planned]


def values(work: Work) -> dict[str, int]:
    return count(work["network"], *work["image"])


@cache
def count(network: str, width: int, height: int) -> dict[str, int]:
    """Parameters and multiply-accumulates of one pair, forward; shapes only are computed."""
    return count_of("sttr", width, height, **NETWORKS[network])


def count_of(name: str, width: int, height: int, **options: Any) -> dict[str, int]:
    """As `count`, of any stereo network by its name and options."""
    # all rows at once: nothing is held in memory
    options = {"max_entries": sys.maxsize, **options}
    if registry.preset(name, options)["attention"] != "full":  # the reference has no formula
        options["backend"] = "cpu"
    model = models.create(name, **options).eval()
    with FakeTensorMode(allow_non_fake_inputs=True):
        views = {f"image{i}": torch.zeros(1, 3, height, width) for i in range(2)}
        with use_backend("reference"):  # of Sinkhorn: sums of exponentials, as on a GPU
            return counts_of(model, views, within=("self_attn", "cross_attn"))


def prepare(work: Work) -> Call:
    """The call to measure, on a network and images that exist already."""
    torch.manual_seed(SEED)
    training = work["pass"] == PASSES[1]
    model = models.create("sttr", **NETWORKS[work["network"]]).to(work.device).train(training)
    batch = noise(*work["image"], work.device)
    parameters = list(model.parameters())
    dtype, held = PRECISIONS[work["precision"]], work["network"].startswith("explicit")
    autocast = torch.autocast(work.device, dtype, enabled=dtype is not None)

    def inference() -> object:
        with torch.inference_mode(), autocast, scores_held(held):
            return model(batch).disparity

    def train() -> object:
        with autocast, scores_held(held):
            output = model(batch, true_disparity=batch["disparity0"])
            losses = stereo_losses(output, batch, model.at_cells, model.max_disparity)
            loss = torch.stack(list(losses.values())).sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return train if training else inference


def noise(width: int, height: int, device: str) -> dict[str, Tensor]:
    """A pair as `tasks.stereo` gives it to a network."""
    occluded = torch.rand(1, height, width, device=device) < 0.1
    return {
        "image0": torch.rand(1, 3, height, width, device=device),
        "image1": torch.rand(1, 3, height, width, device=device),
        "disparity0": torch.rand(1, height, width, device=device) * width / 8,
        "known0": torch.ones_like(occluded),
        "visible0": ~occluded,
        "occluded0": occluded,
    }
