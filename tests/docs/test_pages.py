# SPDX-License-Identifier: Apache-2.0
"""Every Python block of README and of the pages runs, in order, one namespace per page."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from quadtree_attention import models, use_backend
from tests.conftest import ROOT
from tests.support import tiny

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if BLOCK.search(path.read_text()) and path.name != "export.md"  # tests/export/test_networks.py
}
SMALLER = {  # networks and images of the pages, in a size that runs in seconds
    "quadtree_b_b2": "quadtree_b_b0",
    '"vit_small_patch14_dinov2.lvd142m", pretrained=True': '"vit_tiny_patch16_224", depth=1',
    "torch.randn(1, 3, 1792, 1792)": "torch.randn(1, 3, 512, 768)",
    '"retinanet_quadtree_b_b0", num_classes=3': '"retinanet_test_quadtree", num_classes=3',
    '"recipes/classify/imagenet.yaml",\n    variant="b2"': '"recipes/classify/debug.yaml"',
    'data={"root": "imagenet"}': 'data={"generated_count": 32}',
    'trainer={"max_epochs": 100}': 'trainer={"max_epochs": 1}',
}
SLOW = {"docs/reconstruction.md"}  # a whole reconstruction
GIVEN = {  # names that the text of a page introduces
    "docs/matching.md": lambda: {
        "K0": (60, 60, 48, 32), "K1": (60, 60, 48, 32), "pairs": [("a.jpg", "b.jpg")],
    },
    "docs/accelerate.md": lambda: {"images": [torch.rand(1, 3, 512, 768)]},
    "docs/inspect.md": lambda: {"at": torch.tensor([35, 70])},
    "docs/segmentation.md": lambda: {"images": torch.rand(1, 3, 64, 96)},
    "docs/training.md": lambda: {"paths": ["a.jpg", "b.jpg"], "labels": np.array([0, 1])},
}  # fmt: skip


def prepare(page: str, folder: Path) -> None:
    """The files that the blocks of a page read."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    names = ("a.jpg", "b.jpg", "left.png", "right.png", "cat.jpg", "street.jpg")
    for seed, name in enumerate(names):  # too different for a search
        tiny.picture(seed, (352, 256) if "inspect" in page else (96, 64)).save(folder / name)
    weights = {
        "docs/detection.md": {"best": "detect"},
        "docs/segmentation.md": {"best": "segment"},
        "docs/tasks.md": {"b2": "classify", "detector": "detect", "segmenter": "segment"},
    }
    for name, task in weights.get(page, {}).items():
        tiny.write_weights(task, folder / f"{name}.safetensors")
    if page in ("docs/tasks.md", "docs/guides/train.md"):
        photographs(folder / "mine")
    if page == "docs/detection.md":
        backbone = models.create("quadtree_b_b0", num_classes=2)
        card = {"model": "quadtree_b_b0", "kwargs": {"num_classes": 2}, "task": "classify"}
        models.save_weights(folder / "b0.safetensors", backbone.state_dict(), card)
    if page == "docs/matching.md":
        (folder / "OUT").mkdir()
        (folder / "photos").mkdir()
        camera, pose = "60 0 48 0 60 32 0 0 1", "1 0 0 1 0 1 0 0 0 0 1 0 0 0 0 1"
        (folder / "pairs.txt").write_text(f"a.jpg b.jpg 0 0 {camera} {camera} {pose}\n")
        points = np.random.default_rng(0).uniform(0, 60, (40, 2)).astype(np.float32)
        confidence = np.ones(40, np.float32)
        found = {"keypoints0": points, "keypoints1": points, "confidence": confidence}
        np.savez(folder / "OUT" / "a__b.npz", **found)
    if page == "docs/reconstruction.md":
        (folder / "photos").mkdir()
        for photo in (ROOT / "examples/images").glob("street*.jpg"):
            shutil.copy(photo, folder / "photos")


def photographs(root: Path) -> None:
    """Images of two classes in folders."""
    for i in range(64):
        place = root / ("train", "val")[i >= 48] / ("cat", "dog")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        tiny.picture(i, (48, 48)).save(place / f"{i}.jpg")


@pytest.mark.parametrize(
    "page", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in PAGES]
)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    prepare(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", None)  # nothing is downloaded
    text = PAGES[page].read_text()
    namespace: dict[str, object] = GIVEN.get(page, dict)()
    with use_backend("reference"):
        for match in BLOCK.finditer(text):
            block = match[1]
            for old, new in SMALLER.items():
                block = block.replace(old, new)
            line = text[: match.start(1)].count("\n")
            exec(compile("\n" * line + block, str(PAGES[page]), "exec"), namespace)
    printed = capsys.readouterr().out
    for told in re.findall(r"^print\(.*\)  # (torch\.Size\(.*\)|quadtree.*)$", text, flags=re.M):
        assert told in printed
    assert set(os.listdir(tmp_path)) >= set(
        re.findall(r'\.(?:draw|save)\("([\w./]+)"\)', "".join(BLOCK.findall(text)))
    )
