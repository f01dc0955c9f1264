# SPDX-License-Identifier: Apache-2.0
"""`quadtree calibrate`: chooses the smallest K that covers a share of full attention."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quadtree_attention import checks
from quadtree_attention.cli.options import FILE, TEXT, option
from quadtree_attention.cli.output import say, say_json, written
from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.contract import table

if TYPE_CHECKING:
    from quadtree_attention.tasks.predictor import Predictor

HELP = """Choose K per layer and level by the share of full attention inside the selected cells.

The network runs on the images of a folder. For every layer and level the smallest K is chosen whose
cells cover --mass of full attention's probability (the softmax of the same queries over all keys),
as a mean over queries, heads and images. With several levels with a selection, the loss is divided
among them. A table is printed, --out draws the curves, and --save writes the
weights with a card that contains K, which every command and `models.load` then use.

The default network is the packaged matcher, or with --task stereo the packaged stereo network.
A matcher gets each image of the folder with the next one, by name; a stereo network gets pairs
named as for quadtree stereo, left and right; other networks get single images.

\b
Examples:
  quadtree calibrate --images photos --mass 0.95
  quadtree calibrate --images photos --mass 0.9 --out curves.png --save fast.safetensors
  quadtree match a.jpg b.jpg --weights fast.safetensors
  quadtree calibrate --images pairs --mass 0.95 --task stereo --json > k.json
"""
OPTIONS = "weights size device force json debug"
OWN = {
    "images": option(Path, "Folder of images.", ..., metavar="DIR", show_default=False),
    "mass": option(float, "Share of the attention, in (0, 1].", 0.95, metavar="X"),
    "samples": option(int, "Maximum number of images or pairs.", 8, "--max", metavar="N"),
    "out": option(FILE, "Write a picture of the curves, .png or .jpg.", metavar="FILE"),
    "save": option(FILE, "Write weights, .safetensors.", metavar="FILE"),
    "task": option(
        TEXT, "match or stereo.", metavar="TASK", show_default="task of the weights, else match"
    ),
}


def run(context: typer.Context) -> None:
    from quadtree_attention.cli.output import imported
    from quadtree_attention.cli.predict import check_targets
    from quadtree_attention.cli.recording import task_of
    from quadtree_attention.images import images_inside
    from quadtree_attention.inspect import calibrate_topk
    from quadtree_attention.models.topk import set_topk
    from quadtree_attention.models.weights import check_target, save_weights
    from quadtree_attention.tasks.contract import get_task

    o = context.params
    checks.at_least(1, max=o["samples"])
    if not 0 < o["mass"] <= 1:
        raise OptionError(f"--mass must be in (0, 1], got {o['mass']}; 0.95 is usual")
    if o["save"] is not None:
        check_target(o["save"], overwrite=o["force"])
    images = images_inside(o["images"])
    check_targets([o["out"]], [o["save"]], images)
    task = task_of(o["weights"], o["task"])
    groups = _grouped(task, images, o["images"])[: o["samples"]]
    load = get_task(task).load("predictor").from_pretrained
    predictor = load(o["weights"], device=o["device"], size=o["size"])
    imported()
    items = [_input(predictor, task, group) for group in groups]
    found = calibrate_topk(predictor.network, items, mass=o["mass"], progress=True)
    if o["out"] is not None:
        found.draw(o["out"])
    if o["save"] is not None:
        set_topk(predictor.network, found)
        card = {key: value for key, value in predictor.card.items() if key not in _RENEWED}
        card |= {"topk": {name: list(topk) for name, topk in found.items()}}
        card |= {"calibrated": {"mass": found.target, "images": len(items)}}
        tensors = predictor.network.state_dict()
        save_weights(o["save"], tensors, card, overwrite=o["force"])
    files = [str(path) for path in (o["out"], o["save"]) if path is not None]
    if o["json"]:
        say_json(found.to_dict() | {"written": files})
        return
    rows = {"images": str(len(items)), "written": written(files)}
    say(found.to_text() + "\n" + table({k: v for k, v in rows.items() if v}))


_RENEWED = ("sha256", "tensors", "version")  # entries of a card that are recomputed


def _grouped(task: str, paths: list[str], folder: Path) -> list[tuple[str, ...]]:
    """The images of every sample."""
    if task == "stereo":
        from quadtree_attention.cli.stereo import pair_up

        pairs, _ = pair_up(paths, paths)
        if not pairs:
            raise OptionError(f"{folder} has no pairs, named as left and right; rename the images")
        return list(pairs.values())
    if task == "match":
        if len(paths) < 2:
            raise OptionError(f"matching needs two images, {folder} has only one; add another")
        return list(pairwise(paths))
    return [(path,) for path in paths]


def _input(predictor: "Predictor[Any]", task: str, images: tuple[str, ...]) -> Any:
    """Return the input of the network."""
    prepared = predictor.preprocess(*images)
    tensors = predictor.stack([prepared])
    if len(tensors) == 2:
        return {f"image{i}": tensor for i, tensor in enumerate(tensors)}
    if task == "detect":
        return [tensors[0][0].float() / 255]
    if task == "segment":
        from quadtree_attention.tasks.segment.augment import normalised

        return normalised(tensors[0])
    return tensors[0]
