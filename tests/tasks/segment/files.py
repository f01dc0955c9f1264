# SPDX-License-Identifier: Apache-2.0
"""Small data sets and weights of segmenters for tests."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support import tiny

CLASSES = ["sky", "road", "car"]
IGNORED = 9
KWARGS = {"num_classes": len(CLASSES), "channels": 8, "head_channels": 8, "topk": 4}


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def label_map(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Stripes of the classes, with some pixels that have none."""
    labels = (np.arange(width) * len(CLASSES) // width + seed) % len(CLASSES)
    labels = np.repeat(labels[None], height, axis=0).astype(np.uint8)
    labels[: height // 4, : width // 4] = IGNORED
    return labels


def write_set(root: Path, *, count=4, size=(40, 56), splits=("train", "val")) -> Path:
    """`root/images/<split>`, `root/labels/<split>` and `root/classes.json`."""
    for k, split in enumerate(splits):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            image, labels = photo(*size, seed=10 * k + i), label_map(*size, seed=i)
            Image.fromarray(image).save(root / "images" / split / f"{i}.png")
            Image.fromarray(labels).save(root / "labels" / split / f"{i}.png")
    content = {"classes": CLASSES, "ignore_index": IGNORED}
    (root / "classes.json").write_text(json.dumps(content))
    return root


def write_weights(path: Path, **card: object) -> Path:
    """A segmenter with random weights and three classes."""
    own = {"classes": CLASSES, "palette": [[10, 20, 30], [200, 100, 0], [0, 250, 120]]}
    return tiny.write_weights("segment", path, kwargs=KWARGS, **own | {"base_size": None} | card)
