# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate`: scores predictors, or predictions on disk, for all tasks."""

import json as jsonlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from quadtree_attention.cli.options import FILE, WEIGHTS, Option, option
from quadtree_attention.cli.output import command, exclusive, imported, say, say_json, tell
from quadtree_attention.errors import OptionError

HELP = """Evaluate trained models.

The network runs once and writes its predictions to disk (--save); scores are computed from these
files, and can be recomputed without the network (--predictions). Existing predictions of the same
weights, data and settings are reused. Unreadable items are listed on standard error, counted and
skipped. See quadtree evaluate TASK --help.
"""
CLASSIFY = """Measure the accuracy of a classifier on labelled images.

ROOT contains one folder per split with one folder per class (val/cat/1.jpg), or one npz file per
split. Classes of data and WEIGHTS are matched by name. A file of predictions also contains the true
labels: --predictions needs no data.

\b
Examples:
  quadtree evaluate classify runs/classify-imagenet-b2/best.safetensors --data imagenet
  quadtree evaluate classify b2.safetensors --data imagenet --size 288 --dtype bfloat16 --force
  quadtree evaluate classify b2.safetensors --data pets --split test --save pets.npz --strict
  quadtree evaluate classify --predictions pets.npz --json
"""
MATCH = """Evaluate matches against ground truth poses and homographies.

PAIRS (--data) lists pairs of images, one per line, in the format of SuperGlue: image0 image1
rotation0 rotation1 K0 K1 T_0to1 for a pose, or image0 image1 and 9 numbers of a homography. Without
--predictions the matcher runs first. --predictions scores a folder written by quadtree match
--pairs PAIRS --save OUT, or by another program in the same format: STEM0__STEM1.npz per pair, with
keypoints0, keypoints1 and confidence. A pair without a file counts as failed.

Reports AUC at 5, 10 and 20 degrees for poses and at 3, 5 and 10 pixels of corner error for
homographies, the median error, the precision and the number of matches. AUC is reported with two
estimators, since this choice can change it by more than the choice of matcher.

\b
Examples:
  quadtree evaluate match --data pairs.txt --images photos
  quadtree evaluate match --data graf.txt --images graf --predictions OUT --json
  quadtree evaluate match --data scannet_test_pairs_with_gt.txt --images scannet --pose-size 640x480
  quadtree evaluate match --data outdoor.txt --predictions OUT --epipolar 1e-4 --report scores.json
"""
STEREO = """Evaluate disparities on pairs with ground truth.

ROOT is a folder of pairs in any layout that quadtree train stereo reads: left/, right/ and
disparity/, Middlebury's, KITTI's or Scene Flow's, also nested. WEIGHTS defaults to the packaged
weights. --predictions may also be written by another program, as NAME.npy, .pfm or 16-bit .png.

Reports the mean error (EPE), the share of errors above 1, 2 and 3 pixels and above 3 pixels and
5 % (D1), over non-occluded and over all valid pixels, and the IoU of occlusion.

\b
Examples:
  quadtree evaluate stereo --data KITTI_2015 --save kitti
  quadtree evaluate stereo runs/stereo-sceneflow/best.safetensors --data SCENE_FLOW --json
  quadtree evaluate stereo --predictions OUT --data SCENE_FLOW --report scores.json
"""
DETECT = """Measure the average precision (AP) of a detector by COCO's rules.

ROOT contains images/val and annotations/instances_val.json, or COCO's own val2017 and
annotations/instances_val2017.json. Classes of data and WEIGHTS are matched by name. Results are
written in COCO's result format, with SAVE.settings.json next to them; --predictions scores such a
file of any program. Invalid annotations and images are listed on standard error and counted.

\b
Examples:
  quadtree evaluate detect runs/detect-coco-retinanet-b2/best.safetensors --data coco
  quadtree evaluate detect best.safetensors --data bccd --save bccd.json --shorter-side 640 --force
  quadtree evaluate detect --predictions bccd.json --data bccd --json
"""
SEGMENT = """Measure a segmenter: mIoU, IoU of every class, pixel accuracy.

Predicted label maps are written as PNG files; --predictions scores label maps of any program. ROOT
contains images/SPLIT, labels/SPLIT and classes.json, or is ADE20K.

\b
Examples:
  quadtree evaluate segment best.safetensors --data camvid11
  quadtree evaluate segment best.safetensors --data camvid11 --window 320 --save sliding --json
  quadtree evaluate segment --predictions sliding --data camvid11
"""
OPTIONS = (
    "data predictions save report size device dtype batch workers cluster strict force json debug"
)
RUNNING = ("weights", "save", "size", "device", "dtype", "batch", "workers", "cluster", "force")


OF_PAIRS = "Shorter side at which homographies are measured; 0: original size."
COMMANDS: dict[str, tuple[str, str, dict[str, Option]]] = {  # help, shared options, own options
    "classify": (CLASSIFY, "split", {}),
    "match": (
        MATCH,
        "threshold",
        {
            "images": option(
                FILE, "Folder of the images.", metavar="DIR", show_default="folder of PAIRS"
            ),
            "pose_pixels": option(float, "Inlier threshold of pose estimators, in pixels.", 0.5),
            "pose_size": option(
                str,
                "Image size that --pose-pixels refers to.",
                metavar="WxH",
                show_default="as given",
            ),
            "epipolar": option(
                float, "Squared epipolar distance of correct matches; outdoors 1e-4.", 5e-4
            ),
            "side": option(int, OF_PAIRS, 480),
        },
    ),
    "stereo": (
        STEREO,
        "max_disparity",
        {
            "layout": option(str, "Of ROOT: auto, folder, scenes, kitti2015, ...", "auto"),
            "split": option(str, "train, val, or all.", "all"),
        },
    ),
    "detect": (DETECT, "split shorter_side", {}),
    "segment": (SEGMENT, "split shorter_side window stride", {}),
}
READER = ("images", "layout")  # options of `open_source`
THRESHOLDS = ("pose_pixels", "pose_size", "epipolar", "side")  # options of the metric
PREDICTOR = ("threshold", "max_disparity", "shorter_side", "window", "stride")


def _evaluate(task: str, context: typer.Context) -> None:
    """Evaluates a task with the options of a command."""
    o = context.params

    def of(names: Sequence[str]) -> dict[str, Any]:
        return {name: o[name] for name in names if name in o}

    exclusive(context, "predictions", *of([*RUNNING, *PREDICTOR]))
    exclusive(context, "cluster", "workers")
    data = o["data"]
    if data is None and task == "classify":
        data = o["predictions"]
    if data is None:
        raise OptionError(
            f"evaluation needs data, got no --data ROOT; see quadtree evaluate {task} --help"
        )
    from quadtree_attention.files import write_whole
    from quadtree_attention.tasks.evaluation import evaluate
    from quadtree_attention.tasks.readers import summary

    imported()
    if o["report"] is not None:
        _check_report(o["report"])
    scores = evaluate(
        task,
        data=data,
        split=o.get("split", "val"),
        predictions=o["predictions"],
        strict=o["strict"],
        reader=of(READER),
        thresholds=of(THRESHOLDS),
        **of([*RUNNING, *PREDICTOR] if o["predictions"] is None else ()),
    )
    if scores.skipped:
        tell(f"skipped {len(scores.skipped)}: {summary(scores.skipped)}")
    if scores.missing:
        tell(f"{len(scores.missing)} without predictions: {summary(scores.missing)}")
    found = scores.to_dict()
    if o["report"] is not None:
        write_whole(o["report"], (jsonlib.dumps(found, indent=2) + "\n").encode())
    if o["json"]:
        say_json(found)
    else:
        say(scores.to_text())


def _check_report(path: Path) -> None:
    """Raise `OptionError` if it cannot be written, or would replace anything but a report."""
    from quadtree_attention.files import check_writable

    check_writable(path)
    try:
        old = jsonlib.loads(path.read_bytes()) if path.exists() else {"task": None, "mean": None}
    except ValueError:
        old = None
    if not (isinstance(old, dict) and {"task", "mean"} <= old.keys()):
        raise OptionError(f"{str(path)!r} exists and is no report; write to another name")


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name="evaluate", help=HELP)
    for task, (text, shared, own) in COMMANDS.items():
        own = {**own, "weights": WEIGHTS}
        command(group, task, partial(_evaluate, task), text, f"{OPTIONS} {shared}", own)
