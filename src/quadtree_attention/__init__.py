# SPDX-License-Identifier: Apache-2.0
"""Attention that looks coarse first and refines only where it matters."""

from quadtree_attention.errors import (
    BackendUnsupportedError,
    CheckpointError,
    DTypeError,
    MissingDependencyError,
    OptionError,
    QuadtreeAttentionError,
    ShapeError,
)
from quadtree_attention.nn import QuadtreeAttention, QuadtreeBlock
from quadtree_attention.ops import (
    LevelSelection,
    Plan,
    available_backends,
    plan,
    quadtree_attention,
    quadtree_attention_pyramid,
    use_backend,
)

__all__ = [
    "BackendUnsupportedError",
    "CheckpointError",
    "DTypeError",
    "LevelSelection",
    "MissingDependencyError",
    "OptionError",
    "Plan",
    "QuadtreeAttention",
    "QuadtreeAttentionError",
    "QuadtreeBlock",
    "ShapeError",
    "__version__",
    "available_backends",
    "plan",
    "quadtree_attention",
    "quadtree_attention_pyramid",
    "use_backend",
]

__version__ = "0.1.0"
