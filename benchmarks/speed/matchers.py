# SPDX-License-Identifier: Apache-2.0
"""What the matcher costs on large images, stage by stage, with one attention or another.

Weights are fresh and images are noise: all that depends on them is the number of matches, so a
fixed number of random ones goes to the fine stage instead of those found.
"""

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.measure import (
    Call,
    Memory,
    in_fresh_process,
    inference,
    measure,
    release_memory,
)
from benchmarks.result import STAGES
from benchmarks.speed.stereo import PRECISIONS
from benchmarks.suite import Work, cases
from quadtree_attention import models
from quadtree_attention.models.parts.coarse_matching import CoarseMatches

SMALL = [64, 64]  # image of the call before that whose memory is measured
SEED = 0
MATCHERS = models.names("match")


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    if options.device == "cpu" and options.memory is not None:
        parser.error("argument --memory: only the memory of a GPU can be limited; leave it out")
    options.memory_gib = options.memory


def plan(options: Namespace) -> list[list[Work]]:
    """Every call to measure; those that are compared with each other are adjacent."""
    if options.memory is not None:
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory * 2**30 / whole))
    planned = cases(image=options.images, model=options.models, matches=[options.matches],
                    precision=options.precisions, attention=options.attentions)  # fmt: skip
    return [[Work(case, options.device)] for case in planned]


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """Memory and time of the whole call and of its stages."""
    if work.device == "cuda":
        memory = peaks(work)
    else:
        memory = in_fresh_process(peaks, work, threads=options.threads)
    return times(work, options.seconds_per_row) | memory


def prepare(work: Work) -> tuple[Any, Call]:
    """A matcher, and the call to measure."""
    torch.manual_seed(SEED)
    model = models.create(work["model"], attention=work["attention"]).to(work.device).eval()
    width, height = work["image"]
    noise = torch.rand(2, 1, 1, height, width).to(work.device)
    data = {"image0": noise[0], "image1": noise[1]}
    cells = -(-width // 8) * -(-height // 8)
    drawn = torch.randint(cells, (2, work["matches"])).to(work.device)
    fixed = CoarseMatches(torch.zeros_like(drawn[0]), *drawn, drawn[0].float())
    model.coarse_matching.register_forward_hook(lambda *_: fixed)
    dtype = PRECISIONS[work["precision"]]
    return model, inference(model, data, device=work.device, dtype=dtype)


def times(work: Work, seconds: float) -> dict[str, Any]:
    """Times of the whole call, and the median of every stage."""
    model, call = prepare(work)
    clock = Clock(work.device)
    attentions = [layer.attn for layer in model.coarse_transformer.layers]
    watch(_stages(model) | {"attention": attentions}, clock.mark, clock.mark)

    def timed() -> object:
        clock.calls.append({})
        return call()

    (timing,) = measure(timed, device=work.device, seconds=seconds)
    return timing | {"stages_ms": clock.medians(int(timing["repeats"]))}


def peaks(work: Work) -> dict[str, Any]:
    """Peak memory of a call and of each of its stages, model and images included.

    No stages, and None, where the system does not tell.
    """
    try:
        prepare(replace(work, case=work.case | {"image": SMALL}))[1]()  # libraries keep memory
        release_memory(work.device)
        memory = Memory(work.device)
        model, call = prepare(work)
        watch(_stages(model), memory.begin, memory.end)
        call()
    except OSError:
        return {"peak_mib": None}
    return {"peak_mib": memory.whole(), "stages_mib": memory.stages}


def _stages(model: Any) -> dict[str, Sequence[nn.Module]]:
    fine = [model.fine_windows, model.fine_transformer]
    modules = [[model.backbone], [model.coarse_transformer], [model.coarse_matching], fine]
    return dict(zip(STAGES, modules, strict=True))


def watch(
    stages: Mapping[str, Sequence[nn.Module]],
    begin: Callable[[str], None],
    end: Callable[[str], None],
) -> None:
    """Calls both whenever a module of a stage begins or ends."""
    for stage, modules in stages.items():
        for module in modules:
            module.register_forward_pre_hook(lambda *_, stage=stage: begin(stage))
            module.register_forward_hook(lambda *_, stage=stage: end(stage))


class Clock:
    """When stages began and ended, call by call; does not synchronize a GPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls: list[dict[str, list[Any]]] = []

    def mark(self, stage: str) -> None:
        """Notes when a stage begins or ends."""
        self.calls[-1].setdefault(stage, []).append(self._now())

    def medians(self, repeats: int) -> dict[str, float]:
        """Milliseconds of every stage, from the last calls."""
        calls = self.calls[-repeats:]
        return {
            stage: statistics.median(self._milliseconds(call[stage]) for call in calls)
            for stage in calls[0]
        }

    def _now(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, marks: list[Any]) -> float:
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        if self.device == "cpu":
            return sum((end - begin) * 1e3 for begin, end in pairs)
        return sum(begin.elapsed_time(end) for begin, end in pairs)
