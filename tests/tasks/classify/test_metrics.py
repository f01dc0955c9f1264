# SPDX-License-Identifier: Apache-2.0
"""Accuracies against numbers worked out by hand, ties and NaN among them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quadtree_attention.errors import CheckpointError
from quadtree_attention.tasks.classify.metrics import ClassifyMetric, per_class, percent, ranks
from quadtree_attention.tasks.classify.result import Classification

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


def test_shares_of_all_and_per_class():
    logits = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3], [1, 1, 0, 0], [0, 5, 4, 3]])
    places = ranks(logits, torch.tensor([0, 2, 1, 3]))  # 0, 1, 1 (tie), 2
    assert [percent(places < k) for k in (1, 2, 3, 4)] == [25.0, 75.0, 100.0, 100.0]
    assert math.isnan(percent(places[:0] < 1))
    never = ranks(torch.full((2, 3), NAN), torch.tensor([0, 2]))
    assert [percent(never < k) for k in (1, 5, 1000)] == [0, 0, 0]
    logits = torch.tensor([[2.0, 1, 0, 0], [2, 1, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 7]])
    labels = torch.tensor([0, 1, 1, 1, 3])  # class 1: wrong, right, a tie
    found = per_class(labels, ranks(logits, labels) < 1, 4)
    expected = [(1, 100.0), (3, pytest.approx(100 / 3)), (0, pytest.approx(NAN, nan_ok=True))]
    assert found == [*expected, (1, 100.0)]


def result(logits, classes):
    return Classification(logits=np.array(logits, np.float32), classes=classes)


def test_the_fifth_place_counts_and_the_sixth_does_not():
    classes = list("abcdefg")
    metric = ClassifyMetric(SimpleNamespace(classes=classes))
    for name, truth in (("fifth", 4), ("sixth", 5)):
        metric.update(name, truth, result(range(7, 0, -1), classes))
    assert metric.compute().mean == {"top1": 0.0, "top5": 50.0}


def test_labels_stand_for_the_classes_of_the_data():
    """Whatever the order of those of the network; samples without a prediction do not count."""
    metric = ClassifyMetric(SimpleNamespace(classes=["cat", "ant"]))
    ours = ["ant", "bee", "cat"]
    metric.update("a", 0, result([0, 1, 9], ours))
    metric.update("b", 1, result([1, 2, 0], ours))
    metric.update("c", 1, None)
    scores = metric.compute()
    assert scores.mean == {"top1": 50.0, "top5": 100.0} and scores.facts == {"images": 2}
    assert scores.rows[:2] == [  # worst first
        {"label": 0, "name": "ant", "images": 1, "accuracy": 0.0},
        {"label": 2, "name": "cat", "images": 1, "accuracy": 100.0},
    ]
    assert scores.rows[2]["images"] == 0 and scores.to_dict()["rows"][2]["accuracy"] is None
    with pytest.raises(CheckpointError, match="does not know ant"):
        metric.update("e", 0, result([0, 1], ["bee", "cat"]))
