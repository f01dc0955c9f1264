# SPDX-License-Identifier: Apache-2.0
"""Registration of operators with custom gradients, and errors for unsupported derivatives.

A fused operation consists of one operator per direction, without a gradient, and an
`autograd.Function` around both. It is called by `apply`, and its `backward` calls `backward_pass`.
First derivatives work, compilers and modes see operators, and all other derivatives raise an error
instead of returning zeros:

| | fused operation | reference |
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
    """Register a function as an operator without a gradient; return the operator.

    `torch.library.custom_op` does the same, but its checks of every call take longer than most
    kernels.

    Args:
        name: Name in the namespace `quadtree_attention`.
        fake: The fake implementation; while launches are recorded, the operator runs on tensors
            without data instead.
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
    """Call `function.apply(*arguments)`; raise an error for unsupported derivatives.

    Args:
        what: Name of the function in messages.
        function: Autograd function with `forward(ctx, ...)`, without `jvp`, `vmap` and
            `setup_context`, so that torch raises for forward mode and transforms. (Dynamo traces
            no class with `jvp`.)
        arguments: Tensors must be separate arguments; tensors in lists would have no gradient.

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
    """Call `run(*arguments)` in the backward pass; raise an error if it is differentiated.

    `torch.autograd.function.once_differentiable` checks incoming gradients only, not saved tensors,
    and returns wrong second derivatives if incoming gradients are constants.
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
