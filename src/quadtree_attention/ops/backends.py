# SPDX-License-Identifier: Apache-2.0
"""The table of backends, and dispatch.

"auto" selects the first backend of the table without a reason not to run the problem. A named
backend never falls back to another one; it raises an error with its reasons. Dispatch runs once per
call, and further operations of the call (norms, value pyramids) depend on its result, see `fuses`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from quadtree_attention.errors import BackendUnsupportedError, OptionError
from quadtree_attention.ops.attention.base import Backend, Kept
from quadtree_attention.ops.attention.cpu import CPU
from quadtree_attention.ops.attention.problem import Problem
from quadtree_attention.ops.attention.reference import REFERENCE
from quadtree_attention.ops.attention.tree import is_exporting
from quadtree_attention.ops.attention.triton import TRITON
from quadtree_attention.ops.attention.triton.backend import TRITON_INSTALLED

__all__ = [
    "BACKENDS",
    "CPU",
    "REFERENCE",
    "TRITON",
    "Backend",
    "Kept",
    "choose",
    "default_backend",
    "explain_backends",
    "fuses",
    "fuses_more",
    "use_backend",
]

BACKENDS: tuple[Backend, ...] = (TRITON, CPU, REFERENCE)  # in order of preference
ENVIRONMENT_VARIABLE = "QUADTREE_BACKEND"

_scoped: ContextVar[str] = ContextVar("quadtree_backend", default="auto")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside this context, `backend="auto"` means `name`.

    A backend named in a call takes precedence, and the context takes precedence over
    `QUADTREE_BACKEND`.

    Example:
        >>> with use_backend("reference"):
        ...     print("calls in here run the reference")
        calls in here run the reference
    """
    _check_name(name, "use_backend")
    token = _scoped.set(name)
    try:
        yield
    finally:
        _scoped.reset(token)


def choose(name: str, problem: Problem) -> Backend:
    """Return the backend that runs `problem`.

    Raises:
        BackendUnsupportedError: The named backend, or with "auto" every backend, has reasons
            not to run the problem.
        OptionError: There is no backend of that name.
    """
    _check_name(name, "backend")
    if name == "auto":
        name = default_backend()
    candidates = [backend for backend in BACKENDS if name in ("auto", backend.name)]
    for backend in candidates:
        if not backend.reasons(problem):
            return backend
    reasons = [
        f"{backend.name}: {reason}" for backend in candidates for reason in backend.reasons(problem)
    ]
    raise BackendUnsupportedError(_unsupported(name, problem, reasons), reasons)


def fuses(x: Tensor, name: str) -> bool:
    """Return True if norms and other operations beside the attention use Triton kernels.

    In a compiled model they do not, since the compiler fuses them with their neighbours.

    Args:
        x: Input of the operation.
        name: The backend of the call, or "auto" before dispatch.
    """
    if name == "auto":
        name = default_backend()
    return (
        name in ("auto", TRITON.name)
        and TRITON_INSTALLED
        and (x.is_cuda or os.environ.get("TRITON_INTERPRET", "0") == "1")
        and not torch.compiler.is_compiling()
        and not is_exporting()
    )


def fuses_more() -> bool:
    """True if `QUADTREE_FUSED=1` enables fused convolutions, value branches and projections."""
    return os.environ.get("QUADTREE_FUSED", "0") == "1"


def default_backend() -> str:
    """Return the current meaning of "auto"; compiled programs keep the one at compilation."""
    name = _scoped.get()
    if name == "auto":
        name = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
        _check_name(name, f"the environment variable {ENVIRONMENT_VARIABLE}")
    return name


# As `torch.compiler.assume_constant_result`, without importing the compiler.
default_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explain_backends(problem: Problem) -> dict[str, list[str]]:
    """Return every backend with its reasons not to run `problem`, in order of preference."""
    return {backend.name: backend.reasons(problem) for backend in BACKENDS}


def _check_name(name: str, source: str) -> None:
    known = ["auto", *(backend.name for backend in BACKENDS)]
    if name not in known:
        raise OptionError(
            f"{source} must be one of {', '.join(known)}, got {name!r}; "
            "available_backends(q, k, v, ...) says which of them can run a call"
        )


def _unsupported(name: str, problem: Problem, reasons: list[str]) -> str:
    who = "no backend" if name == "auto" else f"backend {name!r} cannot"
    verb = "can run" if name == "auto" else "run"
    lines = "\n".join(f"  - {reason}" for reason in reasons)
    return (
        f"{who} {verb} this problem ({problem}):\n{lines}\n"
        "pass backend='auto' to take any backend that can, or backend='reference'"
    )
