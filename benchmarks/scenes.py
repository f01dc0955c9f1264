# SPDX-License-Identifier: Apache-2.0
"""How long synthetic scenes take to make: laying them out on the host, rendering, photometry.

The host lays out the next batch while a GPU is busy, so a training step waits for the longer of the
two at most. The first call on a GPU compiles, and is shown for itself.
"""

import argparse
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Timing, cuda_peak_mib, measure, summarise, use_threads
from benchmarks.program import OneLineParser, at_least_one, cpu_name, positive
from quadtree_attention.synthetic import (
    HomographyOptions,
    ProceduralTextures,
    SceneOptions,
    Textures,
    distort,
    homography_pairs,
    scene_pairs,
)
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.fused import plainly
from quadtree_attention.synthetic.layout import first_camera, place, second_camera
from quadtree_attention.synthetic.views import both_views

PROGRAM = "python -m benchmarks.scenes"
TEXTURES = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; a mistake ends the program with one line and exit code 2."""
    options = parse(sys.argv[1:] if argv is None else list(argv))
    use_threads(options.threads)
    rows = run(options)
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    height, width = options.size
    print(f"{options.batch} pairs of {height}x{width} on {device}, torch {torch.__version__}")
    for name, row in rows.items():
        print(f"{name:<28} " + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    if options.out is not None:
        options.out.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str]) -> Namespace:
    parser = OneLineParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cpu", "cuda"), default=default)
    add("--size", type=_size, default=(384, 512), metavar="HxW", help="of both views")
    add("--batch", type=at_least_one, default=16, help="pairs")
    add("--samples", type=int, choices=(1, 2, 4), default=2, help="rays per pixel")
    add("--seconds", type=positive, default=2.0, help="for each row")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
    add("--plain", action="store_true", help="do not compile on the GPU")
    add("--out", type=Path, help="write the rows as JSON, too")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: there is no CUDA device")
    return options


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    try:
        size = int(height), int(width)
    except ValueError:
        size = 0, 0
    if min(size) < 8:
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH, at least 8x8, got {text!r}")
    return size


def run(options: Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds per batch, and what follows from them."""
    textures = ProceduralTextures(TEXTURES).to(options.device)
    if not options.plain:
        return _rows(options, textures)
    with plainly():
        return _rows(options, textures)


def _rows(options: Namespace, textures: Textures) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    device, numbers = options.device, range(options.batch)
    scenes = SceneOptions(samples=options.samples)
    planes = HomographyOptions(samples=options.samples)

    def pairs(indices: Sequence[int] = numbers) -> Any:
        return scene_pairs(textures, indices, size=options.size, options=scenes)

    def flat_pairs() -> Any:
        return homography_pairs(textures, numbers, size=options.size, options=planes)

    rows["scenes, first call"] = {"ms": _once(pairs, device)}
    rows["planes, first call"] = {"ms": _once(flat_pairs, device)}
    rows["scenes, other batch"] = {"ms": _once(lambda: pairs(range(options.batch + 3)), device)}
    layout, views = _parts(options, scenes, textures)
    image = views()[0][0]
    calls: dict[str, Callable[[], object]] = {
        "scenes": pairs,
        "  layout": layout,
        "  both views": views,
        "  photometric, both views": lambda: [distort(image, numbers, view=v) for v in (0, 1)],
        "planes": flat_pairs,
    }
    for name, call in calls.items():
        rows[name] = _row(call, options)
    rows["scenes"]["pairs/s"] = options.batch / rows["scenes"]["ms"] * 1e3
    rows["planes"]["pairs/s"] = options.batch / rows["planes"]["ms"] * 1e3
    if device == "cuda":
        rows["scenes"]["peak MiB"] = cuda_peak_mib(pairs)
    return rows


def _parts(
    options: Namespace, scenes: SceneOptions, textures: Textures
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What `scene_pairs` does on the host, and what it does on the device but for photometry."""

    def layout() -> Any:
        draws = Draws(0, range(options.batch))
        camera = first_camera(draws, options.size, scenes.focal)
        scene = place(draws, camera, scenes, len(textures))
        return scene, (camera, second_camera(draws, scene, camera, options.size, scenes))

    scene, cameras = layout()
    return layout, lambda: both_views(scene, cameras, textures, scenes.samples)


def _row(call: Callable[[], object], options: Namespace) -> dict[str, float]:
    """Time until the device is done, and of it that of the host, which need not wait."""
    whole = measure(call, options.device, seconds=options.seconds)
    row = {"ms": whole.median_ms, "q25": whole.q25_ms, "q75": whole.q75_ms}
    if options.device == "cuda":
        row["host ms"] = _host(call, whole).median_ms
    return row


def _host(call: Callable[[], object], whole: Timing) -> Timing:
    times = []
    for _ in range(min(10, whole.repeats)):
        torch.cuda.synchronize()  # an idle device: nothing in its queue to wait for
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return summarise(times)


def _once(call: Callable[[], object], device: str) -> float:
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    sys.exit(main())
