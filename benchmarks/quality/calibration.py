# SPDX-License-Identifier: Apache-2.0
"""K by attention mass: what the packaged matcher and stereo network lose and save, on a CPU.

K is calibrated for every mass on a few pairs, and the networks are scored with it on others: poses
of ScanNet's pairs, and disparities of the Middlebury pairs of 2001 and 2003. A mass of null is the
fixed K of the network. `k` are means over layers, per level, coarse -> fine; `cells` is the mean
number of scores that a query computes, of heads and layers. Times are in `speed calibration`.
"""

import statistics
from argparse import ArgumentParser, Namespace
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch

from benchmarks.quality import Method, check_folders, find_and_score, matching, without_truth
from benchmarks.result import ROOT
from benchmarks.suite import Work
from quadtree_attention.images import images_inside
from quadtree_attention.inspect import calibrate_topk, record
from quadtree_attention.models.topk import quadtree_layers, set_topk
from quadtree_attention.ops.attention.tree import Tree
from quadtree_attention.ops.planning.flops import candidates_per_query
from quadtree_attention.tasks.contract import get_task
from quadtree_attention.tasks.stereo.readers import open_source

DATA = ROOT.parent / "shared" / "data"
LIBRARIES = ("opencv", "poselib")
TASKS = ("match", "stereo")
CALIBRATED_ON = {
    "match": "free_multiview/lund_street/images",
    "stereo": "stereo/MIDDLEBURY_2005_2006",
}
SCORED_ON = {"match": "matching", "stereo": "stereo/MIDDLEBURY_2001_2003"}


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    folders = [name[task] for name in (CALIBRATED_ON, SCORED_ON) for task in options.tasks]
    check_folders(parser, [options.data / folder for folder in folders])


def plan(options: Namespace) -> list[list[Work]]:
    """Fixed K, then every mass."""
    options.calibrated_on = {task: CALIBRATED_ON[task] for task in options.tasks}
    options.calibrated_on["pairs"] = options.samples
    return [
        [Work({"task": task, "mass": mass}, "cpu")]
        for task in options.tasks
        for mass in (None, *options.masses)
    ]


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    task, mass = work["task"], work["mass"]
    plain = {"guided": "never"} if task == "match" else {}  # one pass over each pair
    predictor = get_task(task).load("predictor").from_pretrained(device="cpu", **plain)
    folder = options.data / CALIBRATED_ON[task]
    if task == "match":
        samples = list(islice(pairwise(images_inside(folder)), options.samples))
    else:
        source = open_source(folder)
        samples = [source.images(i) for i in range(options.samples)]
    if mass is not None:
        items = [input_of(predictor, sample) for sample in samples]
        set_topk(predictor.network, calibrate_topk(predictor.network, items, mass=mass))
    layers: dict[str, Any] = quadtree_layers(predictor.network)
    with torch.inference_mode(), record(predictor.network, layers=list(layers)) as seen:
        predictor.network(input_of(predictor, samples[0]))
    topk = {name: list(seen[name].topk) for name in layers}
    cells = [
        sum(candidates_per_query(Tree(one.key_grid, one.num_levels), one.topk))
        for one in (seen[name][0] for name in layers)
    ]
    method = Method("network", partial(without_truth, predictor), {})
    name = f"{task}-{mass}"
    if task == "match":
        known = matching.prepare("scannet", options.data / SCORED_ON[task], options.folder / name)
        found = matching.measure(method, known, options.folder / name)
        score = {
            "auc20": found["estimators"]["poselib"]["auc"]["20"],
            "precision": found["precision"],
            "matches": found["matches"],
        }
        pairs = found["pairs"]
    else:
        source = open_source(options.data / SCORED_ON[task])
        scores, _ = find_and_score(task, method, source, options.folder / name)
        mean = scores.to_dict()["mean"]
        score = {"epe": mean["epe_all"], "bad3": mean["bad3_all"], "d1": mean["d1_all"]}
        pairs = len(source)
    per_level = zip(*topk.values(), strict=True)
    return {
        "k": [float(statistics.mean(level)) for level in per_level],
        "cells": float(statistics.mean(cells)),
        "pairs": pairs,
        "score": score,
        "details": {"topk": topk},
    }


def input_of(predictor: Any, images: Any) -> dict[str, torch.Tensor]:
    """What the network of a pair is called with."""
    tensors = predictor.stack([predictor.preprocess(*images)])
    return {f"image{i}": tensor for i, tensor in enumerate(tensors)}
