# SPDX-License-Identifier: Apache-2.0
"""Stereo: disparity and occlusion of rectified pairs."""

from quadtree_attention.tasks.contract import Task

TASK = Task(
    name="stereo",
    item="pair",
    images=("left", "right"),
    predictor="predictor:StereoMatcher",
    codec="result:DisparityCodec",
    metric="metrics:StereoMetric",
    module="module:StereoModule",
    open_source="readers:open_source",
    data={"synthetic": "data:SyntheticStereoData", "files": "data:StereoData"},
)
