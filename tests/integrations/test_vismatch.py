# SPDX-License-Identifier: Apache-2.0
"""The adapter with the installed vismatch."""

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("vismatch", reason="needs vismatch, which wants an environment of its own")

from quadtree_attention.integrations.vismatch import QuadtreeMatcher

pytestmark = pytest.mark.slow


def test_results_of_vismatch(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    image = Image.fromarray(pixels).resize((256, 192), Image.Resampling.BICUBIC)
    image.save(tmp_path / "a.png")
    image.crop((16, 8, 256, 192)).save(tmp_path / "b.png")
    matcher = QuadtreeMatcher(device="cpu", guided="never")
    found = matcher(tmp_path / "a.png", tmp_path / "b.png")
    expected = matcher.matcher(tmp_path / "a.png", tmp_path / "b.png")
    assert found["num_inliers"] > 50 and matcher.name == "QuadtreeMatcher"
    np.testing.assert_allclose(found["H"], [[1, 0, -16], [0, 1, -8], [0, 0, 1]], atol=0.3)
    assert len(found["matched_confidences"]) == len(found["matched_kpts0"]) > 0
    assert abs(len(expected) - len(found["all_kpts0"])) <= 5
    matcher.load_image(tmp_path / "a.png", resize=128)
