# SPDX-License-Identifier: Apache-2.0
"""Networks built on quadtree attention, and the import of official checkpoints."""
