# SPDX-License-Identifier: Apache-2.0
"""A process in which Triton interprets its kernels, and checks that run there.

Triton decides between compiler and interpreter when kernels are defined, so a process can have one
of them only. One process serves all tests of a session: each is a test of its own, and none waits
for imports but the first.
"""

import math
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


class Interpreter:
    """Calls functions of test modules by `interpreter(function, *arguments)`."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self, function: Callable[..., object], *arguments: Any) -> None:
        pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                cwd=Path(__file__).parents[1],
                env=os.environ | {"TRITON_INTERPRET": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        sink, source = self.process.stdin, self.process.stdout
        assert sink is not None
        assert source is not None
        pickle.dump((function, arguments), sink)
        sink.flush()
        try:
            error = pickle.load(source)
        except EOFError:
            pytest.fail(f"the interpreting process ended with {self.process.wait()}")
        if error is not None:
            pytest.fail(error, pytrace=False)

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()


def kernels(
    check: Callable[..., object],
    interpreted: Iterable[tuple[Any, ...]] = ((),),
    on_gpu: Iterable[tuple[Any, ...]] = ((),),
) -> pytest.MarkDecorator:
    """A test whose `run` calls the check with each of these arguments, and a device after them."""
    places = ("cpu", interpreted, ()), ("cuda", on_gpu, pytest.mark.gpu)
    rows = [
        pytest.param((check, *row, device), id="-".join(map(_name, (device, *row))), marks=marks)
        for device, table, marks in places
        for row in table
    ]
    return pytest.mark.parametrize("run", rows, indirect=True)


def _name(x: Any) -> str:
    return getattr(x, "__name__", str(x))


def quicken() -> None:
    """Four times as fast: Triton's interpreter without what it does for nothing.

    It works out in 64 bits whether integers overflow, and then says so in its debug mode alone. And
    it patches its language for every call of a function inside a kernel, which the kernel has done
    already; only what `triton.language.core` holds is left then, and stays. Types and shapes of
    tensors, of which there are few, are made once instead of for every operation.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    patched = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call

    arrays: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    make_block, broadcast = core.block_type.__init__, TritonSemantic.broadcast_impl_value
    of_array = interpreter._get_np_dtype

    def array(kind: Any) -> Any:
        if kind.scalar.name not in arrays:
            arrays[kind.scalar.name] = of_array(kind.scalar)
        return arrays[kind.scalar.name]

    def block(self: Any, element: Any, shape: Any) -> None:
        if type(element) is not core.dtype:  # a pointer
            return make_block(self, element, shape)
        key = element.name, *(getattr(side, "value", side) for side in shape)
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = vars(self).copy()
        return vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        sides = (*kind.shape.values,) if kind.is_block() else ()
        if sides not in shapes:
            shape = core.tuple([core.constexpr(side) for side in sides])
            shapes[sides] = shape, core.constexpr(math.prod(sides))
        self.shape, self.numel = shapes[sides]
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    def alike(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.type.is_block() and rhs.type.is_block()
        same = same and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype = alike, array


def serve() -> None:
    """Answers every call with None or the error it raised, until there are no more."""
    import torch

    from tests.support.poison import poisoned

    quicken()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what checks print
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        error = None
        environment = dict(os.environ)
        torch.manual_seed(0)
        try:
            with poisoned():
                function(*arguments)
        except BaseException:
            error = traceback.format_exc()
        torch.use_deterministic_algorithms(False)
        os.environ.clear()
        os.environ.update(environment)
        pickle.dump(error, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
