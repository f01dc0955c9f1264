# SPDX-License-Identifier: Apache-2.0
"""The paper's running time: RetinaNet on the b0 backbone, with quadtree attention and with PVTv2's.

All are the same code but for the attention. PVTv2's is measured as its own code has it, which holds
the scores of all queries, and by PyTorch's fused kernels, which do not. "network" is backbone,
pyramid and heads, "detector" all of it: images resized and normalised before, boxes chosen after.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from benchmarks.detector_tables import ATTENTIONS, KIND, PARTS, PRECISIONS, check_result, text_table
from benchmarks.matchers import sizes
from benchmarks.measure import capture, cuda_peak_mib, measure_in_turns, scores_held, use_threads
from benchmarks.program import (
    OneLineParser,
    at_least_one,
    check_place,
    describe_kind,
    list_of,
    measure_rows,
    one_line_of,
    positive,
    version_of,
)
from benchmarks.tables import DETECTORS, OUT_OF_MEMORY, number
from quadtree_attention.models.registry import create
from quadtree_attention.tasks.predictor import out_of_memory

PROGRAM = "python -m benchmarks.detectors"
MODES = ("eager", "compile", "graph", "compile+graph")
CLASSES = 80
# Off, since with it torch 2.11 fails on PVTv2's attention in bfloat16 ("CantSplit").
INDUCTOR = {"triton.coalesce_tiling_analysis": False}
SEED = 0


@dataclass(frozen=True)
class Work:
    """One call to measure.

    Attributes:
        model: Name of the detector.
        attention: Key of `ATTENTIONS`.
        part: "network" or "detector".
        image: (width, height).
        batch: How many images.
        precision: "float32" or "bfloat16".
        mode: One of `MODES`.
        device: "cpu" or "cuda".
    """

    model: str
    attention: str
    part: str
    image: tuple[int, int]
    batch: int
    precision: str
    mode: str
    device: str


class Network(nn.Module):
    """A detector from images to logits and boxes of all anchors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, images: Tensor) -> dict[str, list[Tensor]]:
        return self.head(list(self.backbone(images).values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every row that the options ask for, and writes the results."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    use_threads(options.threads)
    return measure_rows(
        plan(options),
        lambda works: measured(works, options),
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
    graphs = ",".join(MODES if available == "cuda" else MODES[:2])
    add("--device", choices=("cpu", "cuda"), default=available)
    add("--model", default="retinanet_quadtree_b_b0", help="name of a RetinaNet")
    add("--attentions", type=list_of(list(ATTENTIONS)), default=",".join(ATTENTIONS))
    add("--parts", type=list_of(PARTS), default=",".join(PARTS))
    add("--images", type=sizes, default="1333x800", help="WIDTHxHEIGHT, several with commas")
    add("--batch", type=at_least_one, default=1, help="images at a time")
    add("--precisions", type=list_of(PRECISIONS), default=",".join(PRECISIONS))
    add("--modes", type=list_of(MODES), default=graphs, help="of the network; detectors are eager")
    add("--seconds-per-row", type=positive, default=1.0, help="time for the repeats of a row")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
    add("--out", type=Path, help="default: benchmarks/results/detectors--<device name>.json")
    options = parser.parse_args(argv)
    check_place(parser, options, DETECTORS)
    if options.device == "cpu" and any("graph" in mode for mode in options.modes):
        parser.error("argument --modes: graph means CUDA graphs and needs --device cuda")
    return options


def describe(argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """All fields of a result but its rows."""
    about = describe_kind(KIND, PROGRAM, argv, options)
    about["versions"]["torchvision"] = version_of("torchvision")
    return about


def plan(options: Namespace) -> Iterator[list[Work]]:
    """Every call to measure, together with those that it is compared with."""
    for image in options.images:
        for part in options.parts:
            for precision in options.precisions:
                for mode in options.modes if part == PARTS[0] else MODES[:1]:
                    yield [
                        Work(
                            options.model, attention, part, image, options.batch, precision, mode,
                            options.device,
                        )
                        for attention in options.attentions
                    ]  # fmt: skip


def measured(works: Sequence[Work], options: Namespace) -> list[dict[str, Any]]:
    """Measures rows in turns; one that fails says so instead."""
    torch._dynamo.reset()
    rows, calls = [], []
    for work in works:
        row = asdict(work) | {"image": list(work.image)}
        del row["device"]
        rows.append(row)
        try:
            call = prepare(work)
            row["peak_mib"] = cuda_peak_mib(call) if work.device == "cuda" else None
            calls.append((row, capture(call) if "graph" in work.mode else call))
        except Exception as error:  # whatever happens to one row, the others are still wanted
            fail(row, error)
    try:
        timed = [call for _, call in calls]
        timings = measure_in_turns(timed, options.device, seconds=options.seconds_per_row)
        for (row, _), timing in zip(calls, timings, strict=True):
            row |= asdict(timing)
    except Exception as error:  # of one of them, which spoils all
        for row, _ in calls:
            fail(row, error)
    return rows


def fail(row: dict[str, Any], error: Exception) -> None:
    """Puts what happened in the place of numbers."""
    row.pop("peak_mib", None)
    row["error"] = OUT_OF_MEMORY if out_of_memory(error) else one_line_of(error)


def prepare(work: Work) -> Callable[[], object]:
    """The call to measure, on a model and an image that exist already."""
    torch.manual_seed(SEED)
    width, height = work.image
    dtype = getattr(torch, work.precision)
    limits = {"min_size": min(work.image), "max_size": max(work.image)}
    whole = create(work.model, num_classes=CLASSES, **limits, **ATTENTIONS[work.attention].options)
    whole = whole.to(work.device, dtype).eval()
    images = torch.rand(work.batch, 3, height, width).to(work.device, dtype)
    if work.part == PARTS[0]:
        network = Network(whole)
        if "compile" in work.mode:
            network = compiled(network)
        return partial(_forward, network, images, work)
    return partial(_forward, whole, list(images), work)


def compiled(network: nn.Module) -> Any:
    """The network, compiled apart from all others.

    Which kernel attention takes is no part of what the compiler tells graphs apart by, neither in
    memory nor on disk: it would give out the network with scores held for the fused one. So each
    network gets a class of its own, which it does look at, and there is no cache on disk from now
    on, as long as this program runs.
    """
    kind = type(network)
    network.__class__ = type(kind.__name__, (kind,), {})
    torch._functorch.config.enable_autograd_cache = False
    return torch.compile(network, dynamic=False, options=INDUCTOR)


def _forward(model: Callable[[Any], object], images: Any, work: Work) -> object:
    with torch.no_grad(), scores_held() if ATTENTIONS[work.attention].explicit else nullcontext():
        return model(images)


def one_line(row: dict[str, Any]) -> str:
    """A row in one line."""
    name = " ".join(row[key] for key in ("part", "attention", "precision", "mode"))
    if "error" in row:
        return f"{name}: {row['error']}"
    return f"{name}: {number(row['median_ms'])} ms, {number(row['peak_mib'])} MiB"


if __name__ == "__main__":
    sys.exit(main())
