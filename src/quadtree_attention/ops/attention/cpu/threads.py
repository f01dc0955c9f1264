# SPDX-License-Identifier: Apache-2.0
"""Division of the range of a kernel among threads.

Numba's parallel loops are not used: its thread pools do not support concurrent calls from two
Python threads or a fork, and their size is a global setting. Instead, kernels release the GIL, and
Python threads process pieces of their ranges.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

PIECES_PER_THREAD = 8  # for load balancing
SMALLEST_SHARE = 4_000_000  # multiplications per thread, at least: about 0.2 ms

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_threads() -> None:
    """Drop the pool in a forked process, which has no threads of its parent."""
    global _pool, _pool_size
    _pool, _pool_size = None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _helpers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    pool = _pool
    if pool is None or _pool_size < count:
        # A replaced pool finishes its tasks, then its threads end.
        pool = ThreadPoolExecutor(count, thread_name_prefix="quadtree_attention")
        _pool, _pool_size = pool, count
    return pool


def run(kernel: Callable[..., None], count: int, work: int, *args: object) -> None:
    """Run a kernel over the range 0 ... count - 1, on as many threads as PyTorch would use.

    Args:
        kernel: Called with the two ends of a part of the range, then `args`.
        count: Length of the range.
        work: Total number of multiplications, which limits the number of threads.
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
        if not future.cancel():  # a task that has not begun is not needed any more
            future.result()
