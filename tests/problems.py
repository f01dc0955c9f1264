# SPDX-License-Identifier: Apache-2.0
"""Random problems: a backend against the reference, forward and backward.

    python -m tests.problems --count 10000 --backend cpu
    python -m tests.problems --seconds 600 --backend triton --device cuda

Every problem follows from `--seed` and its number: `--first N --count 1` runs problem N again.
Memory is watched, too: what is allocated between problems must not grow. Needs torch and the
backend, nothing else.
"""

import argparse
import gc
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from quadtree_attention import BackendUnsupportedError
from quadtree_attention.ops.attention.problem import Variant
from tests.support.against_reference import Case, check
from tests.support.poison import poisoned

DTYPES = {"cpu": ("float64", "float32", "bfloat16"), "triton": ("float32", "bfloat16", "float16")}
CELLS = {"cpu": 200, "triton": 3000}  # of a map, at most
SHARE = {"cpu": 1, "triton": 20}  # problems of one configuration: kernels are compiled for it
WIDTHS = (1, 2, 3, 5, 8, 12, 16, 20, 32, 33, 48, 64)
HIDE = (0.0, 0.0, 0.3, 0.8, 1.0)
MOST_GROWTH = {"host": 512 * 2**20, "device": 16 * 2**20}


def draw(seed: int, number: int, *, cells: int, share: int) -> Case:
    """Problem `number`: `share` of them in a row have widths, levels and topk in common."""
    rng = random.Random(f"{seed} configuration {number // share}")
    ndim = rng.choice((1, 2, 2, 3))
    num_levels = rng.randint(1, 4 if ndim < 3 else 3)
    heads, dim, value_dim = rng.randint(1, 4), rng.choice(WIDTHS), rng.choice(WIDTHS)
    topk = tuple(rng.randint(1, 12) for _ in range(num_levels - 1))
    variant = rng.choice(get_args(Variant))
    pyramids = rng.random() < 0.25
    rng = random.Random(f"{seed} problem {number}")
    return Case(
        name=f"problem {number}",
        batch=rng.randint(1, 3),
        grid=_grid(rng, ndim, cells),
        key_grid=_grid(rng, ndim, cells),
        heads=heads,
        dim=dim,
        value_dim=value_dim,
        num_levels=num_levels,
        topk=topk or 1,
        variant=variant,
        hide_queries=rng.choice(HIDE),
        hide_keys=rng.choice(HIDE),
        weighted=rng.random() < 0.8,
        scale=rng.choice((None, None, 0.1, 1.0)),
        pyramids=pyramids,
        layout=rng.choice(("dense", "heads first")),
        deterministic=rng.random() < 0.3,
    )


def _grid(rng: random.Random, ndim: int, cells: int) -> tuple[int, ...]:
    """Draw the logarithm of each side: maps of few cells and long maps are frequent."""
    sides = []
    for _ in range(ndim):
        sides.append(int(cells ** rng.random()))
        cells //= sides[-1]
    rng.shuffle(sides)
    return tuple(sides)


@dataclass
class Watch:
    """Growth of the memory in use between problems, since `start`."""

    device: str
    first: dict[str, int] = field(default_factory=dict)

    def start(self) -> None:
        self.first = self.now()

    def now(self) -> dict[str, int]:
        gc.collect()
        found = {}
        if sys.platform == "linux":
            with open("/proc/self/statm") as file:
                found["host"] = int(file.read().split()[1]) * 4096
        if self.device == "cuda":
            found["device"] = torch.cuda.memory_allocated()
        return found

    def growth(self) -> dict[str, int]:
        return {where: size - self.first[where] for where, size in self.now().items()}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    watch = Watch(options.device)
    started = time.monotonic()
    limits = (options.count, options.seconds)
    failures, refused, compared, number = [], 0, 0.0, options.first
    while (done := number - options.first) < options.count:
        spent = time.monotonic() - started
        if spent > options.seconds:
            break
        if not watch.first and max(done / limits[0], spent / limits[1]) >= 0.3:
            watch.start()  # kernels are compiled and caches are filled
        case = draw(options.seed, number, cells=options.cells, share=options.share)
        dtype = getattr(torch, options.dtypes[number % len(options.dtypes)])
        try:
            with poisoned():
                compared += check(case, options.backend, dtype, options.device, seed=number)
        except BackendUnsupportedError as error:
            refused += 1
            print(f"refused: problem {number}, {dtype}: {error.reasons}")
        except Exception as error:
            failures.append(number)
            print(f"WRONG: {case}, {dtype}: {type(error).__name__}: {error}", flush=True)
        number += 1
        if done % 1000 == 999:
            print(f"{done + 1} problems, {len(failures)} wrong, {spent:.0f} s", flush=True)
    growth = watch.growth() if watch.first else {}
    ran = done - refused if done else 0
    share = compared / max(1, ran - len(failures))
    print(
        f"{done} problems on {options.backend} in {time.monotonic() - started:.0f} s: "
        f"{len(failures)} wrong {failures[:20] or ''}, {refused} refused; "
        f"{100 * share:.1f} % of queries without a near tie; memory grew by "
        + ", ".join(f"{size / 2**20:.1f} MiB ({where})" for where, size in growth.items())
    )
    leaks = [where for where, size in growth.items() if size > MOST_GROWTH[where]]
    if leaks:
        print(f"memory grew by more than {MOST_GROWTH} bytes: {leaks}")
    return 1 if failures or leaks or refused else 0


def _options(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.problems", description=__doc__)
    parser.add_argument("--backend", choices=tuple(DTYPES), default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=10**9, help="problems, at most")
    parser.add_argument("--seconds", type=float, default=10**9, help="time, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--cells", type=int, help="cells of a map, at most")
    parser.add_argument("--share", type=int, help="problems of one kernel configuration")
    parser.add_argument("--dtypes", nargs="+")
    options = parser.parse_args(arguments)
    if options.count == options.seconds == 10**9:
        parser.error("give --count or --seconds")
    options.cells = options.cells or CELLS[options.backend]
    options.share = options.share or SHARE[options.backend]
    options.dtypes = options.dtypes or DTYPES[options.backend]
    return options


if __name__ == "__main__":
    sys.exit(main())
