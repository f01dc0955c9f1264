# SPDX-License-Identifier: Apache-2.0
"""A sixth task, as CONTRIBUTING.md describes it: how bright an image is."""

from quadtree_attention.tasks.contract import Task

TASK = Task(
    name="toy",
    item="image",
    images=("image",),
    predictor="predictor:Photometer",
    codec="result:BrightnessCodec",
    metric="metrics:BrightnessMetric",
    module="module:BrightnessModule",
    open_source="readers:open_source",
    data={"files": "data:BrightnessData"},
)
