# SPDX-License-Identifier: Apache-2.0
"""What a stereo network costs with full and with quadtree attention: operations, time and memory.

Weights are fresh and images are noise: nothing that is measured depends on them.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.matchers import PRECISIONS, sizes
from benchmarks.measure import cuda_peak_mib, measure, scores_held, use_threads
from benchmarks.program import (
    OneLineParser,
    at_least_one,
    check_place,
    describe_kind,
    list_of,
    measure_rows,
    one_line_of,
    positive,
)
from benchmarks.stereo_cost_tables import KIND, NETWORKS, PASSES, check_result, text_table
from benchmarks.tables import OUT_OF_MEMORY, STEREO_COSTS, number
from quadtree_attention import use_backend
from quadtree_attention.models.registry import create
from quadtree_attention.models.stereo import STTR
from quadtree_attention.tasks.predictor import out_of_memory
from quadtree_attention.tasks.stereo.losses import stereo_losses

PROGRAM = "python -m benchmarks.stereo_costs"
SEED = 0


@dataclass(frozen=True)
class Work:
    """One call to measure: a pair through a network.

    Attributes:
        network: Key of `NETWORKS`.
        image: (width, height) of either view.
        training: Forward, loss and the gradients of all parameters, instead of forward alone.
        precision: "float32" or "bfloat16 autocast".
        device: "cpu" or "cuda".
    """

    network: str
    image: tuple[int, int]
    training: bool
    precision: str
    device: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every row that the options ask for, and writes the results."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    use_threads(options.threads)
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
    add("--device", choices=("cpu", "cuda"), default=available)
    add("--networks", type=list_of(list(NETWORKS)), default=",".join(NETWORKS))
    add("--images", type=sizes, default="960x540", help="WIDTHxHEIGHT, several with commas")
    add("--large", type=sizes, default="1920x1080", help="the same, forward only")
    add("--passes", type=list_of(PASSES), default=",".join(PASSES))
    add("--precisions", type=list_of(list(PRECISIONS)), default="float32",
        help=f"of {', '.join(PRECISIONS)}")  # fmt: skip
    add("--seconds-per-row", type=positive, default=2.0, help="time for the repeats of a row")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
    add("--out", type=Path, help="default: benchmarks/results/stereo-costs--<device name>.json")
    options = parser.parse_args(argv)
    check_place(parser, options, STEREO_COSTS)
    return options


def describe(argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """All fields of a result but its rows."""
    return describe_kind(KIND, PROGRAM, argv, options)


def plan(options: Namespace) -> Iterator[Work]:
    """Every call to measure; those that are compared with each other come together."""
    for images, passes in ((options.images, options.passes), (options.large, PASSES[:1])):
        for image in images:
            for name in passes:
                for precision in options.precisions:
                    for network in options.networks:
                        training = name == PASSES[1]
                        yield Work(network, image, training, precision, options.device)


def measured(work: Work, options: Namespace) -> dict[str, Any]:
    """Measures one row; one that fails says so instead."""
    row: dict[str, Any] = {
        "network": work.network,
        "image": list(work.image),
        "pass": PASSES[work.training],
        "precision": work.precision,
    }
    try:
        row |= asdict(count(work.network, work.image))
        call = prepare(work)
        peak = cuda_peak_mib(call) if work.device == "cuda" else None
        timing = measure(call, work.device, seconds=options.seconds_per_row)
        return row | asdict(timing) | {"peak_mib": peak}
    except Exception as error:  # whatever happens to one row, the others are still wanted
        return row | {"error": OUT_OF_MEMORY if out_of_memory(error) else one_line_of(error)}


@dataclass(frozen=True)
class Count:
    """Parameters, and multiply-accumulates of one pair, forward.

    Attributes:
        params: Parameters.
        macs: Multiply-accumulates: half of PyTorch's FLOPs.
        attention_macs: Those of scores and messages of the transformer alone.
    """

    params: int
    macs: int
    attention_macs: int


@cache
def count(network: str, image: tuple[int, int]) -> Count:
    """Counts a network on one pair; shapes are computed, numbers are not."""
    # all rows at once: nothing is held in memory
    options = {**NETWORKS[network].options, "max_entries": sys.maxsize}
    if options["attention"] != "full":  # the reference has no formula
        options = {**options, "backend": "cpu"}
    model = create("sttr", **options).eval()
    width, height = image
    with FakeTensorMode(allow_non_fake_inputs=True):
        views = {f"image{i}": torch.zeros(1, 3, height, width) for i in range(2)}
        # As plain matrix products, full attention is counted whatever kernel would run it.
        kernel = sdpa_kernel(SDPBackend.MATH)
        plain = use_backend("reference")  # of Sinkhorn: sums of exponentials, as on a GPU
        with torch.no_grad(), kernel, plain, FlopCounterMode(display=False) as counter:
            model(views)
    counts = counter.get_flop_counts()
    layers = [name for name in counts if name.endswith(("self_attn", "cross_attn"))]
    of_layers = [counts[name] for name in layers]
    products = [n for c in of_layers for op, n in c.items() if _is_attention(op)]
    total = sum(counts["Global"].values())
    params = sum(parameter.numel() for parameter in model.parameters())
    return Count(params, total // 2, sum(products) // 2)


def _is_attention(op: Any) -> bool:
    return str(op).startswith(("quadtree_", "aten.bmm"))


def prepare(work: Work) -> Callable[[], object]:
    """The call to measure, on a network and images that exist already."""
    torch.manual_seed(SEED)
    model = create("sttr", **NETWORKS[work.network].options).to(work.device)
    model.train(work.training)
    batch = noise(work.image, work.device)
    parameters = list(model.parameters())
    dtype = PRECISIONS[work.precision]

    def settings() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.autocast(work.device, dtype, enabled=dtype is not None))
        if NETWORKS[work.network].explicit:
            stack.enter_context(scores_held())
        return stack

    def inference() -> object:
        with torch.inference_mode(), settings():
            return model(batch).disparity

    def training() -> object:
        with settings():
            loss = loss_of(model, batch)
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return training if work.training else inference


def loss_of(model: STTR, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(batch, true_disparity=batch["disparity0"])
    losses = stereo_losses(output, batch, model.at_cells, model.max_disparity)
    return torch.stack(list(losses.values())).sum()


def noise(image: tuple[int, int], device: str) -> dict[str, torch.Tensor]:
    """A pair as `tasks.stereo` gives it to a network."""
    width, height = image
    occluded = torch.rand(1, height, width, device=device) < 0.1
    return {
        "image0": torch.rand(1, 3, height, width, device=device),
        "image1": torch.rand(1, 3, height, width, device=device),
        "disparity0": torch.rand(1, height, width, device=device) * width / 8,
        "known0": torch.ones_like(occluded),
        "visible0": ~occluded,
        "occluded0": occluded,
    }


def one_line(row: dict[str, Any]) -> str:
    """A row in one line."""
    width, height = row["image"]
    name = f"{row['network']} {width}x{height} {row['pass']} {row['precision']}"
    if "error" in row:
        return f"{name}: {row['error']}"
    cost = f"{number(row['macs'] / 1e9)} GMACs, {number(row['median_ms'])} ms"
    return f"{name}: {cost}, {number(row['peak_mib'])} MiB"


if __name__ == "__main__":
    sys.exit(main())
