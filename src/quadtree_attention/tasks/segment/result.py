# SPDX-License-Identifier: Apache-2.0
"""The class of every pixel of an image, and its PNG files."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quadtree_attention.images import Array
from quadtree_attention.tasks.contract import Codec, Result, share_lines
from quadtree_attention.tasks.segment.readers import read_label_map
from quadtree_attention.viz.palette import Colour, distinct

BYTE = 256  # maximum number of classes of an 8-bit label map


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Segmentation(Result):
    """The class of every pixel of an image.

    Attributes:
        labels: (H, W) class numbers at the size of the upright image; uint8, or uint16 for more
            than 256 classes.
        names: Names of the classes.
        palette: Colours of the classes.
        confidence: Mean probability of the chosen classes, from 0 to 1; None if unknown.
    """

    task: ClassVar[str] = "segment"

    labels: Array
    names: list[str]
    palette: list[Colour]
    confidence: float | None = None

    def shares(self) -> dict[str, float]:
        """Return the share of the image of each class, largest first, without empty classes."""
        counts = np.bincount(self.labels.ravel(), minlength=len(self.names))
        order = np.argsort(-counts, kind="stable")
        return {self.names[i]: float(counts[i]) / self.labels.size for i in order if counts[i]}

    def facts(self) -> list[str]:
        """Return confidence and time, if known."""
        confidence = [] if self.confidence is None else [f"mean confidence {self.confidence:.2f}"]
        return confidence + ([f"{self.seconds:.2f} s"] if self.seconds else [])

    def to_dict(self) -> dict[str, Any]:
        height, width = self.labels.shape
        return {
            "size": [width, height],
            "seen": list(self.seen[0]) if self.seen else None,
            "confidence": None if self.confidence is None else round(self.confidence, 4),
            "seconds": round(self.seconds, 4),
            "classes": [
                {"label": self.names.index(name), "name": name, "share": round(share, 6)}
                for name, share in self.shares().items()
            ],
        }

    def to_text(self) -> str:
        facts = self.facts()
        if self.seen and self.seen[0] != self.labels.shape[::-1]:
            facts.append(f"seen at {self.seen[0][0]}x{self.seen[0][1]}")
        lines = share_lines(self.shares().items())
        return "\n".join([*lines, "  " + ", ".join(facts)] if facts else lines)


class SegmentationCodec(Codec[Segmentation]):
    """Label maps as PNG, one file per image: class numbers, shown in the colours of the classes."""

    suffixes = (".png",)

    def encode(self, found: Mapping[str, Segmentation], suffix: str) -> bytes:
        (result,) = found.values()
        if result.labels.dtype == np.uint8:
            picture = Image.fromarray(result.labels)
            picture.putpalette([channel for colour in result.palette for channel in colour])
        else:
            picture = Image.fromarray(result.labels.astype(np.uint16))
        content = io.BytesIO()
        picture.save(content, format="PNG")
        return content.getvalue()

    def decode(self, path: Path) -> Mapping[str, Segmentation]:
        labels = read_label_map(path)
        highest = int(labels.max())
        classes = self.classes or (self.source and self.source.classes)
        names = list(classes or ()) or [str(label) for label in range(highest + 1)]
        kind = np.uint8 if max(len(names), highest + 1) <= BYTE else np.uint16
        colours = distinct(len(names))
        return {path.stem: Segmentation(labels=labels.astype(kind), names=names, palette=colours)}
