# SPDX-License-Identifier: Apache-2.0
"""Tensors under official names: shapes as in the manifests, weights that follow from the names."""

import json
import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quadtree_attention.models.convert import check_fit
from tests.conftest import golden_path


def manifest(name: str) -> dict[str, Any]:
    return json.loads(golden_path(f"manifests/{name}.json").read_text())


def shapes_of(name: str) -> dict[str, Tensor]:
    """The state dict of a manifest without memory."""
    shapes = manifest(name)["state_dict"]
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


def recipe(key: str, shape: list[int]) -> Tensor:
    """The weights behind golden/models, from the names of the tensors."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))
    draw = generator.standard_normal(shape)
    if len(shape) > 1:
        gain = 2.0 if key.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
        draw *= gain / math.sqrt(math.prod(shape[1:]))
    elif not key.endswith("py_att.weight"):
        draw = (1.0 if key.endswith(".weight") else 0.0) + 0.1 * draw
    return torch.from_numpy(np.asarray(draw, np.float32))


def recipe_state(name: str) -> dict[str, Tensor]:
    return {key: recipe(key, shape) for key, shape in manifest(name)["state_dict"].items()}


def golden_image(case: dict[str, Any]) -> Tensor:
    generator = np.random.Generator(np.random.PCG64(case["input_seed"]))
    return torch.from_numpy(generator.standard_normal(case["input_shape"]).astype(np.float32))


def load_official(model: nn.Module, converted: dict[str, Tensor]) -> None:
    """Every tensor of an official checkpoint, or none."""
    check_fit(model, converted)
    model.load_state_dict(converted)
