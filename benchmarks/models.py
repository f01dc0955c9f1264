# SPDX-License-Identifier: Apache-2.0
"""The networks that are counted and timed: how each is built, and the calls made on them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import quadtree_attention.models.backbone  # noqa: F401  registers our models with timm

Task = Literal["classification", "backbone"]
Image = tuple[int, int]

# What each model of ours replaces: the same layout with another attention.
RIVALS = {
    **{f"quadtree_{a}_b{size}": f"pvt_v2_b{size}" for a in "ab" for size in range(5)},
    "swin_tiny_quadtree_b": "swin_tiny_patch4_window7_224",
}
MODELS = (*RIVALS, *dict.fromkeys(RIVALS.values()))
TEST_MODEL = "test_quadtree"
TOPK: dict[Task, int] = {"classification": 8, "backbone": 32}
COUNTED_IMAGE: dict[Task, Image] = {"classification": (224, 224), "backbone": (800, 1333)}
TIMED_IMAGE: dict[Task, Image] = {"classification": (224, 224), "backbone": (800, 1344)}
CLASSES = 1000
SEED = 0


def build(name: str, task: Task, image: Image, **options: Any) -> nn.Module:
    """A model with random weights: a classifier, or a backbone that returns four maps.

    Args:
        name: Name in timm's registry.
        task: "classification" or "backbone".
        image: Rows and columns of the images it will be given.
        **options: Passed on to timm.
    """
    torch.manual_seed(SEED)
    if is_ours(name):
        options = {"topk": TOPK[task]} | options
    if task == "backbone":
        options["features_only"] = True
        if name.startswith(("quadtree_b_", TEST_MODEL)):
            options.setdefault("value_act", "relu")  # only a learned value pyramid has one
        elif name in RIVALS.values() and name.startswith("swin"):
            options["img_size"] = image
    return timm.create_model(name, **options)


def is_ours(name: str) -> bool:
    """Whether it is a model of this package."""
    return name in RIVALS or name == TEST_MODEL


@dataclass(frozen=True)
class Count:
    """Parameters, and multiply-accumulates of one image.

    Attributes:
        params: Parameters.
        macs: Multiply-accumulates: half of PyTorch's FLOPs.
        attention_macs: Those of scores and messages alone.
    """

    params: int
    macs: int
    attention_macs: int


def count(model: nn.Module, image: Image, *, fake: bool = True) -> Count:
    """Counts a model on one image; `fake` computes shapes only, which gives the same numbers."""
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    # As plain matrix products, full attention is counted whatever kernel would run it.
    with mode, torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as c:
        model.eval()(torch.zeros(1, 3, *image))
    flops = c.get_flop_counts()["Global"]
    attention = [n for op, n in flops.items() if str(op).startswith(("quadtree_", "aten.bmm"))]
    params = sum(parameter.numel() for parameter in model.parameters())
    return Count(params, sum(flops.values()) // 2, sum(attention) // 2)


class RetinaNet(nn.Module):
    """A backbone with the neck and the head of RetinaNet for COCO, up to its raw outputs.

    Args:
        backbone: A model that `build` made for the task "backbone".
    """

    def __init__(self, backbone: nn.Module) -> None:
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


@dataclass(frozen=True)
class Work:
    """One call to time.

    Attributes:
        model: Name in timm's registry.
        task: "classification" or "backbone".
        training: Forward, loss and the gradients of all parameters, instead of forward alone.
        batch: Images per call.
        device: "cpu" or "cuda".
        dtype: Name of the dtype that is computed in.
        autocast: Weights stay in float32 and are cast where they are used.
        compiled: Whether the model goes through `torch.compile`.
    """

    model: str
    task: Task
    training: bool
    batch: int
    device: str
    dtype: str
    autocast: bool
    compiled: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of the images."""
        return (self.batch, 3, *TIMED_IMAGE[self.task])

    @property
    def precision(self) -> str:
        """The dtype, and how the model comes to compute in it."""
        return f"{self.dtype} autocast" if self.autocast else self.dtype


def prepare(work: Work) -> Callable[[], object]:
    """The call to time, on a model and images that exist already."""
    dtype = getattr(torch, work.dtype)
    stored = torch.float32 if work.autocast else dtype
    model: nn.Module = build(work.model, work.task, TIMED_IMAGE[work.task])
    model = model.to(work.device, stored).train(work.training)
    random = torch.Generator().manual_seed(SEED)
    images = torch.randn(work.shape, generator=random).to(work.device, stored)
    labels = torch.randint(CLASSES, (work.batch,), generator=random).to(work.device)
    parameters = list(model.parameters())
    if work.compiled:
        model = torch.compile(model, dynamic=False)

    def forward() -> Any:
        with torch.autocast(work.device, dtype, enabled=work.autocast):
            return model(images)

    def inference() -> Any:
        with torch.no_grad():
            return forward()

    def training() -> tuple[Tensor | None, ...]:
        loss = _loss(forward(), labels)
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return training if work.training else inference


def _loss(result: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
    """Any loss that reaches all of the result; its own cost is next to nothing."""
    if isinstance(result, Tensor):
        return F.cross_entropy(result.float(), labels)
    return torch.stack([x.float().square().mean() for x in result]).sum()
