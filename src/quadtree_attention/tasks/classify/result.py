# SPDX-License-Identifier: Apache-2.0
"""The classes of an image, and their npz files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from quadtree_attention.errors import DataError
from quadtree_attention.images import Array
from quadtree_attention.tasks.classify.readers import Predictions
from quadtree_attention.tasks.contract import Codec, Result, share_lines
from quadtree_attention.tasks.readers import match_classes, npz_bytes


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Classification(Result):
    """The most probable classes of an image, best first; ties by the lower label.

    Attributes:
        logits: (classes,) float32, for all classes.
        classes: Names of all classes.
        top: Number of classes in `labels`, `names` and `scores`.
    """

    task: ClassVar[str] = "classify"

    logits: Array
    classes: Sequence[str] = field(repr=False)
    top: int = 5

    @cached_property
    def _ordered(self) -> Any:
        # Stable, so that the order of equal scores is the same on every machine
        scores = torch.from_numpy(self.logits)[None].softmax(dim=1)
        return scores.sort(dim=1, descending=True, stable=True)

    @property
    def labels(self) -> Array:
        """(top,) class numbers, int64."""
        found: Array = self._ordered.indices[0, : self.top].numpy()
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """(top,) class names."""
        return tuple(self.classes[label] for label in self.labels)

    @property
    def scores(self) -> Array:
        """(top,) probabilities, float32."""
        found: Array = self._ordered.values[0, : self.top].numpy()
        return found

    def to_dict(self) -> dict[str, Any]:
        answers = zip(self.labels.tolist(), self.names, self.scores.tolist(), strict=True)
        keys = ("label", "name", "probability")
        return {"predictions": [dict(zip(keys, answer, strict=True)) for answer in answers]}

    def to_text(self) -> str:
        return "\n".join(share_lines(zip(self.names, self.scores, strict=True)))


class ClassificationCodec(Codec[Classification]):
    """One npz file for all images: `logits`, true `labels` (-1 if unknown), `names` and `info`.

    `info` is JSON with the names of the classes. With the true labels, a file can be scored without
    the data.
    """

    suffixes = (".npz",)
    together = True

    def encode(self, found: Mapping[str, Classification], suffix: str) -> bytes:
        first = next(iter(found.values()))
        return npz_bytes(
            logits=np.stack([result.logits for result in found.values()]),
            labels=np.array(self._labels(list(found), first.classes), dtype=np.int64),
            names=np.array(list(found)),
            info=np.array(json.dumps({"classes": list(first.classes), "top": first.top})),
        )

    def decode(self, path: Path) -> dict[str, Classification]:
        read = Predictions(path)
        return {
            name: Classification(logits=logits, classes=read.classes, top=read.top)
            for name, logits in zip(read.names, read.logits, strict=True)
        }

    @cached_property
    def _index(self) -> dict[str, int]:
        source = self.source
        return {} if source is None else {source.name(i): i for i in range(len(source))}

    def _labels(self, names: Sequence[str], classes: Sequence[str]) -> list[int]:
        """True labels as indices of the network's classes."""
        source = self.source
        if source is None or source.classes is None:
            return [-1] * len(names)
        places, labels = match_classes(source.classes, classes), []
        for name in names:
            try:
                labels.append(places[source.truth(self._index[name])])
            except DataError:
                labels.append(-1)
        return labels
