# SPDX-License-Identifier: Apache-2.0
"""`quadtree export`: whole networks as ONNX files."""

import re
from pathlib import Path
from typing import Any

import typer

from quadtree_attention import checks
from quadtree_attention.cli.options import FLOAT, TEXT, argument, flag, option
from quadtree_attention.cli.output import imported, say, say_json
from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.contract import NAMES, get_task, table

HELP = """Export a whole network to an ONNX file, for ONNX Runtime and other runtimes.

TASK is match, stereo, classify, detect or segment. Matching and stereo have packaged weights; the
others need --weights. Inputs are images with values in [0, 1], of any size, in batches of any size
(detectors: one image); the score threshold of matchers and detectors is an optional input. --fixed
sets the size of all images, for runtimes without dynamic sizes, with batch size 1.

The file contains the task, the classes and the preprocessing as metadata. It is compared with
PyTorch by ONNX Runtime at three other sizes (--no-check omits this), and written only if they
agree. An export takes up to a minute. It needs pip install 'quadtree-attention[export]'.

\b
Examples:
  quadtree export match --save matcher.onnx
  quadtree export stereo --save stereo.onnx --fixed 480x640
  quadtree export detect --weights detector.safetensors --save detector.onnx --threshold 0.3
"""
OPTIONS = "weights size shorter_side json debug"
OWN = {
    "task": argument(str, "TASK", "match, stereo, classify, detect or segment.", ...),
    "save": option(Path, "File to write, .onnx.", ..., metavar="FILE", show_default=False),
    "fixed": option(
        TEXT, "Fixed height x width of images.", metavar="HxW", show_default="any size"
    ),
    "threshold": option(
        FLOAT, "Default of the score threshold.", metavar="X", show_default="as of the task"
    ),
    "no_check": flag("no-check", "Do not compare the file with PyTorch."),
}


def run(context: typer.Context) -> None:
    o = context.params
    checks.known(o["task"], NAMES, "TASK")
    fixed: tuple[int, int] | None = None
    if o["fixed"] is not None:
        found = re.fullmatch(r"(\d+)x(\d+)", o["fixed"])
        if found is None:
            raise OptionError(
                f"--fixed must be like 480x640, got {o['fixed']!r}; pass height x width"
            )
        fixed = int(found[1]), int(found[2])
    if o["save"].suffix != ".onnx":
        raise OptionError(f"--save must end in .onnx, got {o['save']}; rename the file")

    from quadtree_attention.export.onnx import summary, to_onnx
    from quadtree_attention.files import check_writable

    check_writable(o["save"], *([o["weights"]] if o["weights"] else []))
    predictor_class = get_task(o["task"]).load("predictor")
    given = (name for name in ("threshold", "shorter_side") if o[name] is not None)
    own: dict[str, Any] = {name: o[name] for name in given}
    for name in own:
        if name not in checks.keywords(predictor_class.__init__):
            raise OptionError(
                f"--{name.replace('_', '-')} is no option of {o['task']}, got {own[name]}; "
                "leave it out"
            )
    predictor = predictor_class.from_pretrained(o["weights"], device="cpu", size=o["size"], **own)
    imported()
    exported = to_onnx(predictor, o["save"], fixed=fixed, check=not o["no_check"], progress=True)
    if o["json"]:
        say_json(exported.to_dict())
    else:
        say(table(summary(exported)))
