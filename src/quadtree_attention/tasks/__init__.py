# SPDX-License-Identifier: Apache-2.0
"""The front door: one predictor per task, training and evaluation.

Names are imported on first access, so that importing the package imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadtree_attention.tasks.classify.predictor import Classifier
    from quadtree_attention.tasks.classify.result import Classification
    from quadtree_attention.tasks.contract import Scores
    from quadtree_attention.tasks.detect.predictor import Detector
    from quadtree_attention.tasks.detect.result import Detections
    from quadtree_attention.tasks.evaluation import evaluate
    from quadtree_attention.tasks.match.predictor import Matcher
    from quadtree_attention.tasks.match.result import Matches
    from quadtree_attention.tasks.segment.predictor import Segmenter
    from quadtree_attention.tasks.segment.result import Segmentation
    from quadtree_attention.tasks.stereo.predictor import StereoMatcher
    from quadtree_attention.tasks.stereo.result import Disparity
    from quadtree_attention.tasks.training.run import Run, train

__all__ = [
    "Classification",
    "Classifier",
    "Detections",
    "Detector",
    "Disparity",
    "Matcher",
    "Matches",
    "Run",
    "Scores",
    "Segmentation",
    "Segmenter",
    "StereoMatcher",
    "evaluate",
    "train",
]

_HOMES = {
    "Classification": "classify.result",
    "Classifier": "classify.predictor",
    "Detections": "detect.result",
    "Detector": "detect.predictor",
    "Disparity": "stereo.result",
    "Matcher": "match.predictor",
    "Matches": "match.result",
    "Run": "training.run",
    "Scores": "contract",
    "Segmentation": "segment.result",
    "Segmenter": "segment.predictor",
    "StereoMatcher": "stereo.predictor",
    "evaluate": "evaluation",
    "train": "training.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
