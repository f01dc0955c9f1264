# SPDX-License-Identifier: Apache-2.0
"""A sixth task, as CONTRIBUTING.md describes it: how bright an image is."""

from quadtree_attention.tasks.contract import Task

TASK = Task("toy", ("image",), "Photometer", "Brightness", {"files": "data:BrightnessData"})
