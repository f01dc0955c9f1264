# SPDX-License-Identifier: Apache-2.0
"""A backbone as detectors want it: no classifier, the official options, perhaps trained weights."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.models.backbone import PyramidTransformer
from quadtree_attention.models.convert import check_fit, is_official_backbone
from quadtree_attention.models.weights import build_model, read_checkpoint
from quadtree_attention.nn.value_pyramid import ValueBranch

TOPK, VALUE_ACT = 32, "relu"  # of quadtree attention in the official detectors and segmenters
_OF_THE_CLASSIFIER = ("num_classes", "global_pool", "drop_rate")


def dense_backbone(
    name: str, *, weights: str | os.PathLike[str] | None = None, **options: Any
) -> PyramidTransformer:
    """A backbone without a classifier.

    Args:
        name: Name of the backbone.
        weights: What `load_backbone` loads into it; None: fresh weights.
        **options: Those of the backbone. Quadtree attention has `topk=32`, and ReLU in a learned
            value pyramid; a rival by `attention` has neither.

    Raises:
        OptionError: There is no such name or option.
        CheckpointError: The weights cannot be read, or are of another backbone.
    """
    if reserved := [option for option in options if option in _OF_THE_CLASSIFIER]:
        raise OptionError(
            f"{name} is built without its classifier of images, got {', '.join(reserved)}; "
            "leave it out"
        )
    backbone = build_model(name, num_classes=0, **{**_usual(name, options), **options})
    assert isinstance(backbone, PyramidTransformer)
    if weights is not None:
        load_backbone(backbone, weights)
    return backbone


def load_backbone(backbone: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads weights of a classifier, or of a backbone; nothing but a classifier may be left over.

    Raises:
        CheckpointError: The file cannot be read, does not fit, or is not finite.
    """
    tensors = read_checkpoint(path)
    if is_official_backbone(tensors):
        raise CheckpointError(
            f"{path} is an official checkpoint, whose tensors have other names; turn it into "
            f"weights of ours first: quadtree convert {path} -o backbone.safetensors"
        )
    own = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
        if not name.startswith("head.")
    }
    try:
        check_fit(backbone, own)
    except CheckpointError as error:
        raise CheckpointError(f"{path} holds no weights of this backbone: {error}") from error
    if broken := [name for name, tensor in own.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f"{path} holds numbers that are not finite, in {', '.join(broken[:3])}; take other "
            "weights"
        )
    backbone.load_state_dict(own)


def _usual(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the official detectors choose; a rival or a plain value pyramid has no use for it."""
    if options.get("attention", "quadtree") != "quadtree":
        return {}
    # What name and options come to, without memory for it.
    probe = build_model(name, num_classes=0, **{**options, "device": "meta"})
    learned = any(isinstance(module, ValueBranch) for module in probe.modules())
    return {"topk": TOPK} | ({"value_act": VALUE_ACT} if learned else {})
