# SPDX-License-Identifier: Apache-2.0
import quadtree_attention
from tests.support.commands import command

HEAVY = "torch numpy timm torchvision pytorch_lightning triton numba matplotlib PIL onnx typer"
PUBLIC = """
    BackendUnsupportedError CheckpointError DTypeError DataError ExportError LevelSelection
    MissingDependencyError OptionError Plan QuadtreeAttention QuadtreeAttentionError QuadtreeBlock
    ShapeError __version__ accelerate available_backends calibrate_topk fuse_for_inference
    merge_attentions plan quadtree_attention quadtree_attention_pyramid quadtree_sdpa record
    set_topk unfuse use_backend
"""
OF_NN = "BASELINES QuadtreeAttention QuadtreeBlock fuse_for_inference make_attention unfuse"


def test_public_names_are_pinned():
    for module, names in ((quadtree_attention, PUBLIC), (quadtree_attention.nn, OF_NN)):
        assert sorted(module.__all__) == names.split()
        assert all(hasattr(module, name) for name in module.__all__)


def test_import_brings_no_optional_package():
    code = (
        "import sys; before = set(sys.modules); import quadtree_attention.tasks;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        f"print(new & {set(HEAVY.split())}, file=sys.stderr)"
    )
    assert command(code=code).stderr == "set()\n"
