# SPDX-License-Identifier: Apache-2.0
"""How it is measured: times with warm-up, median and quartiles, and peak memory."""

import ctypes
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Work, prepare

Call = Callable[[], object]
MIB = 2**20
WARM_UP_CALLS = 3
M_MMAP_THRESHOLD = -3  # as malloc.h has it
MAX_REPEATS = 200
TURNS = 8  # of calls that are timed in turns
LONGEST_BATCH = 16  # calls in a row before the clock is looked at


@contextmanager
def scores_held() -> Iterator[None]:
    """Attention as it is without a fused kernel: all scores are made and kept.

    PyTorch would take float32 for scores of half precision, which is not what networks that make
    them by hand do.
    """
    switch = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    switch(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        switch(before)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over a number of repeats."""

    median_ms: float
    q25_ms: float
    q75_ms: float
    repeats: int


def measure(
    call: Call,
    device: str,
    *,
    seconds: float = 2.0,
    max_repeats: int = MAX_REPEATS,
    graph: bool = False,
) -> Timing:
    """Times a call.

    Args:
        call: What is timed. It must not change its inputs.
        device: "cpu" or "cuda".
        seconds: Time for the repeats, after the warm-up. A call that takes longer is timed once.
        max_repeats: No more repeats than this, however short the call.
        graph: Whether to capture the call into a CUDA graph and time replays of that.
    """
    if graph:
        call = capture(call)
    _warm_up(call, seconds)
    return summarise(_times(call, device, seconds, max_repeats))


def measure_in_turns(calls: Sequence[Call], device: str, *, seconds: float) -> list[Timing]:
    """Times calls that are compared with each other, a part of each at a time.

    So all of them see the same moods of the machine: work of the host takes twice as long at one
    moment as at another.

    Args:
        calls: What is timed.
        device: "cpu" or "cuda".
        seconds: Time for the repeats of each, after the warm-up.
    """
    for call in calls:
        _warm_up(call, seconds)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, found in zip(calls, times, strict=True):
            found += _times(call, device, seconds / TURNS, MAX_REPEATS // TURNS)
    return [summarise(found) for found in times]


def _times(call: Call, device: str, seconds: float, max_repeats: int) -> list[float]:
    """Milliseconds of repeats, at least of one."""
    time_calls = _cuda_times if device == "cuda" else _cpu_times
    times: list[float] = []
    count, end = 1, time.perf_counter() + seconds
    while len(times) < max_repeats and (not times or time.perf_counter() < end):
        times += time_calls(call, min(count, max_repeats - len(times)))
        count = min(2 * count, LONGEST_BATCH)
    return times


def summarise(times: list[float]) -> Timing:
    """Median and quartiles of a list of milliseconds."""
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    q25, median, q75 = torch.tensor(times, dtype=torch.float64).quantile(quartiles).tolist()
    return Timing(median, q25, q75, len(times))


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
        return call  # which so stays, with all that the graph reads

    return replay


def use_threads(threads: int) -> None:
    """Lets torch, and Numba if it is imported after this, use that many CPU threads."""
    os.environ["NUMBA_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def peak_mib(work: Work, call: Call, threads: int) -> float | None:
    """Most memory that one call held beyond its inputs, its result included.

    None where the system does not tell.
    """
    return cuda_peak_mib(call) if work.device == "cuda" else _cpu_peak_mib(work, threads)


def _warm_up(call: Call, seconds: float) -> None:
    """Calls a few times; once only if that takes long, since the first call compiles kernels."""
    end = time.perf_counter() + seconds
    for _ in range(WARM_UP_CALLS):
        call()
        if time.perf_counter() > end:
            break


def _cpu_times(call: Call, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def _cuda_times(call: Call, repeats: int) -> list[float]:
    """Times on the device's own clock; the host runs ahead, as it does in a model."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def cuda_peak_mib(call: Call, before: int | None = None) -> float:
    """Most memory that one call held beyond what was there before it.

    Args:
        call: What is called.
        before: Bytes that were there before what counts; None: before the call itself. Of a
            training step, model and optimizer count, too.
    """
    call()  # what libraries keep for good is no part of a call, the optimizer's state is made here
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if before is None else before
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def _cpu_peak_mib(work: Work, threads: int) -> float | None:
    # The growth of the resident set counts memory of every library, not torch's alone; a fresh
    # process has no freed blocks that a call could fill unseen. It repeats to about 1 MiB.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_resident_growth_mib, work, threads).result()


def _resident_growth_mib(work: Work, threads: int) -> float | None:
    if not Path("/proc/self/status").exists():
        return None
    _return_memory_when_freed()
    use_threads(threads)
    side = 2**work.case.num_levels
    prepare(replace(work, case=replace(work.case, batch=1, grid=(side, side))))[0]()  # warm-up
    call, _ = prepare(work)
    gc.collect()
    with suppress(OSError):  # where it is not allowed, growth counts from the highest peak so far
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _peak_resident_mib()
    call()
    return max(0.0, _peak_resident_mib() - before)


def _return_memory_when_freed() -> None:
    """Keeps glibc from hoarding freed blocks, of which there are more or fewer by chance."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, 64 * 1024)


def _peak_resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024
