# SPDX-License-Identifier: Apache-2.0
"""Variant C on each backend."""

from quadtree_attention.ops.attention.cpu.pyramids import pyramid, to_grid, to_tree
from quadtree_attention.ops.attention.flat import cpu, reference, triton
from quadtree_attention.ops.attention.flat.walk import FlatBackend

FLAT = {
    "triton": FlatBackend(triton.attend_level),
    "cpu": FlatBackend(cpu.attend_level, pyramid, to_tree, to_grid),
    "reference": FlatBackend(reference.attend_level),
}
