# SPDX-License-Identifier: Apache-2.0
"""Export of whole networks to other runtimes."""

from quadtree_attention.export.onnx import Check, Exported, to_onnx

__all__ = ["Check", "Exported", "to_onnx"]
