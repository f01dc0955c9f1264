# SPDX-License-Identifier: Apache-2.0
"""Average precision by COCO's rules, for files of results and for validation."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from quadtree_attention.checks import needs
from quadtree_attention.errors import DataError
from quadtree_attention.tasks.contract import Column, Metric, Scores, Source
from quadtree_attention.tasks.detect.readers import CLIPPED, Annotation, Truth
from quadtree_attention.tasks.detect.result import Detections
from quadtree_attention.tasks.detect.rle import mask_problem
from quadtree_attention.tasks.readers import match_classes, summary

Entry = dict[str, Any]  # entry of a file of results
Precisions = dict[str, float | None]
MOST = 100  # detections per image that are scored: those with the highest scores, as in COCO
COLUMNS = [Column("name", "class", None), Column("objects", "objects", None), Column("box", "AP")]
LISTED = 10  # classes in the table: those with the lowest precision


class DetectMetric(Metric[Truth, Detections]):
    """Average precision (AP) in percent, by COCO's rules; None if there are no such objects.

    The scores are `ap` (IoU from 0.50 to 0.95), `ap50`, `ap75`, and `ap` of `small` (below 32x32
    pixels), `medium` (below 96x96) and `large` objects. If all results have masks, there are the
    same scores of masks, `mask_ap` and so on. An image without a result counts as one without
    detections.

    Args:
        source: Source of the images, objects and classes.
        classes: Class names of the labels of results; None: as in the source.
        overlaps: IoU thresholds of a match; None: as in COCO.
        recalls: Recalls at which precision is sampled; None: as in COCO.
    """

    def __init__(
        self,
        source: Source[Truth],
        classes: Sequence[str] | None = None,
        *,
        overlaps: Sequence[float] | None = None,
        recalls: Sequence[float] | None = None,
    ) -> None:
        self.source = source
        self.names = list(source.classes or ())
        places = match_classes(self.names, self.names if classes is None else classes)
        self.label_of = {place + 1: label for label, place in enumerate(places, start=1)}
        self.thresholds = {"iouThrs": overlaps, "recThrs": recalls}
        self.rows: list[tuple[Truth, list[Entry]]] = []

    def update(self, name: str, truth: Truth, found: Detections | None) -> None:
        entries: list[Entry] = []
        self.rows.append((truth, entries))
        if found is None:
            return
        sides = found.boxes[:, 2:] - found.boxes[:, :2]
        boxes = np.concatenate([found.boxes[:, :2], sides], axis=1).tolist()
        for i, label in enumerate(found.labels.tolist()):
            if label in self.label_of:
                entry: Entry = {"image_id": truth.id, "category_id": self.label_of[label]}
                entry |= {"bbox": boxes[i], "score": float(found.scores[i])}
                if found.segmentations is not None:
                    entry["segmentation"] = found.segmentations[i]
                entries.append(entry)

    def compute(self) -> Scores:
        truths = [truth for truth, _ in self.rows]
        entries = [entry for _, entries in self.rows for entry in entries]
        objects = Counter(a.label for t in truths for a in t.annotations if not a.crowd)
        left_out = sum(p.kind != CLIPPED for p in getattr(self.source, "problems", ()))
        mean, by_class = self._precision("bbox", truths, entries)
        rows: list[dict[str, Any]] = [
            {"name": name, "objects": objects[label], "box": by_class[label - 1]}
            for label, name in enumerate(self.names, start=1)
        ]
        columns, unusable = COLUMNS, list[str]()
        if entries and all("segmentation" in entry for entry in entries):
            usable, unusable = self._with_masks(truths)
            of_masks, by_class = self._precision("segm", usable, entries)
            mean |= {f"mask_{name}": value for name, value in of_masks.items()}
            rows = [row | {"mask": value} for row, value in zip(rows, by_class, strict=True)]
            columns = [*COLUMNS, Column("mask", "mask AP")]
        rows.sort(key=lambda row: (row["box"] is None, row["box"] or 0.0))
        facts = {"images": len(truths), "objects": objects.total()}
        facts |= {"detections": len(entries), "left_out": left_out, "no_mask": len(unusable)}
        return Scores("detect", mean, rows, columns, facts, skipped=unusable, listed=LISTED)

    def _with_masks(self, truths: Sequence[Truth]) -> tuple[list[Truth], list[str]]:
        """Return the ground truth without objects whose mask is invalid, and the reasons."""
        where = getattr(self.source, "path", None)
        reasons: list[str] = []

        def usable(annotation: Annotation, truth: Truth) -> bool:
            if problem := mask_problem(annotation.segmentation, truth.height, truth.width):
                reasons.append(f"{where}: annotation {annotation.id}: {problem}")
            return problem is None

        kept = [
            replace(truth, annotations=tuple(a for a in truth.annotations if usable(a, truth)))
            for truth in truths
        ]
        if reasons and getattr(self.source, "strict", False):
            raise DataError(
                f"{len(reasons)} entries of {where} cannot be used as they are: "
                f"{summary(reasons)}; fix them, or leave out --strict"
            )
        return kept, [f"counts for boxes alone: {reason}" for reason in reasons]

    def _precision(
        self, kind: Literal["bbox", "segm"], truths: Sequence[Truth], found: Sequence[Entry]
    ) -> tuple[Precisions, list[float | None]]:
        """Return the precisions of boxes or masks, and `ap` by class."""
        with needs("train", "average precision"):
            from faster_coco_eval import COCO, COCOeval_faster
        # The area of a mask, not of its box, determines its size group
        other = "segmentation" if kind == "bbox" else "bbox"
        entries = [{k: v for k, v in entry.items() if k != other} for entry in found]
        content = self._as_coco(truths, masks=kind == "segm")
        known = COCO(content)
        results = known.loadRes(entries) if entries else COCO({**content, "annotations": []})
        run = COCOeval_faster(known, results, kind, print_function=lambda *_, **__: None)
        run.params.maxDets = [1, 10, MOST]
        for name, values in self.thresholds.items():
            if values is not None:
                setattr(run.params, name, np.array(values, dtype=np.float64))
        run.evaluate()
        run.accumulate()
        # (overlaps, recalls, classes, sizes, limits); -1 where there are no objects
        precision = np.asarray(run.eval["precision"])[..., -1]
        overlaps = np.asarray(run.params.iouThrs)
        every = precision[..., 0]
        mean = {"ap": _mean(every)}
        mean |= {f"ap{at}": _mean(every[np.isclose(overlaps, at / 100)]) for at in (50, 75)}
        for size, name in enumerate(("small", "medium", "large"), start=1):
            mean[name] = _mean(precision[..., size])
        return mean, [_mean(every[:, :, place]) for place in range(len(self.names))]

    def _as_coco(self, truths: Sequence[Truth], *, masks: bool) -> dict[str, Any]:
        """Return the objects in COCO's format, with boxes as given in the file.

        Ids start at 1, since the library treats a match with id 0 as no match.
        """
        listed = [(truth.id, a) for truth in truths for a in truth.annotations]
        return {
            "images": [{"id": t.id, "width": t.width, "height": t.height} for t in truths],
            "categories": [{"id": i, "name": name} for i, name in enumerate(self.names, start=1)],
            "annotations": [
                {
                    "id": number,
                    "image_id": image,
                    "category_id": a.label,
                    "bbox": list(a.given),
                    "area": a.area,
                    "iscrowd": int(a.crowd),
                    **({"segmentation": a.segmentation} if masks else {}),
                }
                for number, (image, a) in enumerate(listed, start=1)
            ],
        }


def _mean(precision: Any) -> float | None:
    known = precision[precision > -1]
    return float(known.mean() * 100) if known.size else None
