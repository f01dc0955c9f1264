# SPDX-License-Identifier: Apache-2.0
"""Fused Triton kernels for CUDA devices."""

from quadtree_attention.ops.attention.triton.backend import TRITON

__all__ = ["TRITON"]
