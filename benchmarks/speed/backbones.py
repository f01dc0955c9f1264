# SPDX-License-Identifier: Apache-2.0
"""Time and memory of whole backbones beside those they replace, forward and in training.

A training step is forward, loss and the gradients of all parameters, without an optimizer.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quadtree_attention.models.backbone  # noqa: F401  registers our models with timm
from benchmarks.measure import Call
from benchmarks.result import PASSES, TASKS
from benchmarks.suite import Work, cases

# What each model of ours replaces: the same layout with another attention.
BASELINES = {
    **{f"quadtree_{a}_b{size}": f"pvt_v2_b{size}" for a in "ab" for size in range(5)},
    "swin_tiny_quadtree_b": "swin_tiny_patch4_window7_224",
}
MODELS = (*BASELINES, *dict.fromkeys(BASELINES.values()))
TEST_MODEL = "test_quadtree"
KNOWN = (*MODELS, TEST_MODEL)
DEFAULT = (
    "quadtree_b_b0,pvt_v2_b0,quadtree_b_b2,pvt_v2_b2,swin_tiny_quadtree_b,"
    "swin_tiny_patch4_window7_224"
)
TOPK = {"classification": 8, "backbone": 32}
IMAGE = {"classification": (224, 224), "backbone": (800, 1344)}
CLASSES = 1000
SEED = 0
LIBRARIES = ("timm",)


def plan(options: Namespace) -> list[list[Work]]:
    """Every call to time; those that are compared with each other are adjacent."""
    planned = cases(task=options.tasks, pass_=options.passes, mode=options.modes,
                    model=options.models)  # fmt: skip
    for case in planned:
        batch = options.batch if case["task"] == TASKS[0] else 1
        case |= {
            "baseline": BASELINES.get(case["model"]),
            "images": [batch, 3, *IMAGE[case["task"]]],
        }
        case["precision"] = _precision(options, case["pass"])
    return [[Work(case, options.device)] for case in planned]


def beside_baseline(part: str, model: str, **more: Any) -> list[Work]:
    """A model and what it replaces, to be timed in turns; the model alone if that is nothing."""
    both = {model: BASELINES.get(model)}
    both |= {baseline: None for baseline in both.values() if baseline}
    return [Work({"part": part, "model": m, "baseline": b, **more}) for m, b in both.items()]


def _precision(options: Namespace, name: str) -> str:
    usual = "autocast" if name == PASSES[1] else "cast"
    how = usual if options.precision == "usual" else options.precision
    autocast = options.dtype != "float32" and how == "autocast"
    return f"{options.dtype} autocast" if autocast else options.dtype


def prepare(work: Work) -> Call:
    """The call to time, on a model and images that exist already."""
    dtype_name, _, autocast = work["precision"].partition(" ")
    dtype = getattr(torch, dtype_name)
    stored = torch.float32 if autocast else dtype
    training = work["pass"] == PASSES[1]
    model: Any = build(work["model"], work["task"], work["images"][2:])
    model = model.to(work.device, stored).train(training)
    random = torch.Generator().manual_seed(SEED)
    images = torch.randn(work["images"], generator=random).to(work.device, stored)
    labels = torch.randint(CLASSES, (len(images),), generator=random).to(work.device)
    parameters = list(model.parameters())
    if "compile" in work["mode"]:
        model = torch.compile(model, dynamic=False)

    def call() -> Any:
        with (
            torch.set_grad_enabled(training),
            torch.autocast(work.device, dtype, enabled=bool(autocast)),
        ):
            out = model(images)
        if not training:
            return out
        return torch.autograd.grad(_loss(out, labels), parameters, allow_unused=True)

    return call


def build(name: str, task: str, image: Sequence[int], **options: Any) -> nn.Module:
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
        elif name.startswith("swin") and not is_ours(name):
            options["img_size"] = tuple(image)
    return timm.create_model(name, **options)


def is_ours(name: str) -> bool:
    """Whether it is a model of this package."""
    return name in BASELINES or name == TEST_MODEL


def _loss(result: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
    """A loss that reaches all of the result, at almost no cost."""
    if isinstance(result, Tensor):
        return F.cross_entropy(result.float(), labels)
    return torch.stack([x.float().square().mean() for x in result]).sum()
