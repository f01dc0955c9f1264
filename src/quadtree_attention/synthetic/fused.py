# SPDX-License-Identifier: Apache-2.0
"""Work on every pixel, compiled into a few kernels where a GPU does it.

One by one, the operations of rendering would read and write all pixels thousands of times.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


class _Switch:
    """Whether to compile; off for good once the compiler failed, which it then would every time."""

    on_cpu = False
    works = True


def compiles(device: torch.device) -> bool:
    """Whether work on the device is compiled."""
    return _Switch.works and (device.type == "cuda" or _Switch.on_cpu)


@contextmanager
def compile_everywhere() -> Iterator[None]:
    """Compiles on CPUs too, which takes longer than it saves: to test what GPUs run."""
    _Switch.on_cpu = True
    try:
        yield
    finally:
        _Switch.on_cpu = False


@contextmanager
def plainly() -> Iterator[None]:
    """Compiles nothing: to test against."""
    works, _Switch.works = _Switch.works, False
    try:
        yield
    finally:
        _Switch.works = works


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Keeps what a training loop has switched on out of the making of data.

    Autocast would compute in 8 bits of precision; tensors made in inference mode would have the
    compiler start anew when training goes on.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


class Fused:
    """A function that is compiled where its first argument is on a GPU.

    It takes tensors whose first axis is the batch, then whatever stays the same from batch to
    batch, and returns tensors whose first axis is the batch. Batches of any number of items use the
    same kernels, so an item is the same in all of them. If it cannot be compiled, a warning says so
    once, and the function runs as it is.

    Args:
        function: What to run.
        batched: How many of its arguments have the axis of the batch.
    """

    def __init__(self, function: Callable[..., Any], batched: int) -> None:
        self.function = function
        self.batched = batched
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any, **plain: Any) -> Any:
        """Runs the function; keywords are for the uncompiled one alone.

        They hold what differs from batch to batch and would be compiled into the kernels.
        """
        if not compiles(arguments[0].device) or _needs_gradients(arguments):
            return self.function(*arguments, **plain)
        try:
            return self._run(arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any part of the compiler, or of the system it calls
            _Switch.works = False
            _warn(self.function.__name__, error)
            return self.function(*arguments, **plain)

    def _run(self, arguments: tuple[Any, ...]) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(self.function, fullgraph=True)
        batched, shared = arguments[: self.batched], arguments[self.batched :]
        count = len(batched[0])
        if count == 1:  # a length of 1 would be compiled for itself: make it twice
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
    """Makes a function `Fused`."""
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
    """A tensor of the CPU on the device, without waiting for what the device is doing.

    An ordinary copy to a GPU would wait, and keep the host from preparing what comes next.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
