# SPDX-License-Identifier: Apache-2.0
"""Whether a call has to go through torch's dispatcher."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from quadtree_attention.ops.attention.problem import needs_grad

# Asked once, here: torch.compile of torch 2.11 stumbles over the question.
AUTOCAST_DEVICES = frozenset(
    device
    for device in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")
    if torch.amp.is_autocast_available(device)
)
_PLAIN = (Tensor, nn.Parameter)


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast casts to on devices of this type; None where it is off or unknown to them."""
    on = device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def is_profiled() -> bool:
    return profiler._is_profiler_enabled


def is_plain(*tensors: Tensor) -> bool:
    """Whether what an operator does with these tensors concerns nobody else.

    It does concern gradients, compilers, tracers, transforms, modes and subclasses of tensors.
    Profilers only want to know its name.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_function_stack() and _is_intercepted():
        return False
    if forward_ad._current_level >= 0 or needs_grad(*tensors):
        return False
    return are_plain_tensors(tensors)


def _is_intercepted() -> bool:
    """Whether a mode sees functions of torch before they run; a default device does no harm."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def are_plain_tensors(tensors: Iterable[Tensor]) -> bool:
    """Whether none is of a subclass, which might have a mind of its own."""
    return all(type(x) in _PLAIN for x in tensors)
