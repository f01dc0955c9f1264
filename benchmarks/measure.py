# SPDX-License-Identifier: Apache-2.0
"""How it is measured: times with warm-up, median and quartiles, and peak memory."""

import ctypes
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.result import ROOT

Call = Callable[[], object]
Timing = dict[str, float]  # median_ms, q25_ms, q75_ms, repeats

MIB = 2**20
WARM_UP_CALLS = 3
M_MMAP_THRESHOLD = -3  # as malloc.h has it
MAX_REPEATS = 200
TURNS = 8  # of calls that are timed in turns
LONGEST_BATCH = 16  # calls in a row before the clock is read
FRESH: multiprocessing.context.BaseContext = multiprocessing.get_context("spawn")


@contextmanager
def scores_held(held: bool = True) -> Iterator[None]:
    """Attention without a fused kernel, if `held`: all scores are computed and kept.

    PyTorch would take float32 for scores of half precision; networks that compute them by hand do
    not.
    """
    if not held:
        yield
        return
    switch = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    switch(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        switch(before)


def inference(
    model: Callable[..., object],
    *inputs: Any,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> Call:
    """One call without gradients, under autocast if there is a dtype."""

    def call() -> object:
        with torch.inference_mode(), torch.autocast(device, dtype, enabled=dtype is not None):
            return model(*inputs)

    return call


# ---- time


def measure(
    *calls: Call, device: str, seconds: float = 2.0, max_repeats: int = MAX_REPEATS
) -> list[Timing]:
    """Times calls; several are interleaved.

    The time of work on the host drifts by a factor of two within minutes; interleaved calls see the
    same drift.

    Args:
        *calls: What is timed. They must not change their inputs.
        device: "cpu" or "cuda".
        seconds: Time for the repeats of each, after the warm-up. A longer call is timed once.
        max_repeats: No more repeats than this, however short the call.
    """
    for call in calls:
        end = time.perf_counter() + seconds
        for _ in range(WARM_UP_CALLS):
            call()
            if time.perf_counter() > end:  # the first call compiles kernels
                break
    turns = 1 if len(calls) == 1 else TURNS
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(turns):
        for call, found in zip(calls, times, strict=True):
            found += _times(call, device, seconds / turns, max_repeats // turns)
    return [summarise(found) for found in times]


def _times(call: Call, device: str, seconds: float, max_repeats: int) -> list[float]:
    """Milliseconds of repeats, at least of one."""
    times: list[float] = []
    count, end = 1, time.perf_counter() + seconds
    while len(times) < max_repeats and (not times or time.perf_counter() < end):
        repeats = min(count, max_repeats - len(times))
        cuda = device == "cuda"
        times += _cuda_times(call, repeats) if cuda else [one_time(call) for _ in range(repeats)]
        count = min(2 * count, LONGEST_BATCH)
    return times


def summarise(times: list[float]) -> Timing:
    """Median and quartiles of milliseconds."""
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    q25, median, q75 = torch.tensor(times, dtype=torch.float64).quantile(quartiles).tolist()
    return {"median_ms": median, "q25_ms": q25, "q75_ms": q75, "repeats": len(times)}


def one_time(call: Call, device: str = "cpu", *, until_returned: bool = False) -> float:
    """Milliseconds of one call on an idle device, until that is done or until the call returns."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    if not until_returned:
        wait()
    return (time.perf_counter() - begin) * 1e3


def _cuda_times(call: Call, repeats: int) -> list[float]:
    """Times by CUDA events; the host runs ahead, as it does in a model."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def capture(call: Call) -> Call:
    """The call as replays of a CUDA graph; gradients inside it are captured with it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled and libraries set up outside the capture
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> Call:
        graph.replay()
        return call  # keeps it alive, with all that the graph reads

    return replay


# ---- memory


def release_memory(device: str) -> None:
    """Frees what an earlier row has left."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def cuda_peak_mib(call: Call, before: int | None = None) -> float:
    """Peak memory of one call beyond what was allocated before it.

    Args:
        call: What is called.
        before: Bytes that were allocated before what counts; None: before the call itself. Of a
            training step, model and optimizer count, too.
    """
    call()  # libraries keep memory for good, and the optimizer makes its state
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if before is None else before
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def cpu_peak_mib(
    prepare: Callable[[Any], Call], small: Any, whole: Any, *, threads: int
) -> float | None:
    """Resident memory that a call adds to a new process; None where the system does not tell.

    Args:
        prepare: Makes a call of `small` or `whole`; its inputs do not count.
        small: What the call before is of, for what libraries allocate once.
        whole: What the call is of.
        threads: CPU threads.
    """
    return in_fresh_process(_resident_peak_mib, prepare, small, whole, threads=threads)


def _resident_peak_mib(prepare: Callable[[Any], Call], small: Any, whole: Any) -> float | None:
    prepare(small)()
    call = prepare(whole)
    gc.collect()
    try:
        memory = Memory("cpu")
    except OSError:
        return None
    call()
    return memory.whole()


class StoragePeak(TorchDispatchMode):
    """Counts bytes of the tensors that operators return inside of the context, views once.

    Works on fake tensors, too, which need no memory. What an operator allocates and frees inside of
    itself does not count, nor what an allocator adds.

    Attributes:
        live: Bytes of all storages that exist now.
        peak: The most there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.add(*(leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)))
        return found

    def add(self, *tensors: Tensor) -> None:
        """Counts tensors that were made outside of the context."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = id(storage), storage.nbytes()
            if key not in self._seen:
                self._seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def in_fresh_process(function: Callable[..., Any], *args: Any, threads: int) -> Any:
    """The result of a function in a new process, without freed blocks that a call could reuse."""
    with ProcessPoolExecutor(1, mp_context=FRESH) as pool:
        return pool.submit(_fresh, function, args, threads).result()


def _fresh(function: Callable[..., Any], args: tuple[Any, ...], threads: int) -> Any:
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc caches freed blocks, a varying number
        libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    use_threads(threads)
    return function(*args)


def printed_by(code: str, **environment: str) -> Any:
    """What code prints last, in JSON, in a new process.

    Raises:
        RuntimeError: It fails; has the last line that it said.
    """
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment,
                         capture_output=True, text=True)  # fmt: skip
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[-1])
    return json.loads(run.stdout.splitlines()[-1])


class Memory:
    """The most memory held in each stage, in MiB beyond what was there at first.

    On a GPU that which torch allocates; on a CPU resident memory, of all libraries, which repeats
    to about 1 MiB in a fresh process.

    Raises:
        OSError: The system does not tell.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.stages: dict[str, float] = {}
        self._reset()
        self._before = self._peak()
        self._between = 0.0  # the most held where no stage was running

    def begin(self, stage: str) -> None:
        self._between = max(self._between, self._peak() - self._before)
        self._reset()

    def end(self, stage: str) -> None:
        self.stages[stage] = max(self.stages.get(stage, 0.0), self._peak() - self._before)

    def whole(self) -> float:
        """The most held at any time so far."""
        return max(self._between, self._peak() - self._before, *self.stages.values())

    def _reset(self) -> None:
        """Lets the peak start again from what is held now."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> float:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() / MIB
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 1024


def use_threads(threads: int, *, opencv: bool = False) -> None:
    """Lets torch, and Numba if it is imported after this, use that many CPU threads."""
    os.environ["NUMBA_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if opencv:
        import cv2

        cv2.setNumThreads(threads)
