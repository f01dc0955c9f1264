# SPDX-License-Identifier: Apache-2.0
"""Feature matching: corresponding points of two images."""

from quadtree_attention.tasks.contract import Task

DATA = {
    "synthetic": "data:MatchData",
    "scannet": "scannet:ScanNetData",
    "megadepth": "megadepth:MegaDepthData",
}
TASK = Task("match", ("image0", "image1"), "Matcher", "Matches", DATA)
