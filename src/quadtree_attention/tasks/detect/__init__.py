# SPDX-License-Identifier: Apache-2.0
"""Detection: boxes, and masks, of the objects in an image."""

from quadtree_attention.tasks.contract import Task

TASK = Task(
    name="detect",
    item="image",
    images=("image",),
    predictor="predictor:Detector",
    codec="result:DetectionsCodec",
    metric="metrics:DetectMetric",
    module="module:DetectModule",
    open_source="readers:open_source",
    data={"files": "data:DetectData", "generated": "data:GeneratedDetectData"},
)
