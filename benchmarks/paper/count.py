# SPDX-License-Identifier: Apache-2.0
"""Parameters and FLOPs: classifiers, backbones and Mask R-CNN by the authors' rule; needs no GPU.

Backbones are those of the authors' counter, which builds the networks of classification: their
value branch has GELU, which counts nothing, where detectors have ReLU. Mask R-CNN is a backbone
with mmdet's pyramid and heads. "stereo" is a pair through STTR and its quadtree network, products
only: the paper's counting rule for them is not public. "complexity" is attention alone, beside the
closed form of the paper's appendix A.1.
"""

from argparse import Namespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.paper.rule import count
from benchmarks.speed.backbones import TOPK, build, is_ours
from benchmarks.speed.ops import GROWTH
from benchmarks.speed.stereo import count_of
from benchmarks.suite import Work
from quadtree_attention import models, quadtree_attention

SIZES = range(5)
QUADTREE = [f"quadtree_b_b{size}" for size in SIZES]
MODELS = ("quadtree_a_b0", *QUADTREE, *(f"pvt_v2_b{size}" for size in SIZES))
WITHOUT_MPE = "quadtree_b_b2 without LePE"  # the paper's MPE
SWIN = "swin_tiny_quadtree_b"
IMAGE = {"classification": [224, 224], "backbone": [800, 1344]}
ODD_IMAGE = [800, 1333]  # not padded: PVTv2-b0 in the paper's Table 4
PAIR = [540, 960]
STEREO = ("sttr", "sttr_quadtree")
TASKS = ("classification", "backbone", "mask_rcnn", "stereo", "complexity")
CLASSES = 80
CHANNELS = 256
LIBRARIES = ("timm", "torchvision")


def plan(options: Namespace) -> list[list[Work]]:
    """One count after the other."""
    cases = []
    for task in IMAGE:
        names = [*MODELS, *([WITHOUT_MPE, SWIN] if task == "classification" else [])]
        cases += [_case(task, name, IMAGE[task], TOPK[task]) for name in names]
    cases += [_case("backbone", "pvt_v2_b0", ODD_IMAGE, None)]
    cases += [_case("mask_rcnn", name, [], TOPK["backbone"]) for name in QUADTREE]
    cases += [_case("stereo", name, PAIR, None) for name in STEREO]
    cases += [_case("complexity", case.name, list(case.grid), case.topk) for case in GROWTH]
    return [[Work(case)] for case in cases if case["task"] in options.tasks]


def _case(task: str, model: str, image: list[int], topk: Any) -> dict[str, Any]:
    topk = None if model.startswith("pvt") else topk
    return {"task": task, "model": model, "image": image, "topk": topk}


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """The counts of one row."""
    if work["task"] == "mask_rcnn":
        return mask_rcnn(work["model"])
    if work["task"] == "stereo":
        rows, columns = work["image"]
        counted = count_of(work["model"], columns, rows)
        return {"params": counted["params"], "macs": counted["macs"]}
    if work["task"] == "complexity":
        return complexity(work["model"])
    name, _, without = work["model"].partition(" ")
    ours = {"backend": "cpu", "topk": work["topk"]} | ({"lepe": False} if without else {})
    gelu = {"value_act": "gelu"} if name in QUADTREE else {}
    model = build(name, work["task"], work["image"], **(ours | gelu if is_ours(name) else {}))
    parts = count(model, work["image"])
    return {"params": _params(model), "macs": sum(parts.values()), "parts": parts}


def _params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def mask_rcnn(backbone: str) -> dict[str, int]:
    """Parameters of Mask R-CNN for COCO with mmdet's heads, and with torchvision's."""
    with torch.device("meta"):
        body: Any = build(backbone, "backbone", IMAGE["backbone"])
        heads = mmdet_heads(body.feature_info.channels())
        whole = models.create(f"mask_rcnn_{backbone}", num_classes=CLASSES)
    return {"params": _params(body) + _params(heads), "torchvision_params": _params(whole)}


def mmdet_heads(channels: list[int]) -> nn.Module:
    """Layers of mmdet's feature pyramid, region proposals, box head and mask head.

    Boxes are regressed for 80 classes and masks predicted for 80; torchvision's heads have 81
    entries in both places.
    """
    pyramid = [nn.Conv2d(dim, CHANNELS, 1) for dim in channels]
    pyramid += [nn.Conv2d(CHANNELS, CHANNELS, 3) for _ in channels]
    proposals = [nn.Conv2d(CHANNELS, CHANNELS, 3), nn.Conv2d(CHANNELS, 3, 1),
                 nn.Conv2d(CHANNELS, 3 * 4, 1)]  # fmt: skip
    boxes = [nn.Linear(CHANNELS * 7 * 7, 1024), nn.Linear(1024, 1024),
             nn.Linear(1024, CLASSES + 1), nn.Linear(1024, CLASSES * 4)]  # fmt: skip
    masks = [nn.Conv2d(CHANNELS, CHANNELS, 3) for _ in range(4)]
    masks += [nn.ConvTranspose2d(CHANNELS, CHANNELS, 2), nn.Conv2d(CHANNELS, CLASSES, 1)]
    return nn.ModuleList([*pyramid, *proposals, *boxes, *masks])


def complexity(name: str) -> dict[str, int]:
    """Multiply-adds of attention as counted, and by the closed form of appendix A.1."""
    case = next(case for case in GROWTH if case.name == name)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, k, v = torch.zeros(3, case.batch, *case.grid, case.heads, case.head_dim)
        quadtree_attention(q, k, v, num_levels=case.num_levels, topk=case.topk, backend="cpu")
    return {"macs": counter.get_total_flops() // 2, "closed_form": closed_form(case)}


def closed_form(case: Any) -> int:
    """2 (H0^2 W0^2 + 4/3 (1 - 4^(1-L)) K H W), times the channels."""
    (rows, columns), levels = case.grid, case.num_levels
    coarsest = (rows >> levels - 1) * (columns >> levels - 1)
    fine = 4 * (4 ** (levels - 1) - 1) * case.topk * rows * columns // (3 * 4 ** (levels - 1))
    return 2 * (coarsest**2 + fine) * case.heads * case.head_dim
