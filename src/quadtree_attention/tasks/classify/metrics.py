# SPDX-License-Identifier: Apache-2.0
"""Accuracy of classifications."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quadtree_attention.tasks.classify.result import Classification
from quadtree_attention.tasks.contract import Column, Metric, Scores, Source
from quadtree_attention.tasks.readers import match_classes

COLUMNS = (
    Column("name", "class", None),
    Column("images", "images", None),
    Column("accuracy", "top-1 %"),
)
LISTED = 10  # classes in the table: those with the lowest accuracy


class ClassifyMetric(Metric[int, Classification]):
    """Top-1 and top-5 accuracy in percent, and top-1 accuracy by class.

    Images without a prediction are left out.

    Args:
        source: Source of the class names of the true labels.
        classes: Class names of the predictions, unless a prediction has its own.
    """

    def __init__(self, source: Source[int], classes: Sequence[str] | None = None) -> None:
        self.theirs = list(source.classes or ())
        self.classes: Sequence[str] = self.theirs if classes is None else classes
        self.places = match_classes(self.theirs, self.classes)
        self.rows: list[tuple[int, int]] = []  # true label, and its rank in the prediction

    def update(self, name: str, truth: int, found: Classification | None) -> None:
        if found is None:
            return
        if found.classes is not self.classes:
            self.classes = found.classes
            self.places = match_classes(self.theirs, self.classes)
        label = self.places[truth]
        rank = ranks(torch.from_numpy(found.logits)[None], torch.tensor([label]))
        self.rows.append((label, int(rank)))

    def state(self) -> tuple[Sequence[str], list[Any]]:
        return self.classes, self.rows

    def merge(self, states: Sequence[Any]) -> None:
        self.classes = states[0][0]
        super().merge([rows for _, rows in states])

    def compute(self) -> Scores:
        labels, places = torch.tensor(self.rows, dtype=torch.int64).view(-1, 2).unbind(1)
        mean = {"top1": percent(places < 1), "top5": percent(places < 5)}
        by_class = per_class(labels, places < 1, len(self.classes))
        rows: list[dict[str, Any]] = [
            {"label": label, "name": self.classes[label], "images": images, "accuracy": accuracy}
            for label, (images, accuracy) in enumerate(by_class)
        ]
        rows.sort(key=lambda row: (row["images"] == 0, row["accuracy"]))
        facts = {"images": len(labels)}
        return Scores("classify", mean, rows, COLUMNS, facts, listed=LISTED)


def ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """Rank of the true class, 0 for the best: (N, classes), (N,) -> (N,).

    Ties rank before the true class, so that constant scores are wrong. So do NaN scores. If the
    score of the true class is NaN, its rank is the last.
    """
    true = logits.gather(1, labels[:, None])  # (N, 1)
    ahead = (~(logits < true)).sum(dim=1) - 1
    return torch.where(true[:, 0].isnan(), torch.iinfo(ahead.dtype).max, ahead)


def per_class(labels: Tensor, right: Tensor, count: int) -> list[tuple[int, float]]:
    """Number of samples and accuracy in percent by class; NaN without samples."""
    samples, hits = (x.bincount(minlength=count) for x in (labels, labels[right]))
    accuracies = hits.double() / samples * 100
    return list(zip(samples.tolist(), accuracies.tolist(), strict=True))


def percent(right: Tensor) -> float:
    """Share of True in percent; NaN if empty."""
    return right.double().mean().item() * 100 if len(right) else float("nan")
