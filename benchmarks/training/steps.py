# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of the training steps of a comparison, one variant after the other."""

import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.measure import Call, cuda_peak_mib, measure, release_memory, use_threads
from benchmarks.result import ResultFile, ResultFileError, Row, describe
from benchmarks.suite import Work, measured, one_line
from benchmarks.training.comparison import Comparison, steps_of
from benchmarks.training.runs import tell
from quadtree_attention.tasks.training.recipe import Recipe

LIBRARIES = ("timm", "pytorch_lightning")
PRECISIONS = {"32-true": False, "bf16-mixed": True}  # whether forward is in bfloat16


def measure_all(options: Namespace, argv: Sequence[str]) -> int:
    """Measures a training step of every variant in place of earlier rows; 1 if one failed."""
    use_threads(options.threads)
    kind = "memory" if options.memory_only else "step"
    results = ResultFile(options.out, options.comparison.kind, grows=True)
    if kind == "memory":
        there = {name for name, row in steps_of(results.read()).items() if "values" in row}
        if unknown := [name for name in options.recipes if name not in there]:
            raise ResultFileError(f"{options.out} has no speed of {', '.join(unknown)}; measure it")
    first = next(iter(options.recipes.values()))  # variants differ in the attention
    settings = _settings(first, options.extra)
    results.begin(describe(argv, options, libraries=LIBRARIES, **settings))
    failed = False
    for i, name in enumerate(options.recipes, start=1):
        (row,) = measured(sys.modules[__name__], [Work({"recipe": name}, options.device)], options)
        row["kind"] = kind
        release_memory(options.device)
        results.add(row, replaces=partial(_replaces, row))
        tell(f"[{i}/{len(options.recipes)}] {one_line(row)}")
        failed = failed or "error" in row
    print(f"written: {options.out}")
    return 1 if failed else 0


def _settings(recipe: Recipe, extra: Sequence[str]) -> dict[str, Any]:
    """What a step is of: as the recipe says, or options on top of it."""
    words = " ".join(extra).replace("=", " ").split()
    given = dict(zip(words[::2], words[1::2], strict=False))
    keys = ("batch_size", "image_size", "height", "width")
    data = {key: given.get(f"--data.{key}", recipe.settings["data"].get(key)) for key in keys}
    sides = [data["height"] or data["image_size"], data["width"] or data["image_size"]]
    image = {"image": [int(side) for side in sides]} if all(sides) else {}
    return {"batch": int(data["batch_size"]), "precision": precision_of(recipe), **image}


def _replaces(new: Row, row: Row) -> bool:
    """Whether a row is measured again; a new speed replaces the memory, too."""
    kinds = ("memory",) if new["kind"] == "memory" else ("step", "memory")
    return row["kind"] in kinds and row["case"] == new["case"]


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """Speed and memory of a training step, or memory alone."""
    cuda = options.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    step, record, counts = training_step(options.recipes[work["recipe"]], options)
    peak = {"peak_mib": cuda_peak_mib(step, before) if cuda else None}
    if options.memory_only:
        return peak
    record()
    (timing,) = measure(step, device=options.device, seconds=options.seconds_per_row)
    return counts | timing | peak


def training_step(
    recipe: Recipe, options: Namespace
) -> tuple[Call, Callable[[], None], dict[str, int]]:
    """Forward, losses, backward, clipping and a step of AdamW on one batch, on the device already.

    Returns:
        The step; a call after which forward and backward are replayed from a CUDA graph, if the
        recipe asks for it; and counts of the model.
    """
    from timm.optim import create_optimizer_v2

    from quadtree_attention.tasks.training.run import prepare

    comparison: Comparison = options.comparison
    device = torch.device(options.device)
    arguments = ["--config", str(recipe.path), "--variant", *recipe.variant]
    arguments += ["--trainer.accelerator", "cpu", *comparison.step]
    run: Any = prepare(comparison.task, [*arguments, *options.data_options, *options.extra])
    data, module = run.datamodule, run.model
    counts = _counts(module.model, comparison, recipe)
    module.to(device).train()
    data.setup("fit")
    batch = data.transfer_batch_to_device(next(iter(data.train_dataloader())), device, 0)
    batch = data.on_after_batch_transfer(batch, 0)
    optimizer = create_optimizer_v2(module.model, opt="adamw", lr=1e-5, weight_decay=0.05)
    half = PRECISIONS[precision_of(recipe)]
    clip = recipe.settings["trainer"].get("gradient_clip_val") or float("inf")
    warnings.filterwarnings("ignore", message=".*self.log")  # there is no trainer

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = module.training_step(batch, batch_idx=1)  # 0 would synchronize to check the loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.model.parameters(), clip)
        optimizer.step()

    def record() -> None:
        if recipe.settings["model"].get("cuda_graph", False) and device.type == "cuda":
            with torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False):
                torch.cuda.make_graphed_callables(module.model, (batch["images"],))

    return step, record, counts


def _counts(model: Any, comparison: Comparison, recipe: Recipe) -> dict[str, int]:
    """Parameters, and multiply-accumulates where the table shows them."""
    if not any(source == "step.macs" for _, source, _ in comparison.columns):
        return {"params": sum(parameter.numel() for parameter in model.parameters())}
    from benchmarks.speed.counts import count
    from quadtree_attention import use_backend

    side = recipe.settings["data"]["image_size"]
    with use_backend("cpu"):  # whose operations have formulas
        counted = count(model, (side, side))
    return {key: counted[key] for key in ("params", "macs")}


def precision_of(recipe: Recipe) -> str:
    return recipe.settings["trainer"].get("precision", "32-true")
