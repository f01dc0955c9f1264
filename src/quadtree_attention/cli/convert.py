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
from quadtree_attention.cli.output import command, imported
from quadtree_attention.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from torch import Tensor, nn

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
LICENCE = "of the source checkpoint; see its authors"
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
class Request:
    """Options of the command."""

    checkpoint: Path
    save: Path
    model: str | None = None
    act: str | None = None
    topk: int | None = None
    num_classes: str = "auto"
    position: str | None = None
    force: bool = False

    def command(self) -> str:
        """The command line, without folders."""
        options = {"--model": self.model, "--act": self.act, "--topk": self.topk}
        options["--num-classes"] = None if self.num_classes == "auto" else self.num_classes
        options["--position"] = self.position
        words = ["quadtree", "convert", self.checkpoint.name, "--save", self.save.name]
        for name, value in options.items():
            words += [] if value is None else [name, str(value)]
        return shlex.join(words + ["--force"] * self.force)


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


def register(app: typer.Typer) -> None:
    command(app, "convert", run, HELP, "json debug", OWN)


def run(context: typer.Context) -> None:
    from quadtree_attention.models.weights import check_target, read_checkpoint, save_weights

    request = Request(**{name: context.params[name] for name in OWN})
    imported()
    # Checks for writing, before the slow part
    check_target(request.save, overwrite=request.force)
    state = read_checkpoint(request.checkpoint)
    if request.save.exists() and os.path.samefile(request.checkpoint, request.save):
        raise OptionError(f"--save must not be the checkpoint itself, got {str(request.save)!r}")
    converted = convert(state, request)
    card = save_weights(
        request.save, converted.tensors, _card(converted, request), overwrite=request.force
    )
    print(json.dumps(card, indent=2) if context.params["json"] else as_text(converted, request))


def convert(state: "Mapping[str, Tensor]", request: Request) -> Converted:
    """Converts the official tensors and checks all of them against our model."""
    from quadtree_attention.models import convert as converter
    from quadtree_attention.models.matcher_convert import is_official_matcher
    from quadtree_attention.models.registry import create
    from quadtree_attention.models.stereo_convert import is_official_stereo

    if is_official_matcher(state):
        return _convert_matcher(state, request)
    if is_official_stereo(state):
        return _convert_stereo(state, request)
    if not converter.is_official_backbone(state):
        raise CheckpointError(
            f"{request.checkpoint} has no tensors of an official backbone, such as "
            f"patch_embed1.proj.weight, nor of a matcher or STTR; it has "
            f"{', '.join([*state][:3])} and so on, {len(state)} in all; give a classification, "
            "detection, segmentation, matching or stereo checkpoint"
        )
    _check_without(request, "position", "a matcher", "a backbone")
    backbone, left_out = converter.split_backbone(state)
    tensors = converter.convert_backbone(backbone)
    name = converter.infer_name(tensors) if request.model is None else request.model
    options = converter.infer_options(tensors)
    has_classifier = options["num_classes"] > 0
    given = _given(request)
    options |= given
    if options["num_classes"] == 0:
        left_out += [key for key in tensors if key.startswith("head.")]
        tensors = {key: x for key, x in tensors.items() if not key.startswith("head.")}
    # Without assumed options, so that another variant is detected by its tensors
    model = create(name, device="meta", **{**given, "num_classes": options["num_classes"]})
    converter.check_fit(model, tensors)
    return Converted(name, options, tensors, _parameters(model), left_out, has_classifier)


def _convert_matcher(state: "Mapping[str, Tensor]", request: Request) -> Converted:
    from quadtree_attention.models.convert import check_fit
    from quadtree_attention.models.matcher_convert import convert_matcher
    from quadtree_attention.models.registry import create, current_name

    _check_without(request, "act", "a backbone", "a matcher")
    _check_without(request, "num_classes", "a backbone", "a matcher")
    tensors = convert_matcher(state)
    name = current_name(request.model or _matcher_name(tensors))
    options: dict[str, Any] = {"topk": request.topk, "position": request.position}
    options = {option: value for option, value in options.items() if value is not None}
    if "coarse_matching.bin_score" in tensors:
        options["matching"] = "optimal_transport"
    model = create(name, device="meta", **options)
    check_fit(model, tensors)
    return Converted(name, options, tensors, _parameters(model), [], task="match")


def _convert_stereo(state: "Mapping[str, Tensor]", request: Request) -> Converted:
    from quadtree_attention.models.convert import check_fit
    from quadtree_attention.models.registry import create, current_name
    from quadtree_attention.models.stereo_convert import convert_stereo

    for given, of in (("act", "a backbone"), ("num_classes", "a backbone"),
                       ("topk", "quadtree attention"), ("position", "a matcher")):  # fmt: skip
        _check_without(request, given, of, "STTR")
    tensors, left_out = convert_stereo(state)
    name = current_name(request.model or "sttr")
    model = create(name, device="meta")
    check_fit(model, tensors)
    return Converted(name, {}, tensors, _parameters(model), left_out, task="stereo")


def _matcher_name(tensors: "Mapping[str, Tensor]") -> str:
    from quadtree_attention.models.matcher_convert import infer_matcher

    try:
        return infer_matcher(tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{error} by --model") from error


def _parameters(model: "nn.Module") -> int:
    return sum(p.numel() for p in model.parameters())


def _check_without(request: Request, option: str, of: str, found: str) -> None:
    value, default = getattr(request, option), getattr(Request, option)
    if value != default:
        raise OptionError(
            f"--{option.replace('_', '-')} is for {of}, and {request.checkpoint} holds {found}, "
            f"got {value!r}; leave it out"
        )


def _given(request: Request) -> dict[str, Any]:
    """Options of the model given on the command line."""
    if not re.fullmatch(r"auto|\d{1,9}", request.num_classes):
        raise OptionError(
            f"--num-classes must be auto or a number, got {request.num_classes!r}; "
            "0 omits the classifier"
        )
    given = {
        "num_classes": None if request.num_classes == "auto" else int(request.num_classes),
        "topk": request.topk,
        "value_act": request.act,
    }
    return {name: value for name, value in given.items() if value is not None}


def _card(converted: Converted, request: Request) -> dict[str, Any]:
    from quadtree_attention.files import file_sha256

    return {
        "model": converted.model,
        "kwargs": converted.kwargs,
        **({} if converted.task is None else {"task": converted.task}),
        "parameters": converted.parameters,
        "source": {
            "file": request.checkpoint.name,
            "sha256": file_sha256(request.checkpoint),
            "tensors_left_out": len(converted.left_out),
            "left_out": _left_out(converted.left_out),
        },
        "command": request.command(),
        "licence": LICENCE,
    }


def as_text(converted: Converted, request: Request) -> str:
    known = "" if request.model else ", by its blocks and channels"
    rows = {
        "model": converted.model + known,
        "parameters": f"{converted.parameters:,} in {len(converted.tensors)} tensors",
    }
    if converted.task is None:
        rows |= _backbone_rows(converted, request)
    elif converted.task == "match":
        rows |= _matcher_rows(request)
    rows["left out"] = _left_out(converted.left_out)
    rows["written"] = f"{request.save} and {request.save.with_suffix('.json').name}"
    lines = [f"{name:11}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, "", *_usage(converted, request.save)])


def _backbone_rows(converted: Converted, request: Request) -> dict[str, str]:
    kwargs = converted.kwargs
    rows = {
        "num_classes": str(kwargs["num_classes"] or "0, no classifier"),
        "topk": f"{kwargs['topk']}, {_why(converted, request.topk, '--topk')}",
    }
    if "value_act" in kwargs:
        rows["value_act"] = f"{kwargs['value_act']}, {_why(converted, request.act, '--act')}"
    return rows


def _matcher_rows(request: Request) -> dict[str, str]:
    rows = {} if request.topk is None else {"topk": f"{request.topk}, as given by --topk"}
    why = "as given by --position"
    if request.position is None:
        why = "as in most checkpoints; not stored in the tensors, --position changes it"
    return rows | {"position": f"{request.position or 'fixed'}, {why}"}


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
    if converted.task == "match":
        return [
            "from quadtree_attention.tasks import Matcher",
            f"matches = Matcher.from_pretrained({str(output)!r})(image0, image1)",
        ]
    if converted.task == "stereo":
        return [
            "from quadtree_attention.tasks import StereoMatcher",
            f"found = StereoMatcher.from_pretrained({str(output)!r})(left, right)",
        ]
    result = "logits = model(images)"
    if not converted.kwargs["num_classes"]:
        result = "maps = model.forward_intermediates(images, intermediates_only=True)"
    return [
        "from quadtree_attention import models",
        f"model = models.load({str(output)!r}).eval()",
        f"{result}  # images: (batch, 3, y, x)",
    ]
