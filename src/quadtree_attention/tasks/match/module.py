# SPDX-License-Identifier: Apache-2.0
"""Training of a matcher."""

import sys
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from quadtree_attention.errors import MissingDependencyError
from quadtree_attention.models.matcher import COARSE_STRIDE, Features, LoFTR
from quadtree_attention.models.parts.coarse_matching import CoarseMatches, matches_for_training
from quadtree_attention.models.registry import create
from quadtree_attention.tasks.match.data import grey
from quadtree_attention.tasks.match.losses import coarse_loss, fine_loss
from quadtree_attention.tasks.match.metrics import POSE_THRESHOLDS, auc, pose_error
from quadtree_attention.tasks.match.supervision import (
    View,
    true_matches,
    view_from_depth,
    view_from_flow,
)
from quadtree_attention.tasks.training.loader import seed_from, set_seed
from quadtree_attention.tasks.training.module import TaskModule

CORRECT_PIXELS = 3.0  # a match this near to the truth is right


class MatchModule(TaskModule):
    """A matcher, trained on pairs of images whose pixels are known to correspond.

    The best epoch is that of the highest F-score of matches, which needs nothing but the network:
    the same epoch is the best one wherever a run is made. Poses (`val/auc5`, `val/auc10` and
    `val/auc20`) are estimated where opencv and poselib are installed.

    Args:
        model: Name of a matcher: loftr, loftr_lite, or loftr_quadtree_ and
            indoor, outdoor or small.
        options: Keyword arguments of `LoFTR` that replace those of the name.
        lr: Learning rate at a batch of 16 pairs on all processes together; scaled linearly.
        min_lr: Where the cosine ends, at that batch size too.
        warmup_epochs: Epochs in which the learning rate rises to `lr`.
        weight_decay: Of AdamW.
        fine_weight: Weight of the fine loss.
        fine_matches: Matches per pair that the fine stage learns from.
        seed: Decides weights and which matches the fine stage sees.
    """

    monitor = "val/fscore"
    batch_of_lr = 16

    def __init__(
        self,
        model: str = "loftr_quadtree_small",
        options: dict[str, Any] | None = None,
        lr: float = 2e-3,
        min_lr: float = 1e-6,
        warmup_epochs: float = 1,
        weight_decay: float = 0.05,
        fine_weight: float = 1.0,
        fine_matches: int = 512,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        set_seed(seed_from(seed))  # the same first weights on every process
        self.kwargs = options or {}
        self.model: LoFTR = cast(LoFTR, create(model, **self.kwargs))
        self.no_poses = why_no_poses()
        self.errors: list[float] = []

    def on_fit_start(self) -> None:
        if self.no_poses and self.trainer.is_global_zero:
            print(
                f"quadtree: validation leaves out val/auc5, val/auc10 and val/auc20: "
                f"{self.no_poses}",
                file=sys.stderr,
            )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        view0, view1 = views(batch)
        truth, _ = true_matches(view0, view1, COARSE_STRIDE)
        features = self.model.encode(images(batch))
        confidence = self.model.confidence(features)
        coarse = coarse_loss(confidence, truth, features.mask0, features.mask1)
        predicted = self.model.select(features, confidence.detach())
        fine = self._fine_loss(features, predicted, truth, view0)
        loss = coarse + self.hparams["fine_weight"] * fine
        self.check_loss(loss, batch_idx)
        count = len(batch["image0"])
        self.log_mean("train/loss", loss.detach(), count, prog_bar=True)
        self.log_mean("train/coarse", coarse.detach(), count)
        self.log_mean("train/fine", fine.detach(), count)
        self.note_skipped(batch)
        return loss

    def _fine_loss(
        self, features: Features, predicted: CoarseMatches, truth: CoarseMatches, view0: View
    ) -> Tensor:
        count = self.hparams["fine_matches"] * len(features.coarse0)
        matches = matches_for_training(predicted, truth, count=count, least_true=count // 4)
        fine = self.model.fine(features, matches)
        cells = view0.at_cells(COARSE_STRIDE)
        at = matches.batch_indexes, matches.cells0
        target, seen = cells.target.flatten(1, 2)[at], cells.seen.flatten(1)[at]
        centre = fine.keypoints1.detach() - fine.offset.detach() * self.model.window_radius
        offset = (target - centre) / self.model.window_radius
        # what is not seen lies in no window
        offset = torch.where(seen[:, None], offset, torch.inf)
        return fine_loss(fine.offset.float(), fine.std.float(), offset.float())

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        found = self.model(images(batch))
        view0, view1 = views(batch)
        right = correct(found, view0)
        pairs, matches = len(batch["image0"]), len(right)
        scores = f_scores(found, right, true_matches(view0, view1, COARSE_STRIDE)[0], pairs)
        self.log_mean("val/fscore", scores.mean() * 100, pairs, prog_bar=True)
        if matches:
            self.log_mean("val/precision", right.float().mean() * 100, matches)
        self.log_mean("val/matches", float(matches) / pairs, pairs, prog_bar=True)
        if not self.no_poses:
            self.errors += pose_errors(found, batch)
        self.note_skipped(batch)

    def on_validation_epoch_end(self) -> None:
        if self.no_poses:
            return
        errors = self._from_all_processes(self.errors)
        self.errors = []
        for threshold, area in zip(POSE_THRESHOLDS, auc(errors, POSE_THRESHOLDS), strict=True):
            # equal on all processes already
            self.log(f"val/auc{threshold:g}", area, prog_bar=threshold == 10, sync_dist=False)

    def card(self) -> dict[str, Any]:
        return {"model": self.hparams["model"], "kwargs": self.kwargs, "task": "match"}

    def _from_all_processes(self, values: list[float]) -> list[float]:
        if self.trainer.world_size == 1:
            return values
        gathered: list[list[float]] = [[] for _ in range(self.trainer.world_size)]
        torch.distributed.all_gather_object(gathered, values)
        return [value for part in gathered for value in part]


def images(batch: dict[str, Any]) -> dict[str, Tensor]:
    """What the matcher sees of a batch: grey images, and masks where they are padded."""
    masks = {name: batch[name] for name in ("mask0", "mask1") if name in batch}
    return {name: grey(batch[name]) for name in ("image0", "image1")} | masks


def views(batch: dict[str, Any]) -> tuple[View, View]:
    """Where pixels go, from flow if it is known, else from depth and pose."""
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
    """Whether each match is where the truth is (M,)."""
    x, y = found["keypoints0"].round().long().unbind(dim=1)
    height, width = view0.seen.shape[1:]
    # refined points may lie a little outside
    at = found["batch_indexes"], y.clamp(0, height - 1), x.clamp(0, width - 1)
    away = (found["keypoints1"] - view0.target[at]).norm(dim=1)
    return (away < CORRECT_PIXELS) & view0.seen[at]


def f_scores(found: dict[str, Tensor], right: Tensor, truth: CoarseMatches, pairs: int) -> Tensor:
    """F-score of each pair (B,): harmonic mean of the share of matches that are right, and of right
    matches per true match of coarse cells. 0 where nothing is to be found.

    Precision alone would reward a matcher that is silent, their number one that is talkative.
    """

    def count(indexes: Tensor) -> Tensor:
        return torch.bincount(indexes, minlength=pairs).float()

    every, good = found["batch_indexes"], count(found["batch_indexes"][right])
    return 2 * good / (count(every) + count(truth.batch_indexes)).clamp(min=1)


def why_no_poses() -> str | None:
    """What keeps poses from being estimated here; None if nothing does."""
    try:
        import quadtree_attention.tasks.match.estimate  # noqa: F401
    except MissingDependencyError as error:
        return str(error)
    return None


def pose_errors(found: dict[str, Tensor], batch: dict[str, Any]) -> list[float]:
    """Error of the pose that the matches of each pair give, in degrees; infinite without one."""
    from quadtree_attention.tasks.match.estimate import relative_pose  # opencv, poselib

    points = {name: found[name].double().cpu().numpy() for name in ("keypoints0", "keypoints1")}
    pair = found["batch_indexes"].cpu().numpy()
    cameras = (batch[name].double().cpu().numpy() for name in ("K0", "K1", "T_0to1"))
    errors = []
    for i, (K0, K1, T) in enumerate(zip(*cameras, strict=True)):
        mine = pair == i
        pose = relative_pose(points["keypoints0"][mine], points["keypoints1"][mine], K0, K1)
        errors.append(np.inf if pose is None else pose_error(pose.rotation, pose.translation, T))
    return errors
