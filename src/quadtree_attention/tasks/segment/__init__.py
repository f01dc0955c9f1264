# SPDX-License-Identifier: Apache-2.0
"""Semantic segmentation: a class for every pixel of an image."""

from quadtree_attention.tasks.contract import Task

DATA = {
    **dict.fromkeys(("auto", "folder", "ade20k"), "data:SegmentData"),
    "generated": "data:GeneratedSegmentData",
}
TASK = Task("segment", ("image",), "Segmenter", "Segmentation", DATA)
