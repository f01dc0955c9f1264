# SPDX-License-Identifier: Apache-2.0
"""A process in which Triton interprets its kernels, and checks that run there.

Triton decides between compiler and interpreter when kernels are defined, so a process can have one
of them only. One process serves all tests of a session: each is a test of its own, and none waits
for imports but the first.
"""

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
    """Three times as fast: Triton's interpreter without what it does for nothing.

    It works out in 64 bits whether integers overflow, and then says so in its debug mode alone. And
    it patches its language for every call of a function inside a kernel, which the kernel has done
    already; only what `triton.language.core` holds is left then, and stays.
    """
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
