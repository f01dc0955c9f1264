# SPDX-License-Identifier: Apache-2.0
"""Training of a matcher."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor

from quadtree_attention.errors import MissingDependencyError
from quadtree_attention.files import file_sha256
from quadtree_attention.models.convert import check_fit
from quadtree_attention.models.matcher import COARSE_STRIDE, Features, LoFTR
from quadtree_attention.models.parts.coarse_matching import CoarseMatches, matches_for_training
from quadtree_attention.models.registry import weights_path
from quadtree_attention.models.weights import read_checkpoint
from quadtree_attention.tasks.match import TASK
from quadtree_attention.tasks.match.data import grey
from quadtree_attention.tasks.match.losses import coarse_loss, fine_loss
from quadtree_attention.tasks.match.metrics import MatchMetric
from quadtree_attention.tasks.match.pose import libraries
from quadtree_attention.tasks.match.readers import PairLine
from quadtree_attention.tasks.match.result import ARRAYS, Matches
from quadtree_attention.tasks.match.truth import (
    View,
    true_matches,
    view_from_depth,
    view_from_flow,
)
from quadtree_attention.tasks.training.data import Batch, tell
from quadtree_attention.tasks.training.module import NoDecay, TaskModule

Schedule = Literal["cosine", "step"]
CORRECT_PIXELS = 3.0  # maximum error of a correct match


class MatchModule(TaskModule):
    """A matcher, trained on pairs of images with known correspondence.

    The best epoch has the highest F-score of matches. The F-score depends on the network only, so
    that the choice does not depend on installed packages. Poses are estimated if opencv and poselib
    are installed: `val/auc5`, `val/auc10` and `val/auc20` by poselib, `val/opencv_auc5` and so on
    by OpenCV's RANSAC, as published scores.

    Args:
        model: Name of a matcher: loftr, loftr_lite, or loftr_quadtree_indoor, _outdoor or
            _small.
        options: Keyword arguments of `LoFTR` that override the options of the name.
        lr: Learning rate at a batch of 16 pairs on all processes together; scaled linearly.
        min_lr: Final learning rate of the cosine, at the same batch size.
        warmup_epochs: Epochs in which the learning rate rises to `lr`.
        warmup_start: Initial rate of warm-up as a share of `lr`; None: an absolute rate of 1e-6.
        schedule: "cosine", or "step" (the learning rate times `decay` from each of `decay_epochs`
            on).
        decay_epochs: Epochs of the steps.
        decay: Factor of the learning rate at a step.
        weight_decay: Weight decay of AdamW.
        no_decay: Parameters without decay: "vectors" (norms, biases and level weights), "norms", or
            "nothing".
        fine_weight: Weight of the fine loss.
        fine_matches: Matches per pair for the fine loss.
        least_true: Minimum number of true matches among them; None: a quarter.
        cnn: Weights file of a CNN that is kept fixed; "default": the packaged weights.
        seed: Seed of weights and the sampling of matches for the fine loss.
    """

    task = TASK
    monitor = "val/fscore"
    batch_of_lr = 16
    schedules = get_args(Schedule)
    bar = ("auc10",)

    model: LoFTR

    def __init__(
        self,
        model: str = "loftr_quadtree_small",
        options: dict[str, Any] | None = None,
        lr: float = 2e-3,
        min_lr: float = 1e-6,
        warmup_epochs: float = 1,
        warmup_start: float | None = None,
        schedule: Schedule = "cosine",
        decay_epochs: Sequence[float] = (),
        decay: float = 0.5,
        weight_decay: float = 0.05,
        no_decay: NoDecay = "vectors",
        fine_weight: float = 1.0,
        fine_matches: int = 512,
        least_true: int | None = None,
        cnn: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(model, options)
        if cnn is not None:  # loaded from a file; raises for another shape
            path, prefix = weights_path(cnn, TASK.name), "backbone."
            state = read_checkpoint(path)
            own = {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}
            check_fit(self.model.backbone, own)
            self.model.backbone.load_state_dict(own)
            self.model.backbone.requires_grad_(False).eval()
            self.start = file_sha256(path)
        self.no_poses: str | None = None  # reason why poses cannot be estimated; None if they can
        try:
            libraries()
        except MissingDependencyError as error:
            self.no_poses = str(error)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; a fixed CNN stays in evaluation mode."""
        super().train(mode)
        if self.hparams.get("cnn") is not None:
            self.model.backbone.eval()
        return self

    def on_fit_start(self) -> None:
        if self.no_poses and self.trainer.is_global_zero:
            tell(f"validation leaves out val/auc5, val/auc10 and val/auc20: {self.no_poses}")

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        view0, view1 = views(batch)
        truth, _ = true_matches(view0, view1, COARSE_STRIDE)
        features = self.model.encode(images(batch))
        confidence = self.model.confidence(features)
        coarse = coarse_loss(confidence, truth, features.mask0, features.mask1)
        predicted = self.model.select(features, confidence.detach())
        fine = self._fine_loss(features, predicted, truth, view0)
        loss = coarse + self.hparams["fine_weight"] * fine
        return loss, {"coarse": coarse, "fine": fine}

    def _fine_loss(
        self, features: Features, predicted: CoarseMatches, truth: CoarseMatches, view0: View
    ) -> Tensor:
        h, pairs = self.hparams, len(features.coarse0)
        count, least = h["fine_matches"] * pairs, h["least_true"]
        least = count // 4 if least is None else min(count, least * pairs)
        matches = matches_for_training(predicted, truth, count=count, least_true=least)
        fine = self.model.fine(features, matches)
        cells = view0.at_cells(COARSE_STRIDE)
        at = matches.batch_indexes, matches.cells0
        target, seen = cells.target.flatten(1, 2)[at], cells.seen.flatten(1)[at]
        centre = fine.keypoints1.detach() - fine.offset.detach() * self.model.window_radius
        offset = (target - centre) / self.model.window_radius
        # invisible points are outside of all windows
        offset = torch.where(seen[:, None], offset, torch.inf)
        return fine_loss(fine.offset.float(), fine.std.float(), offset.float())

    def validate(self, batch: Batch) -> None:
        found = self.model(images(batch))
        view0, view1 = views(batch)
        right = correct(found, view0)
        pairs, matches = len(batch["image0"]), len(right)
        scores = f_scores(found, right, true_matches(view0, view1, COARSE_STRIDE)[0], pairs)
        self.log_mean("val/fscore", scores.mean() * 100, pairs, prog_bar=True)
        if matches:
            self.log_mean("val/precision", right.float().mean() * 100, matches)
        self.log_mean("val/matches", float(matches) / pairs, pairs, prog_bar=True)
        if self.metric is not None:
            add_poses(self.metric, found, batch)

    def new_metric(self) -> MatchMetric | None:
        return None if self.no_poses else MatchMetric()

    def scores(self, metric: Any) -> Mapping[str, float]:
        """Return the AUC of poses: `auc5`, `auc10` and `auc20`, and the same for OpenCV."""
        mean = cast(MatchMetric, metric).compute().mean
        short = {key: key.removeprefix("pose_").removeprefix("poselib_") for key in mean}
        return {name: mean[key] or 0.0 for key, name in short.items() if "_auc" in key}


def images(batch: Batch) -> dict[str, Tensor]:
    """Return the inputs of the matcher: grey images, and masks of padded images."""
    masks = {name: batch[name] for name in ("mask0", "mask1") if name in batch}
    return {name: grey(batch[name]) for name in ("image0", "image1")} | masks


def views(batch: Batch) -> tuple[View, View]:
    """Return target positions of pixels, from flow if available, else from depth and pose."""
    if "flow0to1" not in batch:
        depth0, depth1, K0, K1 = (batch[name] for name in ("depth0", "depth1", "K0", "K1"))
        return (
            view_from_depth(depth0, depth1, K0, K1, batch["T_0to1"]),
            view_from_depth(depth1, depth0, K1, K0, batch["T_1to0"]),
        )
    return (
        view_from_flow(batch["flow0to1"], batch["visible0"]),
        view_from_flow(batch["flow1to0"], batch["visible1"]),
    )


def correct(found: dict[str, Tensor], view0: View) -> Tensor:
    """Return True (M,) for matches within `CORRECT_PIXELS` of the truth."""
    x, y = found["keypoints0"].round().long().unbind(dim=1)
    height, width = view0.seen.shape[1:]
    # refined points may be slightly outside of the image
    at = found["batch_indexes"], y.clamp(0, height - 1), x.clamp(0, width - 1)
    away = (found["keypoints1"] - view0.target[at]).norm(dim=1)
    return (away < CORRECT_PIXELS) & view0.seen[at]


def f_scores(found: dict[str, Tensor], right: Tensor, truth: CoarseMatches, pairs: int) -> Tensor:
    """F-score of each pair (B,); 0 for pairs without true matches.

    It is the harmonic mean of precision, and of correct matches per true match of coarse cells.

    Precision alone would favour few matches, the number of correct matches many.
    """

    def count(indexes: Tensor) -> Tensor:
        return torch.bincount(indexes, minlength=pairs).float()

    every, good = found["batch_indexes"], count(found["batch_indexes"][right])
    return 2 * good / (count(every) + count(truth.batch_indexes)).clamp(min=1)


def add_poses(metric: Any, found: dict[str, Tensor], batch: Batch) -> None:
    """Add the pairs of a batch with their cameras and motions to a metric.

    If the batch has `pixels0` and `pixels1` (B, 2), points are first multiplied by them.
    """
    names = ("K0", "K1", "T_0to1", *(name for name in ("pixels0", "pixels1") if name in batch))
    arrays = {name: found[name].double().cpu().numpy() for name in ARRAYS}
    pair = found["batch_indexes"].cpu().numpy()
    cameras = (batch[name].double().cpu().numpy() for name in names)
    for i, (K0, K1, T, *pixels) in enumerate(zip(*cameras, strict=True)):
        own = {name: array[pair == i] for name, array in arrays.items()}
        if pixels:
            K0, K1 = (K * [[x], [y], [1]] for K, (x, y) in zip((K0, K1), pixels, strict=True))
            own |= {f"keypoints{v}": own[f"keypoints{v}"] * pixels[v] for v in range(2)}
        truth = PairLine(0, "", "", K0=K0, K1=K1, T_0to1=T, name=str(i))
        metric.update(truth.name, truth, Matches(**own))
