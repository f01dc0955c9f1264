# SPDX-License-Identifier: Apache-2.0
"""`quadtree warmup`: compiles the kernels of a network before its first use."""

import json
import re
import time
from pathlib import Path

import typer

from quadtree_attention.cli.options import argument, flag, option
from quadtree_attention.cli.output import imported, say
from quadtree_attention.errors import OptionError

HELP = """Compile the kernels of a network, so that the first call is as fast as later ones.

On a GPU, all kernels for images of the given sizes are compiled in parallel; other sizes use the
same kernels. On a CPU, the network runs once per size. Compiled kernels are cached on disk: in
Triton's cache on a GPU, in Numba's on a CPU.

\b
Examples:
  quadtree warmup loftr_quadtree_small
  quadtree warmup mine.safetensors --sizes 480x640,800x1344 --device cuda --dtype float16
  quadtree warmup quadtree_b_b0 --sizes 224x224 --training
"""
OPTIONS = "device dtype json debug"
OWN = {
    "model": argument(str, "MODEL", "Name of a network, or its weights, .safetensors.", ...),
    "sizes": option(str, "Height x width of images, comma-separated.", "480x640"),
    "training": flag("training", "Also compile for training steps."),
}


def run(context: typer.Context) -> None:
    from quadtree_attention import models
    from quadtree_attention.tasks.predictor import DTYPES, usable_device

    options = context.params
    sizes: list[tuple[int, int]] = []
    for text in options["sizes"].split(","):
        found = re.fullmatch(r"\s*(\d+)x(\d+)\s*", text)
        if found is None or "0" in found.groups():
            raise OptionError(
                f"--sizes must be like 480x640 or 480x640,800x1344, got {text!r}; pass height x "
                "width"
            )
        sizes.append((int(found[1]), int(found[2])))
    imported()
    import torch

    from quadtree_attention import checks

    checks.one_of(DTYPES, dtype=options["dtype"])
    device = usable_device(options["device"])
    name = options["model"]
    if Path(name).suffix or name in models.names(pretrained=True):
        network = models.load(name)
    else:
        dense = name in (*models.names("detect"), *models.names("segment"))
        network = models.create(name, num_classes=2) if dense else models.create(name)
    dtype = getattr(torch, options["dtype"])
    begin = time.perf_counter()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        kernels = models.warmup(
            network.to(device), sizes, training=options["training"], progress=True
        )
    seconds = time.perf_counter() - begin
    if options["json"]:
        report = {"model": name, "device": str(device), "kernels": kernels, "seconds": seconds}
        print(json.dumps(report))
    else:
        what = f"{kernels} kernels of {name}" if kernels else f"the kernels of {name}"
        say(f"compiled {what} ({seconds:.1f} s, {device})")
