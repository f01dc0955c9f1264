# SPDX-License-Identifier: Apache-2.0
"""Weights of timm's `pvt_v2` models in our backbones."""

import re
from collections.abc import Mapping

from torch import Tensor

_THEIRS = re.compile(r"\.mlp\.dwconv\.(weight|bias)$")
_OURS = r".mlp.dwconv.conv.\1"


def is_pvt_v2(state: Mapping[str, Tensor]) -> bool:
    """Whether the names are those of a `pvt_v2` model of timm."""
    return any(_THEIRS.search(name) for name in state)


def convert_pvt_v2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a `pvt_v2` model of timm under our names.

    They are all that a backbone of the same size needs with `attention="spatial_reduction"`, or
    with `attention="linear_spatial_reduction"` for `pvt_v2_b2_li`, and timm loads them there by
    itself. For a warm start with another attention use
    `load_state_dict(convert_pvt_v2(state), strict=False)`: patch embeddings, MLPs, norms, output
    projections and classifier then start from PVTv2.

    Args:
        state: State dict of the timm model.
    """
    return {_THEIRS.sub(_OURS, name): tensor for name, tensor in state.items()}
