# SPDX-License-Identifier: Apache-2.0
"""Tiny weights, images and data sets of every task."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from quadtree_attention import models
from quadtree_attention.models.weights import save_weights

CLASSES = ["disc", "square"]
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {  # by task: a network and its options
    "classify": ("test_quadtree", {"num_classes": 2}),
    "match": (
        "loftr_quadtree_small",
        {"dims": [16, 24, 32], "num_pairs": 1, "num_heads": 2, "fine_heads": 2},
    ),
    "stereo": (
        "sttr_quadtree_small",
        {
            "dims": [8, 8, 8, 8],
            "dim": 16,
            "num_layers": 1,
            "num_heads": 2,
            "refine_dim": 4,
            "context": [8, 8, 8, 8],
        },
    ),
    "detect": (
        "retinanet_test_quadtree",
        {"num_classes": 2, "min_size": 48, "max_size": 64, "channels": 16, "score_thresh": 0.0},
    ),
    "segment": ("semfpn_test_quadtree", {"num_classes": 2, "channels": 8, "head_channels": 8}),
}
HAS_CLASSES = ("classify", "detect", "segment")
HEADS = {"classify": "head", "segment": "classifier"}  # whose weights are nearly 0 at first
OWN = {  # so that there are results, without the search for an alignment
    "match": {"threshold": 0.0, "guided": "never"},
    "detect": {"threshold": 0.0},
}


def write_weights(task: str, path: Path, /, **changed: Any) -> Path:
    """Random weights of a tiny network, with their card.

    `changed` replaces entries of the card, among them `model` and `kwargs`; ... leaves one out.
    """
    name, options = NETWORKS[task]
    card = {"model": name, "kwargs": options, "task": task}
    if task in HAS_CLASSES:
        card["classes"] = CLASSES
    card |= changed
    torch.manual_seed(3)
    network = models.create(card["model"], **card["kwargs"])
    head = getattr(network, HEADS.get(task, ""), None)
    if isinstance(head, nn.Module) and not isinstance(head, nn.Identity):
        nn.init.normal_(head.weight)  # else all images or pixels have one class
    card = {key: value for key, value in card.items() if value is not ...}
    save_weights(path, network.state_dict(), card, overwrite=True)
    return path


def picture(seed: int, size: tuple[int, int] = (72, 56)) -> Image.Image:
    """Blurred noise of (width, height), in which there is something to match."""
    coarse = np.random.default_rng(seed).integers(0, 256, (size[1] // 4, size[0] // 4, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def sample(task: str, seed: int = 0, size: tuple[int, int] = (72, 56)) -> tuple[Image.Image, ...]:
    """The images of one item."""
    first = picture(seed, size)
    if task not in ("match", "stereo"):
        return (first,)
    shifted = np.roll(np.asarray(first), -4, axis=1)
    return first, Image.fromarray(shifted)


def item(images: tuple[Any, ...]) -> Any:
    """What `many` takes for one item."""
    return images[0] if len(images) == 1 else images


def write_data(task: str, root: Path, count: int = 3) -> dict[str, Any]:
    """A small data set with truth; the arguments `data`, `split` and `reader` of `evaluate`."""
    writer = {"classify": _labelled, "match": _pairs, "stereo": _stereo, "detect": _objects}
    return writer.get(task, _label_maps)(root, [sample(task, seed) for seed in range(count)])


def files_of(root: Path) -> list[Path]:
    """Images of a data set, one or more of each sample."""
    return sorted(p for p in root.rglob("*.png") if p.parent.name not in ("labels", "occlusion"))


def _labelled(root: Path, samples: list[tuple[Image.Image, ...]]) -> dict[str, Any]:
    for index, (image,) in enumerate(samples):
        folder = root / "val" / CLASSES[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{index}.png")
    return {"data": root}


def _pairs(root: Path, samples: list[tuple[Image.Image, ...]]) -> dict[str, Any]:
    root.mkdir(parents=True, exist_ok=True)
    lines = []
    shift = np.array([[1, 0, -4], [0, 1, 0], [0, 0, 1]])
    for index, images in enumerate(samples):
        for name, image in zip("ab", images, strict=True):
            image.save(root / f"{name}{index}.png")
        lines.append(f"a{index}.png b{index}.png {' '.join(map(str, shift.ravel()))}")
    (root / "pairs.txt").write_text("\n".join(lines) + "\n")
    return {"data": root / "pairs.txt", "reader": {"images": root}}


def _stereo(root: Path, samples: list[tuple[Image.Image, ...]]) -> dict[str, Any]:
    for side in ("left", "right", "disparity"):
        (root / side).mkdir(parents=True, exist_ok=True)
    for index, images in enumerate(samples):
        for side, image in zip(("left", "right"), images, strict=True):
            image.save(root / side / f"{index}.png")
        np.save(root / "disparity" / f"{index}.npy", np.full(images[0].size[::-1], 4.0))
    return {"data": root, "split": "all"}


def _objects(root: Path, samples: list[tuple[Image.Image, ...]]) -> dict[str, Any]:
    (root / "images" / "val").mkdir(parents=True, exist_ok=True)
    (root / "annotations").mkdir(exist_ok=True)
    listed, objects = [], []
    for index, (image,) in enumerate(samples, start=1):
        name = f"{index}.png"
        image.save(root / "images" / "val" / name)
        listed.append(
            {"id": index, "file_name": name, "width": image.width, "height": image.height}
        )
        box = {"bbox": [4, 4, 30, 20], "area": 600, "iscrowd": 0, "category_id": 1 + index % 2}
        objects.append({"id": index, "image_id": index, **box})
    kinds = [{"id": number, "name": name} for number, name in enumerate(CLASSES, start=1)]
    content = {"images": listed, "annotations": objects, "categories": kinds}
    (root / "annotations" / "instances_val.json").write_text(json.dumps(content))
    return {"data": root}


def _label_maps(root: Path, samples: list[tuple[Image.Image, ...]]) -> dict[str, Any]:
    for kind in ("images", "labels"):
        (root / kind / "val").mkdir(parents=True, exist_ok=True)
    for index, (image,) in enumerate(samples):
        image.save(root / "images" / "val" / f"{index}.png")
        labels = np.zeros(image.size[::-1], np.uint8)
        labels[:, image.width // 2 :] = 1
        Image.fromarray(labels).save(root / "labels" / "val" / f"{index}.png")
    (root / "classes.json").write_text(json.dumps({"classes": CLASSES}))
    return {"data": root}
