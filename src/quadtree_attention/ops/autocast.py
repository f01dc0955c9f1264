# SPDX-License-Identifier: Apache-2.0
"""Autocast for operators that choose their own dtypes."""

from contextlib import AbstractContextManager, nullcontext

import torch

# Evaluated at import, because torch.compile of torch 2.11 cannot trace it.
AUTOCAST_DEVICES = frozenset(
    device
    for device in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")
    if torch.amp.is_autocast_available(device)
)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Autocast dtype of a device type; None if autocast is off or not supported."""
    on = device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context without autocast, so that sums inside of an operator are in float32."""
    if autocast_dtype(device) is not None:
        return torch.autocast(device, enabled=False)
    return nullcontext()
