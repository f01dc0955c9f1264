# SPDX-License-Identifier: Apache-2.0
"""Classification: the class of an image."""

from quadtree_attention.tasks.contract import Task

DATA = {
    **dict.fromkeys(("auto", "folder", "npz"), "data:ClassifyData"),
    "generated": "data:GeneratedClassifyData",
}
TASK = Task("classify", ("image",), "Classifier", "Classification", DATA)
