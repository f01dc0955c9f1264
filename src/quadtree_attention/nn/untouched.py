# SPDX-License-Identifier: Apache-2.0
"""Whether a layer may be taken for its parameters."""

from torch import nn


def is_untouched(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of this very kind, and calling it runs nothing that others have added."""
    return (
        type(layer) is kind
        and "forward" not in layer.__dict__
        and not layer._forward_pre_hooks
        and not layer._forward_hooks
        and not layer._backward_pre_hooks
        and not layer._backward_hooks
    )
