# SPDX-License-Identifier: Apache-2.0
"""Structure from motion: a 3-D model from a folder of photographs, by matches and COLMAP's mapper.

Example:
    >>> from quadtree_attention.sfm import build_model
    >>> report = build_model("photos", "model")  # doctest: +SKIP
    >>> len(report.registered), report.error  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadtree_attention.sfm.matching import PairMatcher
    from quadtree_attention.sfm.pipeline import Chosen, Report, build_model

_PLACES = {
    "Chosen": "pipeline",
    "PairMatcher": "matching",
    "Report": "pipeline",
    "build_model": "pipeline",
}
__all__ = ["Chosen", "PairMatcher", "Report", "build_model"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
