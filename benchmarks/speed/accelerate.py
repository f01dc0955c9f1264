# SPDX-License-Identifier: Apache-2.0
"""The small vision transformer of benchmarks/vit.py, dense and with variant C by `accelerate`.

End to end: one image, without gradients, at several numbers of tokens. The weights are random.
"dense" is PyTorch's fused attention.
"""

from argparse import Namespace
from dataclasses import replace

import torch

from benchmarks.measure import Call, cpu_peak_mib, inference
from benchmarks.suite import Work, cases
from benchmarks.vit import PATCH, VARIANTS, make_vit
from quadtree_attention import accelerate

ATTENTIONS = ("dense", *VARIANTS)


def plan(options: Namespace) -> list[list[Work]]:
    """One row at a time: dense attention takes long at many tokens, and is then timed once."""
    planned = cases(side=options.sides, attention=options.attentions)
    return [[Work(case, options.device, {"topk": options.topk})] for case in planned]


def prepare(work: Work) -> Call:
    """One forward pass of an image with side x side tokens."""
    torch.manual_seed(0)
    model = make_vit().to(work.device).eval()
    x = torch.randn(1, 3, *[PATCH * work["side"]] * 2, device=work.device)
    if work["attention"] != "dense":
        own = VARIANTS[work["attention"]]
        accelerate(model, work.more["topk"], min_tokens=1, use_plan=False, **own)
    return inference(model, x)


def peak(work: Work, options: Namespace) -> float | None:
    """Peak memory on a CPU, beyond weights and image."""
    small = replace(work, case=work.case | {"side": 16})
    return cpu_peak_mib(prepare, small, work, threads=options.threads)
