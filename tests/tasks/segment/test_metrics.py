# SPDX-License-Identifier: Apache-2.0
"""Scores: the confusion matrix against torchmetrics and by hand, label maps on disk."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.errors import CheckpointError, DataError
from quadtree_attention.tasks.evaluation import evaluate
from quadtree_attention.tasks.segment.metrics import IGNORE, SegmentMetric, class_scores, confusion
from quadtree_attention.tasks.segment.result import Segmentation
from tests.support import raises
from tests.tasks.segment.files import IGNORED, write_set

NAMES = ["a", "b", "c", "d"]


def metric_of(predicted, truth, names=NAMES, classes=None):
    """After one image of one row."""
    metric = SegmentMetric(SimpleNamespace(classes=names), classes)
    labels = np.array([predicted], np.uint8)
    found = Segmentation(labels=labels, names=classes or names, palette=[])
    metric.update("image", np.array([truth], np.int16), found)
    return metric


def by_name(scores, key):
    return {row["name"]: row[key] for row in scores.rows}


def test_by_hand():
    truth = torch.tensor([[0, 0, 0, 1], [1, 1, IGNORE, IGNORE]])
    predicted = torch.tensor([[0, 0, 1, 1], [1, 0, 2, 0]])
    matrix = confusion(predicted, truth, 4)
    assert matrix.tolist() == [[2, 1, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    found = metric_of(predicted.flatten().tolist(), truth.flatten().tolist()).compute()
    # classes in neither are not counted
    assert by_name(found, "iou") == {"a": 50.0, "b": 50.0, "c": None, "d": None}
    assert by_name(found, "recall")["a"] == pytest.approx(200 / 3)
    assert by_name(found, "pixels") == {"a": 3, "b": 3, "c": 0, "d": 0}
    assert found.mean == {
        "miou": 50.0,
        "accuracy": pytest.approx(400 / 6),
        "class_accuracy": pytest.approx(200 / 3),
    }
    json.dumps(found.to_dict(), allow_nan=False)
    found = metric_of([0, 0, 2], [0, 0, 0]).compute()
    assert by_name(found, "iou") == {"c": 0, "a": pytest.approx(200 / 3), "b": None, "d": None}
    assert [row["name"] for row in found.rows] == ["c", "a", "b", "d"]  # the worst first
    assert found.mean["miou"] == pytest.approx(100 / 3) and by_name(found, "recall")["c"] is None
    found = class_scores(confusion(torch.tensor([1]), torch.tensor([IGNORE]), 2))
    assert found["iou"].isnan().all() and math.isnan(found["accuracy"].item())
    raises(DataError, "no pixel of the truth has a class", metric_of([1], [IGNORE]).compute)


def test_classes_in_another_order():
    """The truth in its own numbers, predictions in those of the model, which has one more."""
    model = ["e", "d", "b", "a", "c"]
    metric = metric_of([3, 3, 2, 0], [0, 1, 1, 2], classes=model)
    assert metric.matrix.tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1],  # as a class that the data do not have
        [0, 0, 0, 0, 0],
    ]
    found = metric.compute()
    assert by_name(found, "iou") == {"c": 0, "a": 50, "b": 50, "d": None}
    assert found.mean["accuracy"] == 50
    with pytest.raises(CheckpointError, match="it does not know d"):
        SegmentMetric(SimpleNamespace(classes=NAMES), ["a", "b", "c", "x"])


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
    found = class_scores(matrix)["iou"]
    assert found.tolist() == pytest.approx((100 * index).tolist(), abs=1e-4)
    assert found.nanmean().item() == pytest.approx(100 * index.mean().item(), abs=1e-4)


@pytest.fixture
def root(tmp_path):
    return write_set(tmp_path / "data", count=3, splits=("val",))


def truth_as_predictions(root, folder):
    """Label maps that are right, and sky where there is no truth."""
    folder.mkdir()
    for path in (root / "labels/val").iterdir():
        labels = np.array(Image.open(path))
        labels[labels == IGNORED] = 0
        Image.fromarray(labels).save(folder / path.name)
    return folder


def score(root, folder, **options):
    return evaluate("segment", data=root, predictions=folder, **options)


def test_label_maps_on_disk(root, tmp_path):
    found = score(root, truth_as_predictions(root, tmp_path / "out"))
    assert found.mean == {"miou": 100, "accuracy": 100, "class_accuracy": 100}
    assert (found.facts, found.missing, found.skipped) == ({"images": 3}, [], [])
    assert sum(row["pixels"] for row in found.rows) == 3 * (40 * 56 - 10 * 14)
    folder = tmp_path / "out"
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(folder / "0.png")
    raises(DataError, "label map of 0 has 8x9 pixels, the truth 56x40", score, root, folder)
    Image.fromarray(np.full((40, 56), 3, np.uint8)).save(folder / "0.png")
    raises(DataError, "of 0 must have classes from 0 to 2, got 3", score, root, folder)
