# SPDX-License-Identifier: Apache-2.0
"""Networks: `create`, `load` and `names`, the network classes, and weights files.

Names are resolved on first access. `import quadtree_attention.models.backbone` registers the
backbones with timm.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadtree_attention.models.backbone import PyramidTransformer as PyramidTransformer
    from quadtree_attention.models.detection import MaskRCNN as MaskRCNN
    from quadtree_attention.models.detection import RetinaNet as RetinaNet
    from quadtree_attention.models.matcher import LoFTR as LoFTR
    from quadtree_attention.models.registry import create as create
    from quadtree_attention.models.registry import load as load
    from quadtree_attention.models.registry import names as names
    from quadtree_attention.models.segmentation import SemanticFPN as SemanticFPN
    from quadtree_attention.models.stereo import STTR as STTR
    from quadtree_attention.models.topk import set_topk as set_topk
    from quadtree_attention.models.warm import warmup as warmup
    from quadtree_attention.models.weights import save_weights as save_weights

_PLACES = {
    "LoFTR": "matcher",
    "MaskRCNN": "detection",
    "PyramidTransformer": "backbone",
    "RetinaNet": "detection",
    "STTR": "stereo",
    "SemanticFPN": "segmentation",
    "create": "registry",
    "load": "registry",
    "names": "registry",
    "save_weights": "weights",
    "set_topk": "topk",
    "warmup": "warm",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
