# SPDX-License-Identifier: Apache-2.0
"""Whole networks on a CPU: PyTorch beside ONNX Runtime with files of `quadtree export`.

The runtimes of a network are timed in turns, on the same images and with the same threads. Files
are exported first if `--work` does not hold them; their export is not timed here.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from benchmarks.measure import Call, inference
from benchmarks.suite import Work
from quadtree_attention import models
from quadtree_attention.export import to_onnx
from quadtree_attention.export.networks import exportable
from quadtree_attention.export.onnx import pictures

NETWORKS = {  # height and width of the images
    "loftr_quadtree_small": (480, 640),
    "sttr_quadtree_small": (480, 640),
    "quadtree_b_b0": (224, 224),
    "semfpn_quadtree_b_b0": (512, 512),
}
RUNTIMES = ("PyTorch", "ONNX Runtime", "ONNX Runtime fixed")
LIBRARIES = ("timm", "onnxruntime")


def plan(options: Namespace) -> list[list[Work]]:
    """Every network; its runtimes are one list."""
    more = {"folder": Path(options.folder)}
    return [
        [
            Work({"network": name, "image": list(NETWORKS[name]), "runtime": runtime}, "cpu", more)
            for runtime in options.runtimes
        ]
        for name in options.networks
    ]


def network_of(name: str) -> Any:
    """The network, with packaged weights if there are some."""
    torch.manual_seed(0)
    if name in models.names(pretrained=True):
        return models.load(name).eval()
    options = {"num_classes": 150} if name.startswith("semfpn") else {}
    return models.create(name, **options).eval()


def file_of(work: Work) -> Path:
    """The exported file of a row, made if it does not exist."""
    is_fixed = work["runtime"].endswith("fixed")
    height, width = work["image"]
    end = f"-{height}x{width}" if is_fixed else ""
    path: Path = work.more["folder"] / f"{work['network']}{end}.onnx"
    if not path.exists():
        to_onnx(network_of(work["network"]), path, fixed=(height, width) if is_fixed else None)
    return path


def prepare(work: Work) -> Call:
    """The call to time."""
    network = exportable(network_of(work["network"]))
    height, width = work["image"]
    images = pictures(((height, width),) * len(network.images), network.channels, 1, 0)
    if work["runtime"] == "PyTorch":
        threshold = () if network.threshold is None else (torch.tensor(network.threshold),)
        return inference(network, *images, *threshold)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        file_of(work), options, providers=["CPUExecutionProvider"]
    )
    feed = {name: image.numpy() for name, image in zip(network.images, images, strict=True)}
    return lambda: session.run(None, feed)


def values(work: Work) -> dict[str, Any]:
    """Size of the file."""
    if work["runtime"] == "PyTorch":
        return {}
    return {"file_mib": file_of(work).stat().st_size / 2**20}
