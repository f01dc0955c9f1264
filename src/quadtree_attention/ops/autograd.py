# SPDX-License-Identifier: Apache-2.0
"""Operators that have a gradient of their own: how they are registered, and what they refuse.

A fused piece is an operator each way, without a gradient, and an `autograd.Function` around both.
It is called by `apply`. Its `backward` calls `backward_pass`. So first derivatives work, compilers
and modes see operators, and all other derivatives raise one sentence instead of giving zeros:

| | a fused piece | the reference |
|---|---|---|
| backward | yes | yes |
| backward of backward, forward mode, `torch.func` (`vmap`, `grad`, ...) | raises | yes |
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from quadtree_attention.errors import BackendUnsupportedError
from quadtree_attention.ops import launches

INSTEAD = "use backend='reference', or use_backend('reference') around a model"

_library = torch.library.Library("quadtree_attention", "FRAGMENT")


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function as an operator without a gradient, and gives the operator.

    `torch.library.custom_op` does the same, but its checks of every call take the host longer than
    most kernels run.

    Args:
        name: After `quadtree_attention::`.
        fake: The function for tensors without data; while launches are recorded, the operator
            itself runs on them.
    """

    def register(run: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(run, mutates_args=(), op_name=name)
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, run, "CompositeExplicitAutograd")

        def without_data(*arguments: Any, **options: Any) -> Any:
            return (run if launches.is_recording() else fake)(*arguments, **options)

        torch.library.register_fake(f"quadtree_attention::{name}", without_data, lib=_library)
        return getattr(torch.ops.quadtree_attention, name).default

    return register


def apply(what: str, function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`.

    Args:
        what: Its name in messages.
        function: With `forward(ctx, ...)`, and without `jvp`, `vmap` and `setup_context`: torch
            itself refuses forward mode and transforms then. (Dynamo traces no class with `jvp`.)
        arguments: Tensors are arguments of their own; inside of a list, none would have a gradient.

    Raises:
        BackendUnsupportedError: An argument has a tangent, or `torch.func` transforms the call.
    """
    if torch.compiler.is_compiling():
        return function.apply(*arguments)
    try:
        return function.apply(*arguments)
    except (NotImplementedError, RuntimeError) as error:
        if not is_transformed(*arguments):
            raise
        raise BackendUnsupportedError(
            f"{what} has no forward-mode derivatives and no torch.func transforms; {INSTEAD}"
        ) from error


def is_transformed(*arguments: Any) -> bool:
    """True if a `torch.func` transform is active or an argument has a forward-mode tangent."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    tensors = (x for x in arguments if isinstance(x, Tensor))
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def backward_pass(what: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """`run(*arguments)` in the backward pass of a function; raises where that is differentiated.

    `torch.autograd.function.once_differentiable` would not: it looks at incoming gradients alone,
    not at tensors that were saved, and gives wrong second derivatives where the former are
    constants.
    """
    if torch.compiler.is_compiling():
        return run(*arguments)
    return _BackwardPass.apply(what, run, *arguments)


class _BackwardPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, run: Callable[..., Any], *arguments: Any) -> Any:
        ctx.what = what
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise BackendUnsupportedError(f"{ctx.what} has no second derivatives; {INSTEAD}")
