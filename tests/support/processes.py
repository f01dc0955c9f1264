# SPDX-License-Identifier: Apache-2.0
"""Processes that start within milliseconds: forks of one that has imported torch and Lightning."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "timm", "pytorch_lightning.cli", "quadtree_attention.tasks.training.run"]
)


def start(function: Callable[..., Any], *arguments: Any, output: Path) -> BaseProcess:
    """Call a function of a module on one thread, in a process whose prints go to `output`."""
    process = CONTEXT.Process(target=_call, args=(output, function, arguments))
    process.start()
    return process


def finish(process: BaseProcess, output: Path, *, seconds: float = 300) -> str:
    """What a process printed that has ended without an error."""
    process.join(seconds)
    printed = output.read_text()
    assert process.exitcode == 0, printed
    return printed


def _call(output: Path, function: Callable[..., Any], arguments: Any) -> None:
    import torch

    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    # Workers of loaders are its children then, and end when it is killed
    multiprocessing.set_start_method("fork", force=True)
    function(*arguments)
