# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import quadtree_attention

HEAVY = (
    "torch",
    "numpy",
    "timm",
    "torchvision",
    "pytorch_lightning",
    "triton",
    "numba",
    "matplotlib",
    "PIL",
    "onnx",
    "typer",
)


def test_public_names_are_pinned():
    assert sorted(quadtree_attention.__all__) == [
        "BackendUnsupportedError",
        "CheckpointError",
        "DTypeError",
        "DataError",
        "ExportError",
        "LevelSelection",
        "MissingDependencyError",
        "OptionError",
        "Plan",
        "QuadtreeAttention",
        "QuadtreeAttentionError",
        "QuadtreeBlock",
        "ShapeError",
        "__version__",
        "accelerate",
        "available_backends",
        "calibrate_topk",
        "fuse_for_inference",
        "merge_attentions",
        "plan",
        "quadtree_attention",
        "quadtree_attention_pyramid",
        "quadtree_sdpa",
        "record",
        "set_topk",
        "unfuse",
        "use_backend",
    ]
    assert all(hasattr(quadtree_attention, name) for name in quadtree_attention.__all__)


def test_public_names_of_nn_are_pinned():
    assert quadtree_attention.nn.__all__ == [
        "BASELINES",
        "QuadtreeAttention",
        "QuadtreeBlock",
        "fuse_for_inference",
        "make_attention",
        "unfuse",
    ]
    assert all(hasattr(quadtree_attention.nn, name) for name in quadtree_attention.nn.__all__)


def test_import_brings_no_optional_package():
    code = (
        "import sys; before = set(sys.modules); import quadtree_attention.tasks;"
        f"print(sorted({{m.split('.')[0] for m in set(sys.modules) - before}} & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
