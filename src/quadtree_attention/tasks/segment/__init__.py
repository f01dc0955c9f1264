# SPDX-License-Identifier: Apache-2.0
"""Semantic segmentation: a class for every pixel of an image."""

from quadtree_attention.tasks.contract import Task

TASK = Task(
    name="segment",
    item="image",
    images=("image",),
    predictor="predictor:Segmenter",
    codec="result:LabelMapCodec",
    metric="metrics:SegmentMetric",
    module="module:SegmentModule",
    open_source="readers:open_source",
    data=dict.fromkeys(("auto", "folder", "ade20k", "generated"), "data:SegmentData"),
)
