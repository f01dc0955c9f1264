# SPDX-License-Identifier: Apache-2.0
"""Classification: the class of an image."""

from quadtree_attention.tasks.contract import Task

TASK = Task(
    name="classify",
    item="image",
    images=("image",),
    predictor="predictor:Classifier",
    codec="result:ClassificationCodec",
    metric="metrics:ClassifyMetric",
    module="module:ClassifyModule",
    open_source="readers:open_source",
    data=dict.fromkeys(("auto", "folder", "npz", "generated"), "data:ClassifyData"),
)
