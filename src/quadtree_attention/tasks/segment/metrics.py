# SPDX-License-Identifier: Apache-2.0
"""How good predicted labels are; pure functions.

All scores follow from the confusion matrix, which can be added up over images and processes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -1  # in the truth: a pixel that belongs to no class


@dataclass(frozen=True)
class Scores:
    """Scores in percent; NaN where there is nothing to score.

    Attributes:
        miou: Mean of `iou` over the classes that are in the truth or in a prediction.
        iou: Of every class, intersection over union of predicted and true pixels; NaN for a class
            that is in neither.
        accuracy: Share of all pixels that have the right class.
        class_accuracy: Of every class, the share of its pixels that were found; NaN without any.
    """

    miou: float
    iou: list[float]
    accuracy: float
    class_accuracy: list[float]


def confusion(predicted: Tensor, truth: Tensor, num_classes: int) -> Tensor:
    """Pixels by true class (row) and predicted class (column): (C, C), int64.

    Args:
        predicted: Classes from 0 to `num_classes` - 1, of any shape.
        truth: The same, or `IGNORE` for pixels that do not count.
        num_classes: C.
    """
    counted = truth != IGNORE
    rows, columns = truth[counted].long(), predicted[counted].long()
    cells = torch.bincount(rows * num_classes + columns, minlength=num_classes**2)
    return cells.view(num_classes, num_classes)


def scores(matrix: Tensor) -> Scores:
    """The scores that follow from a confusion matrix (C, C)."""
    matrix = matrix.double().cpu()
    right, true, found = matrix.diagonal(), matrix.sum(dim=1), matrix.sum(dim=0)
    iou = right / (true + found - right) * 100  # 0 / 0 where a class is nowhere: NaN
    return Scores(
        miou=iou.nanmean().item(),
        iou=iou.tolist(),
        accuracy=(right.sum() / matrix.sum() * 100).item(),
        class_accuracy=(right / true * 100).tolist(),
    )
