# SPDX-License-Identifier: Apache-2.0
"""The stereo network that comes with the package, on pairs it was not trained on."""

import json

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.quality.stereo import DATA
from quadtree_attention import models
from quadtree_attention.synthetic import ProceduralTextures, StereoOptions, stereo_pairs
from quadtree_attention.tasks.stereo.metrics import scores
from quadtree_attention.tasks.stereo.predictor import StereoMatcher
from tests.conftest import ROOT

IMAGES = ROOT / "examples" / "images"
# Of examples/images/README.md
OPTIONS = StereoOptions(
    objects=(8, 14), disparity=(0.1, 0.14), depth=(1.5, 6.0), room=(4.0, 8.0), textureless=0.1,
    samples=1,
)  # fmt: skip


@pytest.mark.parametrize("name", models.names("stereo", pretrained=True))
def test_disparities_of_the_example(name):
    textures = ProceduralTextures(48, size=16, seed=5)  # truth is that of any textures
    truth = stereo_pairs(textures, [1], size=(384, 512), seed=5, options=OPTIONS)
    matcher = StereoMatcher.from_pretrained(name)
    found = matcher(IMAGES / "stereo_left.jpg", IMAGES / "stereo_right.jpg")
    assert found.warnings == ()
    occluded = truth.occluded0[0]
    given = found.disparity, truth.disparity0[0], torch.ones_like(occluded), occluded
    score = scores(*given, found.occlusion, visible=~occluded)
    assert score["epe_all"] < 1.0  # of 7 to 59 pixels
    assert score["bad3_all"] < 5
    assert score["occlusion_iou"] > 0.6


def test_swapped_views_are_told():
    matcher = StereoMatcher.from_pretrained(size=256)
    found = matcher(IMAGES / "stereo_right.jpg", IMAGES / "stereo_left.jpg")
    assert any("swapped" in said for said in found.warnings)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="no pairs at ../shared/data/stereo")
def test_less_wrong_than_semi_global_matching(tmp_path):
    out = tmp_path / "scores.json"
    assert main(["quality", "stereo", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    means = {row["case"]["method"]: row["values"]["mean"] for row in rows}
    ours, theirs = means["quadtree"], means["SGBM"]
    for score in ("epe_all", "d1_all", "bad3_all"):
        assert ours[score] < theirs[score], score
