# SPDX-License-Identifier: Apache-2.0
"""The matcher as a matcher of vismatch (https://github.com/gmberton/vismatch).

vismatch brings opencv-python and an older kornia, so it is in no extra: install both packages into
an environment of its own.

Example:
    from quadtree_attention.integrations.vismatch import QuadtreeMatcher

    matcher = QuadtreeMatcher(device="cpu")  # options of Matcher.from_pretrained, and of vismatch
    result = matcher("a.jpg", "b.jpg")
    result["H"], result["num_inliers"], result["matched_kpts0"]
"""

from functools import cache
from typing import Any

from torch import Tensor

from quadtree_attention.errors import MissingDependencyError
from quadtree_attention.files import StrPath
from quadtree_attention.tasks.match.predictor import Matcher

__all__ = ["QuadtreeMatcher"]  # noqa: F822 (made on first access)


def __getattr__(name: str) -> Any:
    if name != "QuadtreeMatcher":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _matcher_class()


@cache
def _matcher_class() -> Any:
    """The class, which inherits from one of vismatch."""
    try:
        from vismatch import BaseMatcher
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the adapter for vismatch needs {error.name}, which is not installed; "
            "pip install vismatch, in an environment of its own"
        ) from error

    class QuadtreeMatcher(BaseMatcher):  # type: ignore[misc]
        """Matches two images by `Matcher`, with the results of vismatch.

        Args:
            device: "cpu" or "cuda".
            weights: As for `Matcher.from_pretrained`.
            size: Pixels of the longer side that the network sees.
            max_num_keypoints: Keep so many of the most confident matches; None: all.
            guided: As for `Matcher`.
            **kwargs: `ransac_iters`, `ransac_conf` and `ransac_reproj_thresh` of vismatch.
        """

        def __init__(
            self,
            device: str = "cpu",
            *,
            weights: StrPath | None = None,
            size: int | None = None,
            max_num_keypoints: int | None = None,
            guided: str = "auto",
            **kwargs: Any,
        ) -> None:
            super().__init__(device, **kwargs)
            self.matcher = Matcher.from_pretrained(
                weights, device=device, size=size, top=max_num_keypoints, guided=guided
            )

        def _forward(self, img0: Tensor, img1: Tensor) -> tuple[Any, ...]:
            """Points 0 and 1, all points and descriptors (there are none), confidence."""
            found = self.matcher(img0.clamp(0, 1).cpu(), img1.clamp(0, 1).cpu())
            points = found.keypoints0, found.keypoints1
            return *points, *points, None, None, found.confidence

    return QuadtreeMatcher
