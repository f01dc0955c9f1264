# SPDX-License-Identifier: Apache-2.0
"""Quadtree attention as modules."""

from quadtree_attention.nn.attention import QuadtreeAttention
from quadtree_attention.nn.block import QuadtreeBlock

__all__ = ["QuadtreeAttention", "QuadtreeBlock"]
