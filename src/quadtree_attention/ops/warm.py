# SPDX-License-Identifier: Apache-2.0
"""Compilation of Triton kernels before their first launch."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from quadtree_attention.ops.launches import Launch, record


def recorded(run: Callable[[], object]) -> list[Launch]:
    """Return the launches of `run`, one per variant of a kernel, without running them."""
    with record() as launches:
        run()
    return list({launch.variant: launch for launch in launches}.values())


def compile_launches(
    launches: Sequence[Launch],
    *,
    threads: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> None:
    """Compile the kernels of launches in several threads.

    Args:
        launches: As from `recorded`.
        threads: Threads; None: one per core.
        done: Called after every kernel.
    """

    def compile_one(launch: Launch) -> None:
        kernel, given = launch.kernel, launch.arguments
        arguments = [given[name] for name in kernel.parameters]
        options = {name: given[name] for name in given.keys() - set(kernel.parameters)}
        with torch.cuda.device_of(next(x for x in arguments if isinstance(x, Tensor))):
            kernel.jit.warmup(*arguments, grid=launch.grid, **options)
        done()

    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        list(pool.map(compile_one, launches))
