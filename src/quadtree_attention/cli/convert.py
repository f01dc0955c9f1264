# SPDX-License-Identifier: Apache-2.0
"""`quadtree convert`: converts official checkpoints to weights of this package."""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quadtree_attention.cli.options import INT, TEXT, argument, flag, option
from quadtree_attention.cli.output import imported
from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.tasks.contract import table

if TYPE_CHECKING:
    from torch import Tensor

HELP = """Convert an official checkpoint to weights of this package.

Reads checkpoints of classifiers, of detectors and segmenters (only the backbone is converted), of
matchers (LoFTR and its quadtree variant) and of stereo networks (STTR). Code in the file is never
executed, and every tensor of the backbone, matcher or stereo network is accounted for. Writes
SAVE.safetensors and its card SAVE.json.

\b
Examples:
  quadtree convert quadtree_b2.pth --save b2.safetensors
  quadtree convert retinanet.pth --save b1_det.safetensors --json
  quadtree convert mine.pth --save mine.safetensors --model quadtree_b_b2 --act gelu --topk 16
  quadtree convert quadtree_b2.pth --save b2_features.safetensors --num-classes 0 --force
  quadtree convert indoor.ckpt --save indoor.safetensors --model loftr_quadtree_indoor
  quadtree convert sceneflow_pretrained_model.pth.tar --save sttr.safetensors
"""
Options = Mapping[str, Any]  # of the command, by name
LICENCE = "of the source checkpoint; see its authors"
OPTIONS = "json debug"
OWN = {
    "checkpoint": argument(
        Path, "CHECKPOINT", "Official .pth, .pt, .ckpt or .safetensors file.", ...
    ),
    "save": option(Path, "Write weights, .safetensors.", ..., metavar="FILE"),
    "model": option(TEXT, "Name of the model, checked.", show_default="inferred from tensors"),
    "act": option(
        TEXT,
        "Activation of the value branches, gelu or relu.",
        show_default="gelu with a classifier, else relu",
    ),
    "topk": option(INT, "Cells kept per query.", show_default="8 with a classifier, else 32"),
    "num_classes": option(str, "auto, or 0 to omit the classifier.", "auto"),
    "position": option(
        TEXT,
        "Position encoding of a matcher, fixed, or legacy for some old ones.",
        show_default="fixed",
    ),
    "force": flag("force", "Overwrite existing files."),
}


@dataclass(frozen=True)
class Converted:
    """Converted tensors, and a record of all other tensors of the checkpoint."""

    model: str
    kwargs: dict[str, Any]
    tensors: "dict[str, Tensor]"
    parameters: int
    left_out: list[str]
    has_classifier: bool = False
    task: str | None = None


def run(context: typer.Context) -> None:
    from quadtree_attention.models.weights import check_target, read_checkpoint, save_weights

    o = context.params
    imported()
    # Checks for writing, before the slow part
    check_target(o["save"], overwrite=o["force"])
    state = read_checkpoint(o["checkpoint"])
    if o["save"].exists() and os.path.samefile(o["checkpoint"], o["save"]):
        raise OptionError(f"--save must not be the checkpoint itself, got {str(o['save'])!r}")
    converted = convert(state, o)
    card = save_weights(o["save"], converted.tensors, _card(converted, o), overwrite=o["force"])
    print(json.dumps(card, indent=2) if o["json"] else as_text(converted, o))


def convert(state: "Mapping[str, Tensor]", o: Options) -> Converted:
    """Convert the official tensors and check all of them against our model."""
    from quadtree_attention.models import convert as converter
    from quadtree_attention.models.matcher_convert import is_official_matcher
    from quadtree_attention.models.stereo_convert import is_official_stereo

    if is_official_matcher(state):
        return _convert_matcher(state, o)
    if is_official_stereo(state):
        return _convert_stereo(state, o)
    if not converter.is_official_backbone(state):
        raise CheckpointError(
            f"{o['checkpoint']} has no tensors of an official backbone, such as "
            f"patch_embed1.proj.weight, nor of a matcher or STTR; it has "
            f"{', '.join([*state][:3])} and so on, {len(state)} in all; give a classification, "
            "detection, segmentation, matching or stereo checkpoint"
        )
    _check_without(o, "a backbone", position="a matcher")
    backbone, left_out = converter.split_backbone(state)
    tensors = converter.convert_backbone(backbone)
    name = converter.infer_name(tensors) if o["model"] is None else o["model"]
    options = converter.infer_options(tensors)
    has_classifier = options["num_classes"] > 0
    given = _given(o)
    options |= given
    if options["num_classes"] == 0:
        left_out += [key for key in tensors if key.startswith("head.")]
        tensors = {key: x for key, x in tensors.items() if not key.startswith("head.")}
    # Without assumed options, so that another variant is detected by its tensors
    made = {**given, "num_classes": options["num_classes"]}
    parameters = _checked_parameters(name, made, tensors)
    return Converted(name, options, tensors, parameters, left_out, has_classifier)


def _convert_matcher(state: "Mapping[str, Tensor]", o: Options) -> Converted:
    from quadtree_attention.models.matcher_convert import convert_matcher, infer_matcher
    from quadtree_attention.models.registry import current_name

    _check_without(o, "a matcher", act="a backbone", num_classes="a backbone")
    tensors = convert_matcher(state)
    try:
        name = current_name(o["model"] or infer_matcher(tensors))
    except CheckpointError as error:
        raise CheckpointError(f"{error} by --model") from error
    options = {key: o[key] for key in ("topk", "position") if o[key] is not None}
    if "coarse_matching.bin_score" in tensors:
        options["matching"] = "optimal_transport"
    parameters = _checked_parameters(name, options, tensors)
    return Converted(name, options, tensors, parameters, [], task="match")


def _convert_stereo(state: "Mapping[str, Tensor]", o: Options) -> Converted:
    from quadtree_attention.models.registry import current_name
    from quadtree_attention.models.stereo_convert import convert_stereo

    backbone = dict.fromkeys(("act", "num_classes"), "a backbone")
    _check_without(o, "STTR", **backbone, topk="quadtree attention", position="a matcher")
    tensors, left_out = convert_stereo(state)
    name = current_name(o["model"] or "sttr")
    return Converted(
        name, {}, tensors, _checked_parameters(name, {}, tensors), left_out, task="stereo"
    )


def _checked_parameters(name: str, options: Options, tensors: "Mapping[str, Tensor]") -> int:
    """Number of parameters of a network, whose tensors these must be."""
    from quadtree_attention.models.convert import check_fit
    from quadtree_attention.models.registry import create

    model = create(name, device="meta", **options)
    check_fit(model, tensors)
    return sum(p.numel() for p in model.parameters())


def _check_without(o: Options, found: str, **owners: str) -> None:
    """Raise `OptionError` for options of other checkpoints than the one `found`."""
    for name, of in owners.items():
        if o[name] != OWN[name][1]:
            raise OptionError(
                f"--{name.replace('_', '-')} is for {of}, and {o['checkpoint']} holds {found}, "
                f"got {o[name]!r}; leave it out"
            )


def _given(o: Options) -> dict[str, Any]:
    """Options of the model given on the command line."""
    count = o["num_classes"]
    if not re.fullmatch(r"auto|\d{1,9}", count):
        raise OptionError(
            f"--num-classes must be auto or a number, got {count!r}; 0 omits the classifier"
        )
    given = {"num_classes": None if count == "auto" else int(count)}
    given |= {"topk": o["topk"], "value_act": o["act"]}
    return {name: value for name, value in given.items() if value is not None}


def _card(converted: Converted, o: Options) -> dict[str, Any]:
    from quadtree_attention.files import file_sha256

    words = ["quadtree", "convert", o["checkpoint"].name, "--save", o["save"].name]  # no folders
    for name in ("model", "act", "topk", "num_classes", "position"):
        given = o[name] != OWN[name][1]
        words += [f"--{name.replace('_', '-')}", str(o[name])] if given else []
    return {
        "model": converted.model,
        "kwargs": converted.kwargs,
        **({} if converted.task is None else {"task": converted.task}),
        "parameters": converted.parameters,
        "source": {
            "file": o["checkpoint"].name,
            "sha256": file_sha256(o["checkpoint"]),
            "tensors_left_out": len(converted.left_out),
            "left_out": _left_out(converted.left_out),
        },
        "command": shlex.join(words + ["--force"] * o["force"]),
        "licence": LICENCE,
    }


def as_text(converted: Converted, o: Options) -> str:
    kwargs, save = converted.kwargs, o["save"]
    rows = {
        "model": converted.model + ("" if o["model"] else ", by its blocks and channels"),
        "parameters": f"{converted.parameters:,} in {len(converted.tensors)} tensors",
    }
    if converted.task is None:
        rows["num_classes"] = str(kwargs["num_classes"] or "0, no classifier")
        for name, given in (("topk", "topk"), ("value_act", "act")):
            if name in kwargs:
                rows[name] = f"{kwargs[name]}, {_why(converted, o[given], f'--{given}')}"
    elif converted.task == "match":
        rows |= {} if o["topk"] is None else {"topk": f"{o['topk']}, as given by --topk"}
        why = "as given by --position"
        if o["position"] is None:
            why = "as in most checkpoints; not stored in the tensors, --position changes it"
        rows["position"] = f"{o['position'] or 'fixed'}, {why}"
    rows["left out"] = _left_out(converted.left_out)
    rows["written"] = f"{save} and {save.with_suffix('.json').name}"
    return table(rows) + "\n\n" + "\n".join(_usage(converted, save))


def _why(converted: Converted, given: object, option: str) -> str:
    if given is not None:
        return f"as given by {option}"
    kind = "with" if converted.has_classifier else "without"
    return f"as for checkpoints {kind} a classifier; not stored in the tensors, {option} changes it"


def _left_out(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    parts = dict.fromkeys(name.split(".")[0] for name in names)
    return f"{len(names)} tensors of {', '.join(parts)}"


def _usage(converted: Converted, output: Path) -> list[str]:
    name, call = {
        "match": ("Matcher", "matches = {}(image0, image1)"),
        "stereo": ("StereoMatcher", "found = {}(left, right)"),
    }.get(converted.task or "", ("", ""))
    if name:
        made = call.format(f"{name}.from_pretrained({str(output)!r})")
        return [f"from quadtree_attention.tasks import {name}", made]
    result = "logits = model(images)"
    if not converted.kwargs["num_classes"]:
        result = "maps = model.forward_intermediates(images, intermediates_only=True)"
    return [
        "from quadtree_attention import models",
        f"model = models.load({str(output)!r}).eval()",
        f"{result}  # images: (batch, 3, y, x)",
    ]
