# SPDX-License-Identifier: Apache-2.0
"""Registration of operators with PyTorch's FLOP counter."""

import sys
from collections.abc import Callable, Mapping

import torch

_registered: set[str] = set()


def register_formulas(formulas: Mapping[str, Callable[..., int]]) -> None:
    """Register formulas by operator name as soon as the FLOP counter is imported.

    Importing it here would import Triton. An active counter gets the formulas, too.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None or _registered >= formulas.keys():
        return
    operators = {getattr(torch.ops.quadtree_attention, name): f for name, f in formulas.items()}
    _registered.update(formulas)
    for operator, formula in operators.items():
        module.register_flop_formula(operator)(formula)
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):
            counter.flop_registry.update({o: module.flop_registry[o] for o in operators})
