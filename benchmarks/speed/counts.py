# SPDX-License-Identifier: Apache-2.0
"""Parameters and multiply-accumulates of backbones, beside published figures; needs no GPU.

PyTorch's FLOP counter runs on shapes alone; multiply-accumulates are half of what it counts. The
RetinaNet around a backbone is torchvision's neck and head, 80 classes.
"""

import json
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.result import FIGURES, ROOT, TASKS
from benchmarks.speed.backbones import BASELINES, TOPK, build, is_ours
from benchmarks.suite import Work

PUBLISHED = ROOT / "benchmarks" / "published.json"
IMAGE = {"classification": (224, 224), "backbone": (800, 1333)}
LIBRARIES = ("timm",)


def plan(options: Namespace) -> list[list[Work]]:
    """Every model for classification, then every backbone."""
    return [[Work({"task": task, "model": m})] for task in TASKS for m in options.models]


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """The counts of one model, beside what is published of it."""
    task, name = work["task"], work["model"]
    data = json.loads(PUBLISHED.read_text())
    known = data[task].get(name, {})
    image = IMAGE[task]
    values = {
        "baseline": BASELINES.get(name),
        "image": list(image),
        "topk": TOPK[task] if is_ours(name) else None,
        **count(_counted(name, task, image), image),
    }
    if task == "backbone":
        values["detector"] = _detector(name, known.get("image"))
    figures = {figure: known[figure] for figure in FIGURES if figure in known}
    values["published"] = {
        figure: {"value": value, "source": data["sources"][source]}
        for figure, (value, source) in figures.items()
    }
    return values | {"note": data["notes"][task].get(name)}


def _counted(name: str, task: str, image: Sequence[int]) -> nn.Module:
    # A named backend does not fall back to one whose operations have no formula.
    return build(name, task, image, **({"backend": "cpu"} if is_ours(name) else {}))


def _detector(name: str, published_image: list[int] | None) -> dict[str, Any]:
    """The whole RetinaNet, counted once more where the published figure is of another image."""

    def counted(image: Sequence[int]) -> dict[str, int]:
        return count(RetinaNet(_counted(name, "backbone", image)), image)

    found = counted(IMAGE["backbone"])
    values: dict[str, Any] = {key: found[key] for key in ("params", "macs")}
    if published_image:
        values["published_image"] = published_image
        values["macs_at_published_image"] = counted(published_image)["macs"]
    return values


def count(model: nn.Module, image: Sequence[int]) -> dict[str, int]:
    """Parameters, multiply-accumulates of one image, and those of scores and messages alone.

    Shapes only are computed, which gives the same numbers.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        return counts_of(model.eval(), torch.zeros(1, 3, *image))


def counts_of(
    model: nn.Module, data: Any, *, within: tuple[str, ...] = ("Global",)
) -> dict[str, int]:
    """As `count`, of one call; scores and messages in modules whose names end like one `within`."""
    # As plain matrix products, full attention is counted whatever kernel would run it.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(data)
    flops = counter.get_flop_counts()
    modules = [flops[name] for name in flops if name.endswith(within)]
    # An operation computes scores or messages if it is one of these
    names = ("quadtree_", "aten.bmm")
    attention = sum(n for ops in modules for op, n in ops.items() if str(op).startswith(names))
    return {
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "macs": sum(flops["Global"].values()) // 2,
        "attention_macs": attention // 2,
    }


class RetinaNet(nn.Module):
    """A backbone of `build` with neck and head of RetinaNet for COCO, up to its raw outputs."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        from torchvision.models.detection.retinanet import RetinaNetHead
        from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7

        self.backbone = backbone
        self.channels = backbone.feature_info.channels()
        extra = LastLevelP6P7(self.channels[-1], 256)
        self.neck = FeaturePyramidNetwork(self.channels[1:], 256, extra)
        self.head = RetinaNetHead(256, num_anchors=9, num_classes=80)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        pairs = zip(self.backbone(images), self.channels, strict=True)
        maps = [x if x.shape[1] == dim else x.movedim(-1, 1) for x, dim in pairs]  # Swin's are NHWC
        pyramid = self.neck(OrderedDict((str(i), x) for i, x in enumerate(maps[1:])))
        return self.head(list(pyramid.values()))
