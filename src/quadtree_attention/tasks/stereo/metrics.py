# SPDX-License-Identifier: Apache-2.0
"""Metrics of disparities and occlusions.

Pure functions on tensors or arrays of equal shape. A score without valid pixels is NaN. The error
of a NaN prediction is infinite.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from quadtree_attention.errors import DataError
from quadtree_attention.images import Array
from quadtree_attention.tasks.contract import Column, Metric, Scores
from quadtree_attention.tasks.stereo.readers import StereoTruth
from quadtree_attention.tasks.stereo.result import OCCLUDED, Disparity

Values: TypeAlias = Tensor | Array
BAD = (1, 2, 3)  # pixels
D1_PIXELS, D1_SHARE = 3.0, 0.05  # an outlier of KITTI exceeds both
_TITLES = {"epe": "EPE", "bad1": "bad-1", "bad2": "bad-2", "bad3": "bad-3", "d1": "D1"}
COLUMNS = (
    Column("name", "pair", None),
    *(
        Column(f"{key}_{region}", f"{title} {region}", 2 if key == "epe" else 1)
        for region in ("noc", "all")
        for key, title in _TITLES.items()
    ),
    Column("occlusion_iou", "occlusion IoU"),
    Column("occlusion_iou_both", "IoU as STTR"),
)


class StereoMetric(Metric[StereoTruth, Disparity]):
    """Scores per pair, and their means over pairs; pairs without a prediction do not count."""

    def update(self, name: str, truth: StereoTruth, found: Disparity | None) -> None:
        if found is None:
            return
        if found.disparity.shape != truth.disparity.shape:
            (height, width), (rows, columns) = found.disparity.shape, truth.disparity.shape
            raise DataError(
                f"the prediction of {name} must have the size of its pair, {columns}x{rows}, got "
                f"{width}x{height}; predict again at that size"
            )
        of_truth = truth.disparity, truth.known, truth.occluded
        row = scores(found.disparity, *of_truth, found.occlusion, visible=truth.visible)
        self.rows.append({"name": name, **row})

    def compute(self) -> Scores:
        numbers = [{k: v for k, v in row.items() if k != "name"} for row in self.rows]
        there = {key for row in self.rows for key in row}
        columns = tuple(column for column in COLUMNS if column.key in there)
        facts = {"pairs": len(self.rows), "units": "EPE in pixels, bad-N and D1 in percent"}
        return Scores("stereo", mean_scores(numbers), self.rows, columns, facts)


def occlusion_iou(
    predicted: Values, occluded: Values, where: Values, *, both: bool = False
) -> float:
    """IoU of predicted and true occlusion.

    Args:
        predicted: Probability of occlusion, or bool.
        occluded: Ground truth, bool.
        where: Pixels with ground truth.
        both: Add intersections and unions of visible pixels before dividing, as STTR does; this is
            much higher, since most pixels are visible.
    """
    where = torch.as_tensor(where)
    found = (torch.as_tensor(predicted).float() > OCCLUDED)[where]
    true = torch.as_tensor(occluded)[where]
    shared, either = (found & true).sum().item(), (found | true).sum().item()
    if both:
        shared += (~found & ~true).sum().item()
        either += (~found | ~true).sum().item()
    return shared / either if either else float("nan")


def scores(
    disparity: Values,
    truth: Values,
    known: Values,
    occluded: Values,
    predicted_occlusion: Values | None = None,
    *,
    visible: Values | None = None,
) -> dict[str, float]:
    """Return all scores of one image.

    These are `epe` (mean error in pixels), `bad1`, `bad2` and `bad3` (percent of errors above 1, 2
    and 3 pixels), `d1` (outliers of KITTI in percent), each with `_noc` (non-occluded pixels) and
    `_all` (all known pixels); `occlusion_iou` and `occlusion_iou_both`.

    Args:
        disparity: Predicted, in pixels.
        truth: True disparity, in pixels.
        known: Pixels with ground truth, bool.
        occluded: Pixels occluded in, or outside of, the other view, bool.
        predicted_occlusion: Probability; None omits the scores of occlusion.
        visible: Pixels visible in both views; None: all known pixels that are not occluded.
    """
    known, occluded = torch.as_tensor(known), torch.as_tensor(occluded)
    seen = known & ~occluded if visible is None else torch.as_tensor(visible)
    error = _errors(disparity, truth)
    wrong = {f"bad{pixels}": error > pixels for pixels in BAD}
    wrong["d1"] = (error > D1_PIXELS) & (error > D1_SHARE * torch.as_tensor(truth).abs())
    found: dict[str, float] = {}
    for region, where in (("noc", seen & known), ("all", known)):
        found[f"epe_{region}"] = _mean(error, where)
        found |= {f"{name}_{region}": 100 * _mean(bad, where) for name, bad in wrong.items()}
    if predicted_occlusion is not None:
        judged = seen | occluded
        for name, both in (("occlusion_iou", False), ("occlusion_iou_both", True)):
            found[name] = occlusion_iou(predicted_occlusion, occluded, judged, both=both)
    return found


def mean_scores(images: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means over images with equal weight; images without a score (NaN) are left out."""
    gathered: dict[str, list[float]] = {}
    for image in images:
        for name, value in image.items():
            gathered.setdefault(name, []).append(value)
    there = {name: [v for v in values if not np.isnan(v)] for name, values in gathered.items()}
    return {name: float(np.mean(v)) if v else float("nan") for name, v in there.items()}


def _errors(disparity: Values, truth: Values) -> Tensor:
    error = (torch.as_tensor(disparity).double() - torch.as_tensor(truth).double()).abs()
    return error.where(~error.isnan(), torch.inf)


def _mean(values: Tensor, where: Values) -> float:
    chosen = values[torch.as_tensor(where, device=values.device)]
    return chosen.double().mean().item() if chosen.numel() else float("nan")
