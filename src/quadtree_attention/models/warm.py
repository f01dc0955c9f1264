# SPDX-License-Identifier: Apache-2.0
"""Compilation of the kernels of a network before its first call."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from quadtree_attention import checks

SIZES = ((480, 640),)
_DETECTORS = ("RetinaNet", "MaskRCNN")
_DENSE = (*_DETECTORS, "SemanticFPN")  # networks whose training step needs targets
ODD = 37  # pixels added to a size, for maps with odd sides


def warmup(
    model: nn.Module,
    sizes: Sequence[tuple[int, int]] = SIZES,
    *,
    training: bool = False,
    progress: bool = False,
) -> int:
    """Compile the kernels of a network, so that its first call is as fast as later ones.

    On a GPU, Triton kernels are compiled in one thread per core, for each size and for one a few
    pixels larger; other sizes use the same kernels. On a CPU, the network runs once per size, which
    compiles the Numba kernels. Both cache compiled kernels on disk for later processes.

    Args:
        model: A network of the package, in the dtype of use; call this function under autocast
            if the network is used under autocast.
        sizes: (height, width) of images; for a range, the smallest, a middle and the largest one.
        training: Also compile for training steps.
        progress: Show a progress bar in a terminal.

    Returns:
        Number of kernels compiled on a GPU; 0 on a CPU.

    Example:
        >>> from quadtree_attention import models
        >>> models.warmup(models.create("quadtree_b_b0"), [(64, 64)])
        0
    """
    from tqdm import tqdm

    for size in sizes:
        checks.at_least(1, height=size[0], width=size[1])
    if next(model.parameters()).is_cuda:
        return _on_a_gpu(model, sizes, training, progress)
    for size in tqdm(sizes, desc="kernels", unit="size", disable=None if progress else True):
        run_once(model, size, training=training)
    return 0


def _on_a_gpu(
    model: nn.Module, sizes: Sequence[tuple[int, int]], training: bool, progress: bool
) -> int:
    from tqdm import tqdm

    from quadtree_attention.ops.warm import compile_launches, recorded

    every = [pair for size in sizes for pair in (size, (size[0] + ODD, size[1] + ODD))]
    found = {
        launch.variant: launch
        for size in every
        for launch in recorded(lambda size=size: run_once(model, size, training=training))  # type: ignore[misc]
    }
    hidden = None if progress else True
    with tqdm(total=len(found), desc="kernels", unit="kernel", disable=hidden) as bar:
        compile_launches(list(found.values()), done=bar.update)
    for size in every:  # kernels that depend on values which the recorder does not compute
        run_once(model, size, training=training)
    torch.cuda.synchronize()
    return len(found)


def run_once(model: nn.Module, size: tuple[int, int], *, training: bool = False) -> None:
    """Run a network on noise, for training with a backward pass. Its state is restored.

    The backward pass of a detector or segmenter covers its backbone only.
    """
    mode, kept = model.training, [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            if training:
                _train_once(model.train(), size)
            model.eval()
            with torch.inference_mode():
                model(_inputs(model, size))
    finally:
        model.train(mode)
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _train_once(model: Any, size: tuple[int, int]) -> None:
    kind = type(model).__name__
    with torch.enable_grad():
        if kind == "LoFTR":  # matches have no gradient
            results = model.confidence(model.encode(_inputs(model, size)))
        else:
            network = model.backbone if kind in _DENSE else model
            results = network(_inputs(network, size))
        totals = [x.float().sum() for x in _tensors(results) if x.requires_grad]
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.autograd.grad(torch.stack(totals).sum(), parameters, allow_unused=True)


def _inputs(model: nn.Module, size: tuple[int, int]) -> Any:
    """Return noise as input of a network."""
    parameter = next(model.parameters())

    def noise(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, *size, device=parameter.device, dtype=parameter.dtype)

    kind = type(model).__name__
    if kind in ("LoFTR", "STTR"):
        channels = 1 if kind == "LoFTR" else 3
        return {name: noise(1, channels) for name in ("image0", "image1")}
    return [noise(3)] if kind in _DETECTORS else noise(1, 3)


def _tensors(results: Any) -> list[torch.Tensor]:
    """Return all floating-point tensors in results."""
    if isinstance(results, torch.Tensor):
        return [results] if results.is_floating_point() else []
    if is_dataclass(results):
        results = [getattr(results, field.name) for field in fields(results)]
    if isinstance(results, dict):
        results = list(results.values())
    if isinstance(results, list | tuple):
        return [x for part in results for x in _tensors(part)]
    return []
