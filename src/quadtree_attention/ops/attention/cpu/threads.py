# SPDX-License-Identifier: Apache-2.0
"""Threads that share out the range of a kernel.

Numba's own parallel loops are not used: its thread pools cannot be entered by two Python threads at
once or do not survive a fork, and their size is a global setting. Kernels release the GIL instead,
and plain Python threads work off pieces of their ranges.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

PIECES_PER_THREAD = 8  # so that a thread that finishes early finds more to do
SMALLEST_SHARE = 4_000_000  # multiplications worth waking a thread for: at least 0.2 ms

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_threads() -> None:
    """A forked process has none of its parent's threads."""
    global _pool, _pool_size
    _pool, _pool_size = None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


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
        work: Multiplications altogether, to judge how many threads are worth it.
    """
    threads = min(torch.get_num_threads(), 1 + work // SMALLEST_SHARE, count)
    if threads <= 1:
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

    pool = _helpers(threads - 1)
    futures = [pool.submit(work_off) for _ in range(threads - 1)]
    work_off()
    for future in futures:
        if not future.cancel():  # one that has not begun is not needed any more
            future.result()
