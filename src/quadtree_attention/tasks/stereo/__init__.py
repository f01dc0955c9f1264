# SPDX-License-Identifier: Apache-2.0
"""Stereo: disparity and occlusion of rectified pairs."""

from quadtree_attention.tasks.contract import Task

DATA = {"synthetic": "data:SyntheticStereoData", "files": "data:StereoData"}
TASK = Task("stereo", ("left", "right"), "StereoMatcher", "Disparity", DATA)
