# SPDX-License-Identifier: Apache-2.0
"""Modules of quadtree attention and of baseline attentions."""

from quadtree_attention.nn.attention import QuadtreeAttention
from quadtree_attention.nn.baselines import BASELINES, make_attention
from quadtree_attention.nn.block import QuadtreeBlock
from quadtree_attention.nn.fuse import fuse_for_inference, unfuse

__all__ = [
    "BASELINES",
    "QuadtreeAttention",
    "QuadtreeBlock",
    "fuse_for_inference",
    "make_attention",
    "unfuse",
]
