# SPDX-License-Identifier: Apache-2.0
"""Memory of the paper's networks on one image or pair in float32: the peak of live storages.

Networks run on fake tensors, so nothing has to fit and no GPU is needed. The peak has weights,
images and, in training, gradients; it lacks the workspaces of kernels and what an allocator or a
driver adds. "checkpointed" training recomputes the layers of the transformer in the backward pass.
PVTv2's attention holds all scores, as in its own code.
"""

import sys
from argparse import Namespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.measure import MIB, StoragePeak, scores_held
from benchmarks.speed.detectors import CLASSES, Network
from benchmarks.speed.stereo import noise
from benchmarks.suite import Work, cases
from quadtree_attention import models, use_backend
from quadtree_attention.models.parts import row_attention, sttr_attention
from quadtree_attention.tasks.stereo.losses import stereo_losses

STEREO = ("sttr", "sttr_quadtree")
PAIR = [960, 540]
PASSES = ("forward", "training", "checkpointed")
DETECTOR = "retinanet_quadtree_b_b0"
FOCAL = {"focal_window": [7, 5, 3, 1]}  # by stage, as in the original
ATTENTIONS: dict[str, dict[str, Any]] = {  # options of the detector
    "spatial_reduction": {"attention": "spatial_reduction", "lepe": False},
    "spatial_reduction + LePE": {"attention": "spatial_reduction", "lepe": True},
    "window": {"attention": "window", "lepe": False},
    "window + LePE": {"attention": "window", "lepe": True},
    "focal": {"attention": "focal", "attention_options": FOCAL, "lepe": False},
    "focal + LePE": {"attention": "focal", "attention_options": FOCAL, "lepe": True},
    "quadtree_b": {},
}
IMAGE = [1333, 800]
DEVICES = {"sttr": "cpu", "sttr_quadtree": "cpu", DETECTOR: "cuda"}  # of fake tensors
ENTRIES = 2**25  # of the assignment at a time, as on a GPU
LIBRARIES = ("torchvision",)


def plan(options: Namespace) -> list[list[Work]]:
    """One network after the other."""
    stereo = cases(model=STEREO, attention=[None], image=[PAIR], pass_=PASSES)
    detectors = cases(model=[DETECTOR], attention=ATTENTIONS, image=[IMAGE], pass_=PASSES[:1])
    return [[Work(case)] for case in [*stereo, *detectors] if case["model"] in options.models]


def measure_row(work: Work, options: Namespace) -> dict[str, float]:
    """The peak of one pass, and what there was before it."""
    stereo, device = work["model"] in STEREO, DEVICES[work["model"]]
    width, height = work["image"]
    held = (work["attention"] or "").startswith("spatial")
    with torch.device("meta"):
        if stereo:
            own: dict[str, Any] = {} if work["model"] == "sttr" else {"backend": "cpu"}
            model: Any = models.create(work["model"], max_entries=ENTRIES, **own)
            model.train(work["pass"] != PASSES[0])
            model.set_grad_checkpointing(work["pass"] == PASSES[2])
        else:
            own = ATTENTIONS[work["attention"]]
            model = Network(models.create(work["model"], num_classes=CLASSES, **own)).eval()
    with (  # as on a GPU: attention of all rows at once, and Sinkhorn in PyTorch
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.object(sttr_attention, "CPU_SCORES", sys.maxsize),
        patch.object(row_attention, "CPU_NUMBERS", sys.maxsize),
        use_backend("reference"),
    ):
        model.to_empty(device=device)
        with StoragePeak() as storages:
            storages.add(*model.parameters(), *model.buffers())
            size = 1, 3, height, width
            batch: Any = noise(width, height, device) if stereo else torch.rand(size, device=device)
            before = storages.live
            if model.training:
                output = model(batch, true_disparity=batch["disparity0"])
                losses = stereo_losses(output, batch, model.at_cells, model.max_disparity)
                torch.stack(list(losses.values())).sum().backward()
            else:
                with torch.no_grad(), scores_held(held):
                    model(batch)
    return {"peak_mib": round(storages.peak / MIB, 1), "before_mib": round(before / MIB, 1)}
