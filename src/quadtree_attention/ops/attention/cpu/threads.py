# SPDX-License-Identifier: Apache-2.0
"""Threads that share out the range of a kernel.

Kernels release the GIL, and run on the threads of PyTorch's OpenMP: these wait actively for some
milliseconds after each of PyTorch's own operators, and threads beside them would share their cores.
`GOMP_parallel` is what compilers call for `#pragma omp parallel`. Where PyTorch has no such library
(Windows, macOS), and in forked processes, which have none of its threads, plain Python threads do
the same.

Numba's own parallel loops are not used: its thread pools cannot be entered by two Python threads at
once or do not survive a fork, and their size is a global setting.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

PIECES_PER_THREAD = 8  # so that a thread that finishes early finds more to do
SMALLEST_SHARE = 200_000  # multiplications that are worth waking a thread for

_region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_is_fork = False
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_threads() -> None:
    """A forked process has none of its parent's threads."""
    global _is_fork, _pool, _pool_size
    _is_fork, _pool, _pool_size = True, None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@cache
def _openmp() -> Any:
    """`GOMP_parallel` of the library that PyTorch uses; None: it uses another one."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        parallel = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [_region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _on_each(threads: int, work: Callable[[], None]) -> None:
    """Calls `work` on so many threads, the calling one among them."""
    parallel = None if _is_fork else _openmp()
    if parallel is None:
        pool = _helpers(threads - 1)
        futures = [pool.submit(work) for _ in range(threads - 1)]
        work()
        for future in futures:
            if not future.cancel():  # one that has not begun is not needed any more
                future.result()
        return
    errors: list[BaseException] = []

    def caught(_: object) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    parallel(_region(caught), None, threads, 0)
    if errors:
        raise errors[0]


def _helpers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    pool = _pool
    if pool is None or _pool_size < count:
        # A pool that is replaced finishes what it was given, then its threads end.
        pool = ThreadPoolExecutor(count, thread_name_prefix="quadtree_attention")
        _pool, _pool_size = pool, count
    return pool


def run(kernel: Callable[..., None], count: int, work: int, *args: object) -> None:
    """Runs a kernel over the range 0 ... count - 1, on as many threads as PyTorch would use.

    Args:
        kernel: Called with the two ends of a part of the range, then `args`.
        count: Length of the range.
        work: Multiplications altogether, to judge whether it is worth several threads.
    """
    threads = (
        torch.get_num_threads()
    )  # always all: OpenMP ends those that a smaller team leaves out
    if count <= 1 or threads <= 1 or 2 * work < threads * SMALLEST_SHARE:
        if count > 0:
            kernel(0, count, *args)
        return
    pieces = min(count, threads * PIECES_PER_THREAD, max(threads, work // SMALLEST_SHARE))
    ends = [count * i // pieces for i in range(pieces + 1)]
    todo = deque(pairwise(ends))

    def work_off() -> None:
        while True:
            try:
                first, last = todo.popleft()
            except IndexError:
                return
            kernel(first, last, *args)

    _on_each(threads, work_off)
