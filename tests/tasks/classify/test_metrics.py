# SPDX-License-Identifier: Apache-2.0
"""Accuracies against numbers worked out by hand, ties and NaN among them."""

import math

import pytest
import torch

from quadtree_attention.tasks.classify.metrics import per_class_accuracy, ranks, topk_accuracy

NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "label", "place"),
    [
        ([0.1, 0.9, 0.5], 1, 0),
        ([0.1, 0.9, 0.5], 2, 1),
        ([0.1, 0.9, 0.5], 0, 2),
        ([0.9, 0.9, 0.5], 0, 1),  # a tie counts against the prediction,
        ([0.9, 0.9, 0.5], 1, 1),  # whichever of the two is right
        ([0.0, 0.0, 0.0], 0, 2),
        ([-math.inf, 0.0, math.inf], 2, 0),
        ([NAN, 0.9, 0.5], 1, 1),  # what is no number may have been the best
        ([NAN, 0.9, 0.5], 2, 2),
    ],
)
def test_place_of_the_true_class(scores, label, place):
    assert ranks(torch.tensor([scores]), torch.tensor([label])).tolist() == [place]


@pytest.mark.parametrize("k", [1, 5, 1000])
def test_nan_is_never_right(k):
    logits = torch.full((2, 3), NAN)
    assert topk_accuracy(logits, torch.tensor([0, 2]), k) == 0.0


def test_topk():
    logits = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3], [1, 1, 0, 0], [0, 5, 4, 3]])
    labels = torch.tensor([0, 2, 1, 3])  # places 0, 1, 1 (tie), 2
    assert [topk_accuracy(logits, labels, k) for k in (1, 2, 3, 4)] == [25.0, 75.0, 100.0, 100.0]
    assert topk_accuracy(logits, labels) == 25.0


def test_of_nothing_is_nan():
    assert math.isnan(topk_accuracy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)))


def test_per_class():
    logits = torch.tensor([[2.0, 1, 0, 0], [2, 1, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 7]])
    labels = torch.tensor([0, 1, 1, 1, 3])  # class 1: wrong, right, a tie
    counts, accuracies = zip(*per_class_accuracy(logits, labels), strict=True)
    assert counts == (1, 3, 0, 1)
    assert accuracies[0] == accuracies[3] == 100.0
    assert accuracies[1] == pytest.approx(100 / 3)
    assert math.isnan(accuracies[2])
