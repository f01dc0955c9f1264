# SPDX-License-Identifier: Apache-2.0
"""Quadtree attention as functions."""

from quadtree_attention.ops.attention.flat.functional import quadtree_sdpa
from quadtree_attention.ops.attention.flat.merge import merge_attentions
from quadtree_attention.ops.attention.functional import (
    LevelSelection,
    available_backends,
    quadtree_attention,
    quadtree_attention_pyramid,
)
from quadtree_attention.ops.backends import use_backend
from quadtree_attention.ops.planning.plan import Plan, plan

__all__ = [
    "LevelSelection",
    "Plan",
    "available_backends",
    "merge_attentions",
    "plan",
    "quadtree_attention",
    "quadtree_attention_pyramid",
    "quadtree_sdpa",
    "use_backend",
]
