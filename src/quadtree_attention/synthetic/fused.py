# SPDX-License-Identifier: Apache-2.0
"""Compilation of functions on all pixels into a few kernels on a GPU.

Eager operations of rendering would read and write all pixels thousands of times.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


class _Switch:
    """Whether functions are compiled; disabled permanently after the compiler failed once."""

    on_cpu = False
    works = True


def compiles(device: torch.device) -> bool:
    """Return True if functions are compiled for the device."""
    return _Switch.works and (device.type == "cuda" or _Switch.on_cpu)


@contextmanager
def compile_everywhere() -> Iterator[None]:
    """Compile on CPUs too, for tests of the compiled code; slower in total than eager mode."""
    _Switch.on_cpu = True
    try:
        yield
    finally:
        _Switch.on_cpu = False


@contextmanager
def plainly() -> Iterator[None]:
    """Compile nothing, for tests."""
    works, _Switch.works = _Switch.works, False
    try:
        yield
    finally:
        _Switch.works = works


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Disable autocast and inference mode while data is generated.

    Autocast would compute in bfloat16; tensors created in inference mode would cause a
    recompilation when training continues.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


class Fused:
    """A function that is compiled if its first argument is on a GPU.

    Its first arguments are tensors whose first axis is the batch, the others are the same for all
    batches; it returns tensors whose first axis is the batch. The same kernels run for any batch
    size, so that the result of an item does not depend on its batch. If compilation fails, a
    warning is issued once, and the function runs in eager mode.

    Args:
        function: The function.
        batched: Number of arguments with a batch axis.
    """

    def __init__(self, function: Callable[..., Any], batched: int) -> None:
        self.function = function
        self.batched = batched
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any, **plain: Any) -> Any:
        """Run the function; keywords are passed to the eager function only.

        They differ between batches and would otherwise be constants of the kernels.
        """
        if not compiles(arguments[0].device) or _needs_gradients(arguments):
            return self.function(*arguments, **plain)
        try:
            return self._run(arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # from any part of the compiler, or of the system tools it calls
            _Switch.works = False
            _warn(self.function.__name__, error)
            return self.function(*arguments, **plain)

    def _run(self, arguments: tuple[Any, ...]) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(self.function, fullgraph=True)
        batched, shared = arguments[: self.batched], arguments[self.batched :]
        count = len(batched[0])
        if count == 1:  # size 1 would be specialised: repeat the item
            batched = tuple(torch.cat([t, t]) for t in batched)
        with apart(batched[0].device):
            batched = tuple(t.clone() if t.is_inference() else t for t in batched)
            for tensor in batched:
                torch._dynamo.mark_dynamic(tensor, 0)
            made = self._compiled(*batched, *shared)
        if count > 1:
            return made
        return made[:1] if isinstance(made, Tensor) else tuple(t[:1] for t in made)


def fused(batched: int) -> Callable[[Callable[..., Any]], Fused]:
    """Decorate a function as `Fused`."""
    return lambda function: Fused(function, batched)


def _needs_gradients(arguments: tuple[Any, ...]) -> bool:
    tensors = (a for a in arguments if isinstance(a, Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _warn(name: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    warnings.warn(
        f"synthetic images are made without torch.compile, which is slower, for it failed on "
        f"{name} ({reason}); on GPUs it needs Triton and a C compiler",
        RuntimeWarning,
        stacklevel=4,
    )


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without synchronisation.

    A blocking copy to a GPU would keep the host from preparing the next batch.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
