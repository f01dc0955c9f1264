# SPDX-License-Identifier: Apache-2.0
"""Confusion matrix and what follows from it, against torchmetrics and by hand."""

import math

import pytest
import torch

from quadtree_attention.tasks.segment.metrics import IGNORE, confusion, scores


def test_by_hand():
    truth = torch.tensor([[0, 0, 0, 1], [1, 1, IGNORE, IGNORE]])
    predicted = torch.tensor([[0, 0, 1, 1], [1, 0, 2, 0]])
    matrix = confusion(predicted, truth, 4)
    assert matrix.tolist() == [[2, 1, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    found = scores(matrix)
    assert found.iou[:2] == [50.0, 50.0]
    assert all(math.isnan(value) for value in found.iou[2:])  # in neither: not counted
    assert (found.miou, found.accuracy) == (50.0, pytest.approx(400 / 6))
    assert found.class_accuracy[:2] == pytest.approx([200 / 3, 200 / 3])


def test_a_class_that_is_only_predicted_counts():
    found = scores(confusion(torch.tensor([0, 0, 2]), torch.tensor([0, 0, 0]), 3))
    assert found.iou[0] == pytest.approx(200 / 3) and found.iou[2] == 0
    assert math.isnan(found.iou[1]) and found.miou == pytest.approx(100 / 3)
    assert math.isnan(found.class_accuracy[2])


def test_nothing_to_score():
    found = scores(confusion(torch.tensor([1]), torch.tensor([IGNORE]), 2))
    assert math.isnan(found.miou) and math.isnan(found.accuracy)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_equals_torchmetrics(dtype):
    library = pytest.importorskip("torchmetrics.classification", reason="extra 'train'")
    truth = torch.randint(-1, 6, (3, 21, 34))
    truth[truth == 4] = 2  # in no truth
    predicted = torch.randint(0, 6, truth.shape)
    options = {"num_classes": 6, "ignore_index": IGNORE}
    matrix = confusion(predicted, truth.to(dtype), 6)
    assert torch.equal(matrix, library.MulticlassConfusionMatrix(**options)(predicted, truth))
    index = library.MulticlassJaccardIndex(**options, average="none")(predicted, truth)
    found = scores(matrix)
    assert found.iou == pytest.approx((100 * index).tolist(), abs=1e-4)
    assert found.miou == pytest.approx(100 * index.mean().item(), abs=1e-4)


def test_matrices_add_up():
    truth, predicted = torch.randint(-1, 3, (4, 9)), torch.randint(0, 3, (4, 9))
    parts = sum(confusion(p, t, 3) for p, t in zip(predicted, truth, strict=True))
    assert torch.equal(parts, confusion(predicted, truth, 3))
