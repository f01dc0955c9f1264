# SPDX-License-Identifier: Apache-2.0
"""The matcher that comes with the package, on images it was not trained on."""

import json

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.quality import DEFAULT
from benchmarks.quality.matching import DATA
from quadtree_attention.tasks import Matcher
from tests.conftest import ROOT

SCENE = ROOT / "examples" / "images"
# Of examples/images/README.md
K0 = np.array([[725.70, 0, 330.03], [0, 725.70, 238.38], [0, 0, 1]])
K1 = np.array([[840.36, 0, 306.12], [0, 840.36, 255.68], [0, 0, 1]])


@pytest.fixture(scope="module")
def matcher():
    return Matcher.from_pretrained()


@pytest.fixture(scope="module")
def found(matcher):
    return matcher(SCENE / "scene0.jpg", SCENE / "scene1.jpg")


def test_pose_of_the_example(found):
    assert len(found.keypoints0) > 500
    pose = found.relative_pose(K0, K1)
    turned = np.degrees(np.arccos((np.trace(pose.rotation) - 1) / 2))
    assert turned == pytest.approx(12.7, abs=0.5)
    way = np.array([-0.18, -0.98, -0.06])
    assert np.dot(pose.translation, way / np.linalg.norm(way)) > np.cos(np.radians(2))


def test_swapped_images_give_the_same_points_swapped(matcher, found):
    back = matcher(SCENE / "scene1.jpg", SCENE / "scene0.jpg")
    there = dict(zip(map(tuple, found.keypoints0.round(1)), found.keypoints1, strict=True))
    same = [
        np.abs(there[key] - point).max()
        for key, point in zip(map(tuple, back.keypoints1.round(1)), back.keypoints0, strict=True)
        if key in there
    ]
    assert len(same) > 0.99 * max(len(found.keypoints0), len(back.keypoints0))
    assert max(same) < 0.01  # pixels


def test_black_images_match_nothing(matcher):
    """The network itself tells cells apart by the border of the image, and finds matches."""
    black = np.zeros((64, 64), np.uint8)
    (raw,) = matcher.forward([matcher.preprocess(black, black)])
    assert len(raw["confidence"]) > 5 and len(matcher(black, black)) == 0


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="no pairs at ../shared/data/matching")
def test_ahead_of_sift_on_indoor_pairs_far_apart(tmp_path):
    out = tmp_path / "scores.json"
    assert main(["quality", "matching", "--sets", "scannet", "--out", str(out)]) == 0
    rows = {row["case"]["method"]: row["values"] for row in json.loads(out.read_text())["rows"]}
    for estimator in ("opencv", "poselib"):
        ours, sift = (rows[name]["estimators"][estimator] for name in (DEFAULT, "SIFT"))
        assert ours["auc"]["20"] > 25
        assert ours["auc"]["20"] > 2 * sift["auc"]["20"]
