# SPDX-License-Identifier: Apache-2.0
"""Small data sets in COCO's format, and weights of tiny detectors, for the tests of detection."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from quadtree_attention.tasks.detect.rle import encode_mask
from tests.conftest import ROOT
from tests.support import tiny

SHARED = ROOT.parent / "shared" / "data"
CATEGORIES = [{"id": 7, "name": "disc"}, {"id": 3, "name": "square"}, {"id": 90, "name": "star"}]
TINY = {"min_size": 48, "max_size": 64, "channels": 16}  # of detectors


def entry(number, box, *, image=1, category=3, **more):
    area = box[2] * box[3] if len(box) == 4 else 0
    basics = {"id": number, "image_id": image, "category_id": category, "bbox": box, "area": area}
    return {**basics, "iscrowd": 0, **more}


def with_mask(annotation, height=30, width=40):
    """The annotation with a mask that fills its box."""
    x, y, w, h = annotation["bbox"]
    mask = np.zeros((height, width), bool)
    mask[y : y + h, x : x + w] = True
    return {**annotation, "segmentation": encode_mask(mask)}


def write_split(root, split="val", *, annotations=(), sizes=((40, 30), (32, 36)), **more):
    """Images 1, 2, ... of noise, and the file of their objects, whose path comes back."""
    folder = Path(root) / "images" / split
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, (width, height) in enumerate(sizes, start=1):
        noise = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
        listed.append(
            {"id": number, "file_name": f"{number}.png", "width": width, "height": height}
        )
    content = {"images": listed, "annotations": list(annotations), "categories": CATEGORIES}
    path = Path(root) / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**content, **more}))
    return path


def write_weights(path, kind="retinanet", classes=("square", "disc", "star"), **options):
    """Random weights of a tiny detector that finds a lot, with their card."""
    options = {"num_classes": len(classes), "score_thresh": 0.0, **TINY, **options}
    card = {"model": f"{kind}_test_quadtree", "kwargs": options, "classes": list(classes)}
    return tiny.write_weights("detect", path, **card)
