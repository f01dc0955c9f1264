# SPDX-License-Identifier: Apache-2.0
"""High-level interface: one predictor per task, training and evaluation.

Names are imported on first access, so that importing the package imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadtree_attention.tasks.classify.predictor import Classifier as Classifier
    from quadtree_attention.tasks.classify.result import Classification as Classification
    from quadtree_attention.tasks.contract import Scores as Scores
    from quadtree_attention.tasks.detect.predictor import Detector as Detector
    from quadtree_attention.tasks.detect.result import Detections as Detections
    from quadtree_attention.tasks.evaluation import evaluate as evaluate
    from quadtree_attention.tasks.match.predictor import Matcher as Matcher
    from quadtree_attention.tasks.match.result import Matches as Matches
    from quadtree_attention.tasks.segment.predictor import Segmenter as Segmenter
    from quadtree_attention.tasks.segment.result import Segmentation as Segmentation
    from quadtree_attention.tasks.stereo.predictor import StereoMatcher as StereoMatcher
    from quadtree_attention.tasks.stereo.result import Disparity as Disparity
    from quadtree_attention.tasks.training.run import Run as Run
    from quadtree_attention.tasks.training.run import train as train

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
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
