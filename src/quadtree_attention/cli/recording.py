# SPDX-License-Identifier: Apache-2.0
"""Recording of networks on images, shared by `explore` and `attention`.

Importing this imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from quadtree_attention import checks
from quadtree_attention.cli.output import imported
from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.images import Array, to_image
from quadtree_attention.inspect import Record, record
from quadtree_attention.inspect.recorder import is_quadtree
from quadtree_attention.inspect.still import check_point
from quadtree_attention.models import registry
from quadtree_attention.models.backbone import PyramidTransformer
from quadtree_attention.models.weights import read_card
from quadtree_attention.tasks.contract import get_task

BACKBONE_SIZE = 640  # maximum of the longer side for backbones, in pixels
OCCLUDED = 0.5
TASKS = ("match", "stereo")  # whose weights come with the package


@dataclass(frozen=True)
class Seen:
    """Records of networks on the same images, and the result of the first network."""

    records: Mapping[str, Record]
    images: Sequence[Image.Image]
    found: Mapping[str, Any] = field(default_factory=dict)  # `matches` or `disparity`, for `show`


def task_of(weights: Path | None, task: str | None) -> str:
    """Return the task of weights, or the requested one.

    Raises:
        OptionError: Both are given and differ, or there are no packaged weights of the task.
    """
    checks.one_of(TASKS, task=task)
    if weights is None:
        return task or "match"
    path = registry.weights_path(weights)
    found = str(registry.complete_card(read_card(path), path, None)["task"])
    if task is not None and task != found:
        raise OptionError(f"{weights} holds weights for the task {found}, got --task {task}")
    return found


def look(o: Mapping[str, Any], inputs: Sequence[str], at: tuple[float, float] | None) -> Seen:
    """Run the networks of the options of a command on one image or two, and record them.

    Raises:
        OptionError: The networks are of several tasks, or take another number of images, or the
            point `at` is not in the first image.
        CheckpointError: The first network has no quadtree layers.
    """
    images = [to_image(name) for name in inputs]
    if at is not None:
        check_point(at, images[0])
    imported()
    weights = [o["weights"], *([o["beside"]] if o["beside"] else [])]
    tasks = [task_of(path, o["task"]) for path in weights]
    if len(set(tasks)) > 1:
        raise OptionError(
            f"compared networks must be for one task, got {', '.join(tasks)}; pass only one task"
        )
    most = 2 if tasks[0] in TASKS else 1
    least = 2 if tasks[0] == "stereo" else 1
    if not least <= len(images) <= most:
        wanted = f"{most} images" if least == most else "one image or two"
        wanted = "one image" if most == 1 else wanted
        raise OptionError(f"{weights[0] or tasks[0]} needs {wanted}, got {len(images)}")
    records: dict[str, Record] = {}
    found: dict[str, Any] = {}
    for number, path in enumerate(weights):
        checks.count(1, size=o["size"])
        run = _run_backbone if tasks[0] not in TASKS else _run_pair
        network, seen, result = run(tasks[0], path, images, o["size"], o["device"])
        if number == 0:
            found = result
            if not any(map(is_quadtree, network.modules())):
                raise CheckpointError(
                    f"{path} has no quadtree layers; pass weights with quadtree attention"
                )
        name = "packaged weights" if path is None else path.stem
        records[name if name not in records else f"{name} {number + 1}"] = seen
    return Seen(records, images, found)


def _run_pair(
    task: str, path: Path | None, images: Sequence[Image.Image], size: int | None, device: str
) -> tuple[torch.nn.Module, Record, dict[str, Any]]:
    """The matcher, of one image with itself, or the stereo network."""
    made = get_task(task).load("predictor")
    # One pass on the images as given, not on turned ones
    own = {"guided": "never"} if task == "match" else {}
    predictor = made.from_pretrained(path, size=size, device=device, **own)
    with record(predictor.network) as every:
        # Layers on maps of the images, not on windows around matches; see `record` for names
        chosen = [name for name in every if not name.startswith("fine_transformer")]
    with record(predictor.network, layers=chosen) as seen:
        result = predictor(images[0], images[-1])
    if len(images) == 1:
        return predictor.network, seen, {}
    if task == "match":
        points = result.keypoints0, result.keypoints1, result.confidence
        return predictor.network, seen, {"matches": points}
    disparity: Array = np.where(result.occlusion > OCCLUDED, np.nan, result.disparity)
    return predictor.network, seen, {"disparity": disparity}


def _run_backbone(
    task: str, path: Path | None, images: Sequence[Image.Image], size: int | None, device: str
) -> tuple[torch.nn.Module, Record, dict[str, Any]]:
    """The backbone of a classifier, detector or segmenter, on the whole image."""
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    predictor = get_task(task).load("predictor").from_pretrained(path, device=device)
    network = predictor.network
    body = next(m for m in network.modules() if isinstance(m, PyramidTransformer))
    image = images[0]
    scale = min(1.0, (size or BACKBONE_SIZE) / max(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
    pixels = (pixels - IMAGENET_DEFAULT_MEAN) / IMAGENET_DEFAULT_STD
    batch = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None].to(predictor.device)
    with torch.inference_mode(), record(body) as seen:
        body.forward_features(batch)
    return network, seen, {}


def point_of(text: str) -> tuple[float, float]:
    """Parses the point x,y of an option; raises `OptionError` if it is invalid."""
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--at is x,y in pixels of the first image, got {text!r}") from None
    return x, y


def patterns(text: str | None, records: Mapping[str, Record]) -> list[str] | None:
    """Names of layers of the first record that match comma-separated patterns."""
    if text is None:
        return None
    from fnmatch import fnmatchcase

    names = list(next(iter(records.values())))
    found: list[str] = []
    for pattern in filter(None, map(str.strip, text.split(","))):
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise OptionError(
                f"no attention layer matches {pattern!r}; choose from {', '.join(names)}"
            )
        found += [name for name in fitting if name not in found]
    return [name for name in names if name in found]
