# SPDX-License-Identifier: Apache-2.0
"""Feature matching: points of two images that show the same."""

from quadtree_attention.tasks.contract import Task

TASK = Task(
    name="match",
    item="pair",
    images=("image0", "image1"),
    predictor="predictor:Matcher",
    codec="result:MatchesCodec",
    metric="metrics:MatchMetric",
    module="module:MatchModule",
    open_source="readers:open_source",
    data={
        "synthetic": "data:MatchData",
        "scannet": "scannet:ScanNetData",
        "megadepth": "megadepth:MegaDepthData",
    },
)
