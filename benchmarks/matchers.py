# SPDX-License-Identifier: Apache-2.0
"""What the matcher costs on large images, stage by stage, with one attention or another.

Weights are fresh and images are noise: all that depends on them is the number of matches, so a
fixed number of random ones goes to the fine stage instead of those found.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.matcher_tables import ATTENTION, KIND, STAGES, check_result, text_table
from benchmarks.measure import (
    MIB,
    _peak_resident_mib,
    _return_memory_when_freed,
    measure,
    use_threads,
)
from benchmarks.program import (
    OneLineParser,
    at_least_one,
    check_place,
    describe_kind,
    list_of,
    measure_rows,
    one_line_of,
    positive,
    release_memory,
)
from benchmarks.tables import MATCHERS, OUT_OF_MEMORY, number
from quadtree_attention.models.matcher import LoFTR
from quadtree_attention.models.parts.coarse_matching import CoarseMatches
from quadtree_attention.models.parts.context_attention import ATTENTIONS
from quadtree_attention.models.registry import create
from quadtree_attention.models.registry import names as model_names
from quadtree_attention.tasks.predictor import out_of_memory

PROGRAM = "python -m benchmarks.matchers"
IMAGES = {"cuda": "640x480,1024x1024,2048x2048", "cpu": "640x480"}
PRECISIONS = {"float32": None, "bfloat16 autocast": torch.bfloat16}
SMALL = (64, 64)  # image of the call before that whose memory is measured
SEED = 0
Note = Callable[[str], None]  # is told the name of a stage


@dataclass(frozen=True)
class Work:
    """One call to measure: a pair of images of the same size through a matcher.

    Attributes:
        model: Name of the matcher, which fixes all but the attention.
        attention: That of its coarse transformer.
        image: (width, height) of either image.
        matches: How many go to the fine stage.
        precision: "float32" or "bfloat16 autocast".
        device: "cpu" or "cuda".
    """

    model: str
    attention: str
    image: tuple[int, int]
    matches: int
    precision: str
    device: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every row that the options ask for, and writes the results."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    use_threads(options.threads)
    if options.memory is not None:
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory * 2**30 / whole))
    return measure_rows(
        plan(options),
        lambda work: [measured(work, options)],
        describe(argv, options),
        options,
        check=check_result,
        one_line=one_line,
        text_table=text_table,
    )


def parse(argv: Sequence[str]) -> Namespace:
    """The checked options; a bad one ends the program with one line and exit code 2."""
    parser = OneLineParser(prog=PROGRAM, description=__doc__)
    add = parser.add_argument
    available = "cuda" if torch.cuda.is_available() else "cpu"
    names = ",".join(model_names("match"))
    add("--device", choices=("cpu", "cuda"), default=available)
    usual = "loftr_quadtree_small,loftr_quadtree_indoor"
    add("--models", type=list_of(model_names("match")), default=usual,
        help=f"matchers whose attention is exchanged, of {names}")  # fmt: skip
    add("--attentions", type=list_of(list(ATTENTIONS)), default="quadtree_b,linear,full")
    add("--images", type=sizes, help="WIDTHxHEIGHT, several with commas; default: "
        f"{IMAGES['cuda']} on a GPU, {IMAGES['cpu']} on a CPU")  # fmt: skip
    add("--matches", type=at_least_one, default=2000, help="that go to the fine stage")
    add("--precisions", type=list_of(list(PRECISIONS)), default="float32",
        help=f"of {', '.join(PRECISIONS)}")  # fmt: skip
    add("--memory", type=positive, metavar="GIB", help="let torch have no more of the GPU")
    add("--seconds-per-row", type=positive, default=2.0, help="time for the repeats of a row")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
    add("--out", type=Path, help="default: benchmarks/results/matchers--<device name>.json")
    options = parser.parse_args(argv)
    check_place(parser, options, MATCHERS)
    if options.device == "cpu" and options.memory is not None:
        parser.error("argument --memory: only the memory of a GPU can be limited; leave it out")
    if options.images is None:
        options.images = sizes(IMAGES[options.device])
    return options


def sizes(text: str) -> list[tuple[int, int]]:
    """(width, height) of every image in a list as `IMAGES` has."""
    found = []
    for part in text.split(","):
        width, cross, height = part.partition("x")
        if not (cross and width.isdecimal() and height.isdecimal() and int(width) * int(height)):
            raise argparse.ArgumentTypeError(f"must be like 640x480,1024x1024, got {text!r}")
        found.append((int(width), int(height)))
    return found


def describe(argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """All fields of a result but its rows."""
    return describe_kind(KIND, PROGRAM, argv, options) | {"memory_gib": options.memory}


def plan(options: Namespace) -> Iterator[Work]:
    """Every call to measure; those that are compared with each other come together."""
    for image in options.images:
        for model in options.models:
            for precision in options.precisions:
                for attention in options.attentions:
                    yield Work(model, attention, image, options.matches, precision, options.device)


def measured(work: Work, options: Namespace) -> dict[str, Any]:
    """Measures one row; one that fails says so instead."""
    row = asdict(work) | {"image": list(work.image)}
    del row["device"]
    try:
        memory = peaks(work) if work.device == "cuda" else _peaks_elsewhere(work, options.threads)
        return row | times(work, options.seconds_per_row) | memory
    except Exception as error:  # whatever happens to one row, the others are still wanted
        return row | {"error": OUT_OF_MEMORY if out_of_memory(error) else one_line_of(error)}


def prepare(work: Work) -> tuple[LoFTR, Callable[[], object]]:
    """A matcher, and the call to measure."""
    torch.manual_seed(SEED)
    model = create(work.model, attention=work.attention).to(work.device).eval()
    width, height = work.image
    noise = torch.rand(2, 1, 1, height, width).to(work.device)
    data = {"image0": noise[0], "image1": noise[1]}
    cells = -(-width // 8) * -(-height // 8)
    drawn = torch.randint(cells, (2, work.matches)).to(work.device)
    fixed = CoarseMatches(torch.zeros_like(drawn[0]), *drawn, drawn[0].float())
    model.coarse_matching.register_forward_hook(lambda *_: fixed)
    dtype = PRECISIONS[work.precision]

    def call() -> object:
        with torch.inference_mode(), torch.autocast(work.device, dtype, enabled=dtype is not None):
            return model(data)

    return model, call


def times(work: Work, seconds: float) -> dict[str, Any]:
    """Times of the whole call, and the median of every stage."""
    model, call = prepare(work)
    clock = Clock(work.device)
    watch(_stages(model), clock.begin, clock.end)
    attentions = [layer.attn for layer in model.coarse_transformer.layers]
    watch({ATTENTION: attentions}, clock.begin, clock.end)

    def timed() -> object:
        clock.calls.append({})
        return call()

    timing = measure(timed, work.device, seconds=seconds)
    return asdict(timing) | {"stages_ms": clock.medians(timing.repeats)}


def peaks(work: Work) -> dict[str, Any]:
    """The most memory that is held in a call and in each of its stages, model and images included.

    None where the system does not tell.
    """
    try:
        prepare(replace(work, image=SMALL))[1]()  # what libraries keep for good is no part of it
        release_memory(work.device)
        memory = Memory(work.device)
        model, call = prepare(work)
        watch(_stages(model), memory.begin, memory.end)
        call()
    except OSError:
        return {"peak_mib": None, "stages_mib": None}
    return {"peak_mib": memory.whole(), "stages_mib": memory.stages}


def _peaks_elsewhere(work: Work, threads: int) -> dict[str, Any]:
    # A fresh process has no freed blocks that a call could fill unseen.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peaks_here, work, threads).result()


def _peaks_here(work: Work, threads: int) -> dict[str, Any]:
    _return_memory_when_freed()
    use_threads(threads)
    return peaks(work)


def _stages(model: LoFTR) -> dict[str, list[nn.Module]]:
    modules = (
        [model.backbone],
        [model.coarse_transformer],
        [model.coarse_matching],
        [model.fine_windows, model.fine_transformer],
    )
    return dict(zip(STAGES, modules, strict=True))


def watch(stages: dict[str, list[nn.Module]], begin: Note, end: Note) -> None:
    """Lets both know whenever a stage, that is, one of its modules, begins or ends."""
    for stage, modules in stages.items():
        for module in modules:
            module.register_forward_pre_hook(lambda *_, stage=stage: begin(stage))
            module.register_forward_hook(lambda *_, stage=stage: end(stage))


class Clock:
    """When stages began and ended, call by call; does not make a GPU wait."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls: list[dict[str, list[Any]]] = []

    def begin(self, stage: str) -> None:
        self.calls[-1].setdefault(stage, []).append(self._now())

    def end(self, stage: str) -> None:
        self.calls[-1][stage].append(self._now())

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


class Memory:
    """The most memory held in each stage, in MiB beyond what was there at first."""

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
        """The peak starts again from what is held now."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> float:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() / MIB
        return _peak_resident_mib()


def one_line(row: dict[str, Any]) -> str:
    """A row in one line."""
    width, height = row["image"]
    name = f"{width}x{height} {row['model']} {row['attention']} {row['precision']}"
    if "error" in row:
        return f"{name}: {row['error']}"
    return f"{name}: {number(row['median_ms'])} ms, {number(row['peak_mib'])} MiB"


if __name__ == "__main__":
    sys.exit(main())
