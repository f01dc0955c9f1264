# SPDX-License-Identifier: Apache-2.0
"""Scores of predicted labels, computed from the confusion matrix."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quadtree_attention.errors import DataError
from quadtree_attention.images import Array
from quadtree_attention.tasks.contract import Column, Metric, Scores, Source
from quadtree_attention.tasks.readers import match_classes

if TYPE_CHECKING:
    from quadtree_attention.tasks.segment.result import Segmentation

IGNORE = -1  # ground truth of a pixel without a class
LISTED = 30  # classes in the table: those with the lowest IoU
COLUMNS = (
    Column("name", "class", None),
    Column("iou", "IoU %"),
    Column("recall", "recall %"),
    Column("pixels", "pixels", None),
)


class SegmentMetric(Metric[Array, "Segmentation"]):
    """Intersection over union and accuracy of label maps, in percent.

    An image without a prediction is left out, not counted as wrong.

    Args:
        source: The data; its classes are scored.
        classes: Classes of the predictions, matched by name; None: those of the data, in order.
    """

    def __init__(self, source: Source[Array], classes: Sequence[str] | None = None) -> None:
        self.names = list(source.classes or ())
        count = len(self.names)
        ours = self.names if classes is None else list(classes)
        # Class of the data for each class of the predictions; `count` if the data do not have it
        self.table = torch.full((len(ours),), count)
        self.table[match_classes(self.names, ours)] = torch.arange(count)
        self.matrix = torch.zeros(count, count + 1, dtype=torch.long)
        self.images = 0

    def update(self, name: str, truth: Array, found: "Segmentation | None") -> None:
        """Add an image.

        Raises:
            DataError: The label map has another size than the ground truth, or unknown classes.
        """
        if found is None:
            return
        labels = found.labels
        if labels.shape != truth.shape:
            raise DataError(
                f"the label map of {name} has {labels.shape[1]}x{labels.shape[0]} pixels, the "
                f"truth {truth.shape[1]}x{truth.shape[0]}; predict at the size of the images"
            )
        if (highest := int(labels.max())) >= len(self.table):
            raise DataError(
                f"the label map of {name} must have classes from 0 to {len(self.table) - 1}, got "
                f"{highest}; pass predictions of the same classes"
            )
        self.add(torch.from_numpy(labels.astype(np.int32)), torch.from_numpy(truth))
        self.images += 1

    def add(self, predicted: Tensor, truth: Tensor) -> None:
        """Add pixels: predicted and true classes of any shape, on any device."""
        count = len(self.names)
        found = self.table.to(predicted.device)[predicted.long()]
        self.matrix = self.matrix.to(predicted.device)
        self.matrix += confusion(found, truth, count + 1)[:count]

    def state(self) -> tuple[list[list[int]], int]:
        return self.matrix.tolist(), self.images

    def merge(self, states: Sequence[Any]) -> None:
        self.matrix = torch.stack([torch.tensor(matrix) for matrix, _ in states]).sum(dim=0)
        self.images = sum(images for _, images in states)

    def compute(self) -> Scores:
        """Return the scores; rows are classes, the lowest IoU first.

        Raises:
            DataError: No pixel of the ground truth has a class.
        """
        if not self.matrix.any():
            raise DataError("no pixel of the truth has a class; there is nothing to score")
        values = class_scores(self.matrix)
        columns = values["iou"].tolist(), values["recall"].tolist(), self.matrix.sum(dim=1).tolist()
        keys = ("name", "iou", "recall", "pixels")
        rows: list[dict[str, Any]] = [
            {k: None if v != v else v for k, v in zip(keys, row, strict=True)}  # NaN becomes None
            for row in zip(self.names, *columns, strict=True)
        ]
        seen = [row["recall"] for row in rows if row["recall"] is not None]
        mean = {
            "miou": values["iou"].nanmean().item(),
            "accuracy": values["accuracy"].item(),
            "class_accuracy": sum(seen) / len(seen),
        }
        rows.sort(key=lambda row: math.inf if row["iou"] is None else row["iou"])
        facts = {"images": self.images}
        return Scores("segment", mean, rows, COLUMNS, facts=facts, listed=LISTED)


def confusion(predicted: Tensor, truth: Tensor, num_classes: int) -> Tensor:
    """Count pixels by true class (row) and predicted class (column): (C, C), int64.

    Args:
        predicted: Classes from 0 to `num_classes` - 1, of any shape.
        truth: The same, or `IGNORE` for ignored pixels.
        num_classes: C.
    """
    counted = truth != IGNORE
    rows, columns = truth[counted].long(), predicted[counted].long()
    cells = torch.bincount(rows * num_classes + columns, minlength=num_classes**2)
    return cells.view(num_classes, num_classes)


def class_scores(matrix: Tensor) -> dict[str, Tensor]:
    """Compute scores in percent from a confusion matrix; NaN if undefined.

    Args:
        matrix: (C, C), or (C, C + 1) with a column for predictions outside of the C classes.

    Returns:
        "iou" (C): intersection over union of predicted and true pixels, NaN for a class in neither;
        "recall" (C): share of a class's pixels that were found, NaN for a class without pixels;
        "accuracy" (): share of all pixels that have the right class.
    """
    matrix = matrix.double().cpu()
    right, true, found = matrix.diagonal(), matrix.sum(dim=1), matrix.sum(dim=0)[: len(matrix)]
    return {
        "iou": right / (true + found - right) * 100,
        "recall": right / true * 100,
        "accuracy": right.sum() / matrix.sum() * 100,
    }
