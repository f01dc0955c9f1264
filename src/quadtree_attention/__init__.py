# SPDX-License-Identifier: Apache-2.0
"""Quadtree attention: coarse-to-fine attention that refines only the highest-scoring cells.

Public names are imported on first access, so that importing the package imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quadtree_attention.errors import (
    BackendUnsupportedError,
    CheckpointError,
    DataError,
    DTypeError,
    ExportError,
    MissingDependencyError,
    OptionError,
    QuadtreeAttentionError,
    ShapeError,
)

if TYPE_CHECKING:
    from quadtree_attention.inspect import calibrate_topk, record
    from quadtree_attention.models.accelerate import accelerate
    from quadtree_attention.models.topk import set_topk
    from quadtree_attention.nn import (
        QuadtreeAttention,
        QuadtreeBlock,
        fuse_for_inference,
        unfuse,
    )
    from quadtree_attention.ops import (
        LevelSelection,
        Plan,
        available_backends,
        merge_attentions,
        plan,
        quadtree_attention,
        quadtree_attention_pyramid,
        quadtree_sdpa,
        use_backend,
    )

__all__ = [
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

__version__ = "0.2.0"

_HOMES = {  # the others live in ops
    "QuadtreeAttention": "nn",
    "QuadtreeBlock": "nn",
    "accelerate": "models.accelerate",
    "calibrate_topk": "inspect",
    "fuse_for_inference": "nn",
    "record": "inspect",
    "set_topk": "models.topk",
    "unfuse": "nn",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        # models, tasks, ...: available after `import quadtree_attention`
        if name in ("export", "inspect", "models", "nn", "ops", "synthetic", "tasks", "viz"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'ops')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
