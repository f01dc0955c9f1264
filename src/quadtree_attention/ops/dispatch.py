# SPDX-License-Identifier: Apache-2.0
"""Whether a call has to go through torch's dispatcher."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler

_PLAIN = (Tensor, nn.Parameter)


def nobody_listens(*tensors: Tensor) -> bool:
    """Whether a torch operator on these tensors comes to nothing but running its kernels.

    Then it is quicker to run them at once: handing a call through the dispatcher to an operator
    written in Python takes longer than a kernel does. Those who listen are gradients, compilers,
    tracers, transforms, modes, subclasses of tensors and profilers.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if profiler._is_profiler_enabled or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    differentiates = torch.is_grad_enabled()
    return all(type(x) in _PLAIN and not (differentiates and x.requires_grad) for x in tensors)
