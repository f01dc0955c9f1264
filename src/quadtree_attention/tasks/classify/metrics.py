# SPDX-License-Identifier: Apache-2.0
"""How good predictions are; pure functions."""

import torch
from torch import Tensor


def ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """Place of the true class, 0 for the best: (N, classes), (N,) -> (N,).

    Equal scores count against the prediction: a model that answers nothing gets nothing. So do
    scores that are no numbers; where the true class has one, no place is good enough.
    """
    true = logits.gather(1, labels[:, None])  # (N, 1)
    ahead = (~(logits < true)).sum(dim=1) - 1
    return torch.where(true[:, 0].isnan(), torch.iinfo(ahead.dtype).max, ahead)


def topk_accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    """Share of samples whose true class is among the `k` best, in percent."""
    return _percent(ranks(logits, labels) < k)


def per_class_accuracy(logits: Tensor, labels: Tensor) -> list[tuple[int, float]]:
    """For every class how many samples it has, and their top-1 accuracy in percent, NaN for 0."""
    right = ranks(logits, labels) < 1
    count = logits.shape[1]
    samples = labels.bincount(minlength=count)
    hits = labels[right].bincount(minlength=count)
    accuracies = hits.double() / samples * 100
    return list(zip(samples.tolist(), accuracies.tolist(), strict=True))


def _percent(right: Tensor) -> float:
    return right.double().mean().item() * 100 if len(right) else float("nan")
