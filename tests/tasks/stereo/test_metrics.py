# SPDX-License-Identifier: Apache-2.0
"""Scores of disparity and occlusion, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from quadtree_attention.tasks.stereo.metrics import mean_scores, occlusion_iou, scores

TRUTH = torch.tensor([[10.0, 20.0, 100.0, 50.0], [5.0, 0.0, 80.0, 30.0]])
ERROR = torch.tensor([[0.5, -1.5, 4.0, 3.5], [-2.5, 9.0, -3.0, 0.0]])
KNOWN = torch.tensor([[True, True, True, True], [True, False, True, True]])
OCCLUDED = torch.tensor([[True, False, False, False], [False, True, False, True]])


def test_worked_example():
    found = scores(TRUTH + ERROR, TRUTH, KNOWN, OCCLUDED)
    # errors of known pixels: 0.5 1.5 4 3.5 2.5 3 0; of those that are not occluded: 1.5 4 3.5 2.5 3
    assert found == pytest.approx({
        "epe_all": 15 / 7, "bad1_all": 500 / 7, "bad2_all": 400 / 7, "bad3_all": 200 / 7,
        "d1_all": 100 / 7,  # 4 is less than 5 % of 100, 3.5 is more than 5 % of 50
        "epe_noc": 14.5 / 5, "bad1_noc": 100, "bad2_noc": 80, "bad3_noc": 40, "d1_noc": 20,
    })  # fmt: skip
    given = (TRUTH + ERROR, TRUTH, KNOWN, OCCLUDED, OCCLUDED.float())
    assert scores(*given) == scores(*(tensor.numpy() for tensor in given))
    truth = np.full((4, 4), 200.0, np.float32)
    found = scores(torch.full((4, 4), 200.125).bfloat16(), truth, truth > 0, truth < 0)
    assert found["epe_all"] == 0.0  # bfloat16 has no 200.125
    assert scores(np.full((4, 4), 200.125), truth, truth > 0, truth < 0)["epe_all"] == 0.125


@pytest.mark.parametrize(
    ("truth", "error", "bad"),
    [(50.0, 2.9, 0), (50.0, 3.1, 100), (100.0, 4.9, 0), (100.0, -5.1, 100), (10.0, 3.0, 0)],
)
def test_outliers_of_kitti_exceed_3_pixels_and_5_percent(truth, error, bad):
    truth = torch.tensor([truth], dtype=torch.float64)
    assert scores(truth + error, truth, truth > 0, truth < 0)["d1_all"] == bad


def test_occlusion():
    predicted = torch.tensor([[0.9, 0.6, 0.1, 0.5], [0.2, 0.8, 0.3, 0.7]])  # 0.5 is visible
    everywhere = torch.ones_like(OCCLUDED)
    # predicted and occluded: 3; either: 4. Neither: 4; visible in either: 5
    assert occlusion_iou(predicted, OCCLUDED, everywhere) == 3 / 4
    assert occlusion_iou(predicted, OCCLUDED, everywhere, both=True) == (3 + 4) / (4 + 5)
    assert occlusion_iou(predicted, OCCLUDED, KNOWN) == 2 / 3
    assert occlusion_iou(OCCLUDED, OCCLUDED, everywhere) == 1
    assert occlusion_iou(~OCCLUDED, OCCLUDED, everywhere, both=True) == 0
    found = scores(TRUTH, TRUTH, KNOWN, OCCLUDED, predicted)
    # judged: what is known, and what is occluded though its disparity is not known
    assert (found["occlusion_iou"], found["occlusion_iou_both"]) == (3 / 4, 7 / 9)
    visible = KNOWN & ~OCCLUDED
    visible[0, 1] = False
    found = scores(TRUTH + ERROR, TRUTH, KNOWN, OCCLUDED, OCCLUDED, visible=visible)
    assert found["epe_noc"] == pytest.approx(13 / 4)
    assert found["epe_all"] == pytest.approx(15 / 7)
    assert found["occlusion_iou_both"] == 1


def test_what_has_no_score_and_what_is_wrong():
    nothing = torch.zeros_like(KNOWN)
    found = scores(TRUTH, TRUTH, nothing, nothing, nothing)
    assert found and all(math.isnan(value) for value in found.values())
    only_hidden = scores(TRUTH, TRUTH, KNOWN, KNOWN)
    assert math.isnan(only_hidden["d1_noc"]) and only_hidden["d1_all"] == 0
    broken = TRUTH.clone()
    broken[0, 0] = torch.nan
    found = scores(broken, TRUTH, KNOWN, nothing)
    assert found["epe_all"] == math.inf
    assert found["bad3_all"] == found["d1_all"] == pytest.approx(100 / 7)
    unknown = torch.where(KNOWN, TRUTH, torch.nan)
    assert scores(unknown, unknown, KNOWN, nothing)["epe_all"] == 0
    images = [{"epe": 1.0, "iou": math.nan}, {"epe": 3.0, "iou": 0.5}, {"epe": 2.0, "iou": 0.7}]
    assert mean_scores(images) == pytest.approx({"epe": 2.0, "iou": 0.6})
    assert math.isnan(mean_scores([{"iou": math.nan}])["iou"])
    assert mean_scores([]) == {}
    assert mean_scores([{"epe": math.inf}, {"epe": 1.0}]) == {"epe": math.inf}
