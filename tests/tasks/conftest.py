# SPDX-License-Identifier: Apache-2.0
"""Tests of the tasks need the extras "models" and "train"."""

import pytest

for _name in ("timm", "cv2", "poselib", "pytorch_lightning", "faster_coco_eval", "h5py"):
    pytest.importorskip(_name, reason="tests of the tasks need the extras 'models' and 'train'")
