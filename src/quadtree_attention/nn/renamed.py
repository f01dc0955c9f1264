# SPDX-License-Identifier: Apache-2.0
"""Renaming of parameters in weights saved by earlier versions."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def rename_on_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """`load_state_dict` hook of modules with `OLD_NAMES`, which maps old names to new ones."""
    for old, new in _names(module, prefix).items():
        if old in state:
            state[new] = state.pop(old)


def with_new_names(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with the current names of a model's parameters."""
    names: dict[str, str] = {}
    for path, module in model.named_modules():
        names |= _names(module, f"{path}." if path else "")
    return {names.get(name, name): tensor for name, tensor in state.items()}


def _names(module: nn.Module, prefix: str) -> dict[str, str]:
    old_names: dict[str, str] = getattr(module, "OLD_NAMES", {})
    return {prefix + old: prefix + new for old, new in old_names.items()}
