# SPDX-License-Identifier: Apache-2.0
"""Whether a layer may be taken for its parameters."""

from torch import nn
from torch.nn.modules import module


def is_untouched(layer: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a layer is of this very kind, and calling it runs nothing that others have added.

    But for what is added to all layers at once, see `is_everything_watched`.
    """
    return (
        type(layer) is kind
        and "forward" not in layer.__dict__
        and not layer._forward_pre_hooks
        and not layer._forward_hooks
        and not layer._backward_pre_hooks
        and not layer._backward_hooks
    )


def is_everything_watched() -> bool:
    """Whether somebody has hooks on the layers of all modules."""
    return bool(
        module._global_forward_pre_hooks
        or module._global_forward_hooks
        or module._global_backward_pre_hooks
        or module._global_backward_hooks
    )
