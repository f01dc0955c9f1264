# SPDX-License-Identifier: Apache-2.0
"""Detection: boxes, and masks, of the objects in an image."""

from quadtree_attention.tasks.contract import Task

DATA = {"files": "data:DetectData", "generated": "data:GeneratedDetectData"}
TASK = Task("detect", ("image",), "Detector", "Detections", DATA)
