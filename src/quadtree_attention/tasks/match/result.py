# SPDX-License-Identifier: Apache-2.0
"""Matches of two images, poses and homographies computed from them, and their files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from quadtree_attention.errors import DataError
from quadtree_attention.images import Array
from quadtree_attention.tasks.contract import Codec, Result, table
from quadtree_attention.tasks.match import pose
from quadtree_attention.tasks.match.pose import Camera, Estimator, Homography, Pose
from quadtree_attention.tasks.readers import npz_bytes, read_npz

ARRAYS = ("keypoints0", "keypoints1", "confidence")


@dataclass(frozen=True, eq=False, repr=False)
class Matches(Result):
    """Corresponding points of two images: row i of one belongs to row i of the other.

    Attributes:
        keypoints0: (N, 2) pixels (x, y) of image 0 at its original size, upright; the centre of
            the first pixel is (0, 0).
        keypoints1: (N, 2) pixels of image 1.
        confidence: (N,), in [0, 1].
        poses: The relative pose by estimator, None if it has none; see `with_poses`.
    """

    task: ClassVar[str] = "match"

    keypoints0: Array
    keypoints1: Array
    confidence: Array
    poses: Mapping[Estimator, Pose | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.confidence)

    def best(self, count: int) -> Self:
        """Return the `count` most confident matches, best first, without poses."""
        order = np.argsort(-self.confidence, kind="stable")[:count]
        return replace(self, poses={}, **{name: getattr(self, name)[order] for name in ARRAYS})

    def homography(self, estimator: Estimator = "poselib", **options: Any) -> Homography | None:
        """Estimate the homography from image 0 to image 1, or None; see `pose.homography`."""
        return pose.homography(self.keypoints0, self.keypoints1, estimator=estimator, **options)

    def relative_pose(
        self, K0: Camera, K1: Camera, estimator: Estimator = "poselib", **options: Any
    ) -> Pose | None:
        """Estimate the motion from camera 0 to camera 1, or None; see `pose.relative_pose`."""
        points = self.keypoints0, self.keypoints1
        return pose.relative_pose(*points, K0, K1, estimator=estimator, **options)

    def with_poses(self, K0: Camera, K1: Camera) -> Self:
        """Add the poses of both estimators, and a warning if there are few inliers."""
        poses = {name: self.relative_pose(K0, K1, name) for name in pose.ESTIMATORS}
        cautions = tuple(
            f"{name}: {found.caution}" for name, found in poses.items() if found and found.caution
        )
        return replace(self, poses=poses, warnings=self.warnings + cautions)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "matches": len(self),
            "seconds": round(self.seconds, 4),
            "matched_at": self.seen or None,
        }
        if self.poses:
            found["poses"] = {name: p and p.to_dict() for name, p in self.poses.items()}
        return found | {
            "keypoints0": self.keypoints0.round(3).tolist(),
            "keypoints1": self.keypoints1.round(3).tolist(),
            "confidence": self.confidence.astype(float).round(4).tolist(),
            "warnings": list(self.warnings),
        }

    def to_text(self) -> str:
        sure = "the images have nothing in common that is sure enough; lower --threshold"
        rows = {"matches": f"none: {'; '.join(self.warnings) or sure}"}
        if len(self):
            rows = {"matches": f"{len(self):,}, mean confidence {self.confidence.mean():.2f}"}
        if self.seconds:
            rows["time"] = f"{self.seconds:.2f} s"
        if self.seen:
            given = [image.size for image in self.images] or self.seen
            rows["matched at"] = " and ".join(
                "{}x{}".format(*size) + ("" if size == whole else " (of {}x{})".format(*whole))
                for size, whole in zip(self.seen, given, strict=True)
            )
        nothing = "no pose: the matches do not determine one"
        rows |= {f"by {name}": p.to_text() if p else nothing for name, p in self.poses.items()}
        return table(rows)


class MatchesCodec(Codec[Matches]):
    """Matches as npz: `keypoints0` and `keypoints1` (N, 2), `confidence` (N,)."""

    suffixes = (".npz",)

    def encode(self, found: Mapping[str, Matches], suffix: str) -> bytes:
        (matches,) = found.values()
        return npz_bytes(**{name: getattr(matches, name) for name in ARRAYS})

    def decode(self, path: Path) -> dict[str, Matches]:
        stored = read_npz(path, ARRAYS)
        arrays = points0, points1, confidence = [stored[name] for name in ARRAYS]
        count = confidence.size
        numbers = all(array.dtype.kind in "fiu" for array in arrays)
        shapes = [array.shape for array in arrays]
        if not numbers or shapes != [(count, 2), (count, 2), (count,)]:
            raise DataError(
                f"{path} must hold keypoints0 and keypoints1 (N, 2) and confidence (N,), got "
                f"{', '.join(map(str, shapes))} of {', '.join(str(a.dtype) for a in arrays)}; "
                "match again"
            )
        if not all(np.isfinite(points).all() for points in (points0, points1)):
            raise DataError(f"{path} must hold finite points, got others; match again")
        return {path.stem: Matches(points0, points1, confidence)}
