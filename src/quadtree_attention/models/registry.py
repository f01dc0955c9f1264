# SPDX-License-Identifier: Apache-2.0
"""Registry of networks: names, construction, and loading of weights.

A name refers to a task, a class and the options that differ from the defaults of
the class. Importing this module imports neither torch nor timm; building a network imports its
dependencies, without timm for the matcher and the stereo network.

Example:
    >>> create("loftr_lite", attention="quadtree_b", topk=8).coarse_matching
    CoarseMatching(dual_softmax, temperature=0.1, threshold=0.2, border=2)
    >>> names(task="stereo")
    ['sttr', 'sttr_quadtree', 'sttr_quadtree_small']
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quadtree_attention import checks
from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.files import StrPath

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = Path(__file__).parents[1] / "weights"
# Packaged weights by network, or network.tag; the first of a task is its default
PRETRAINED = {
    "loftr_quadtree_small": WEIGHTS / "matcher.safetensors",
    "sttr_quadtree_small": WEIGHTS / "stereo.safetensors",
    "sttr_quadtree_small.free": WEIGHTS / "stereo-free.safetensors",
}
_QUADTREE = ("num_levels", "topk", "variant", "value_pyramid", "value_act", "backend")
_OF_A_CALL = ("device", "dtype", "backend")  # runtime options, not part of the architecture
_OF_THE_CLASSIFIER = ("num_classes", "global_pool", "drop_rate")  # no options of dense networks

_NARROW, _WIDE = (32, 64, 160, 256), (64, 128, 320, 512)
_SIZES = {  # blocks and channels per stage
    "b0": {"depths": (2, 2, 2, 2), "embed_dims": _NARROW},
    "b1": {"depths": (2, 2, 2, 2), "embed_dims": _WIDE},
    "b2": {"depths": (3, 4, 6, 3), "embed_dims": _WIDE},
    "b3": {"depths": (3, 4, 18, 3), "embed_dims": _WIDE},
    "b4": {"depths": (3, 8, 27, 3), "embed_dims": _WIDE},
}
BACKBONES: dict[str, dict[str, Any]] = {
    **{
        f"quadtree_{letter}_{size}": {"variant": letter.upper(), **options}
        for letter in "ab"
        for size, options in _SIZES.items()
    },
    "swin_tiny_quadtree_b": {  # Swin-T with quadtree attention in place of its shifted windows
        "layout": "swin",
        "depths": (2, 2, 6, 2),
        "embed_dims": (96, 192, 384, 768),
        "num_heads": (3, 6, 12, 24),
        "mlp_ratios": (4, 4, 4, 4),
        "value_pyramid": "mean",
    },
    "test_quadtree": {  # for tests, not listed
        "depths": (1, 1, 2, 1),
        "embed_dims": (8, 16, 24, 32),
        "num_heads": (1, 2, 3, 4),
        "mlp_ratios": (2, 2, 2, 2),
        "topk": 4,
    },
}
_LOFTR: dict[str, dict[str, Any]] = {
    "loftr": {"attention": "linear", "block": "loftr"},
    "loftr_lite": {"attention": "linear", "block": "loftr", "dims": (64, 98, 128)},
    "loftr_quadtree_indoor": {"attention": "quadtree_b", "topk": (32, 16)},
    "loftr_quadtree_outdoor": {"attention": "quadtree_b", "topk": (16, 8)},
    "loftr_quadtree_small": {
        "attention": "quadtree_b",
        "dims": (64, 96, 128),
        "num_heads": 4,
        "fine_heads": 4,
    },
}
_STTR: dict[str, dict[str, Any]] = {
    "sttr": {"attention": "full", "layout": "sttr", "position": "sine", "stride": 3},
    "sttr_quadtree": {"attention": "quadtree_b", "layout": "sttr_half"},
    "sttr_quadtree_small": {
        "attention": "quadtree_b",
        "dims": (32, 64, 96, 128),
        "dim": 96,
        "num_heads": 6,
        "num_layers": 4,
        "mlp_ratio": 2.0,
        "context": (32, 48, 64, 96),
    },
}
_DENSE = {  # by the start of the name, which a backbone follows: task and class
    "retinanet_": ("detect", "detection:RetinaNet"),
    "mask_rcnn_": ("detect", "detection:MaskRCNN"),
    "semfpn_": ("segment", "segmentation:SemanticFPN"),
}
_OLD_NAMES = {  # in cards before names were unique, by task
    ("match", "quadtree_indoor"): "loftr_quadtree_indoor",
    ("match", "quadtree_outdoor"): "loftr_quadtree_outdoor",
    ("match", "quadtree_small"): "loftr_quadtree_small",
    ("stereo", "quadtree_small"): "sttr_quadtree_small",
}


@dataclass(frozen=True)
class Spec:
    """Specification of a network.

    Args:
        task: Task of the network.
        network: Module of this package and class, "matcher:LoFTR".
        options: Options of the class that differ from its defaults.
        backbone: Name of the backbone, if the network has one.
    """

    task: str
    network: str
    options: Mapping[str, Any] = field(default_factory=dict)
    backbone: str | None = None

    def load(self) -> type["nn.Module"]:
        """The class."""
        module, name = self.network.split(":")
        return cast("type[nn.Module]", getattr(import_module(f"{__package__}.{module}"), name))


SPECS = {
    **{name: Spec("classify", "backbone:PyramidTransformer", o) for name, o in BACKBONES.items()},
    **{
        prefix + name: Spec(task, network, backbone=name)
        for prefix, (task, network) in _DENSE.items()
        for name in BACKBONES
    },
    **{name: Spec("match", "matcher:LoFTR", options) for name, options in _LOFTR.items()},
    **{name: Spec("stereo", "stereo:STTR", options) for name, options in _STTR.items()},
}


def names(task: str | None = None, *, pretrained: bool = False) -> list[str]:
    """Return the names of the networks that `create` builds, of one task or of all.

    Args:
        task: "classify", "detect", "segment", "match" or "stereo".
        pretrained: Instead the names of the weights that come with the package, `network` or
            `network.tag`.
    """
    checks.one_of(dict.fromkeys(spec.task for spec in SPECS.values()), task=task)
    return [
        name
        for name in (PRETRAINED if pretrained else SPECS)
        if task in (None, SPECS[name.partition(".")[0]].task) and not name.endswith("test_quadtree")
    ]


def create(name: str, pretrained: bool = False, **options: Any) -> "nn.Module":
    """Return a network by name, with random or packaged weights.

    Args:
        name: One of `names()`, or of `names(pretrained=True)` with `pretrained`.
        pretrained: Load the packaged weights of that name; nothing is downloaded.
        **options: Options of the class, which override the options of the name. Detectors and
            segmenters need `num_classes`, accept the options of their backbone, and load a trained
            backbone from `backbone_weights`. Their quadtree attention has `topk=32` and ReLU in a
            learned value pyramid, as in the official networks. With another `attention`, the
            quadtree options of the name are ignored.

    Raises:
        OptionError: The name or an option does not exist.
        CheckpointError: The weights do not exist or do not fit.

    Example:
        >>> model = create("mask_rcnn_test_quadtree", num_classes=3, attention="window")
        >>> type(model.backbone.body.stages[0].blocks[0].attn).__name__
        'WindowAttention'
    """
    if pretrained:
        return load(name if name in PRETRAINED else current_name(name), **options)
    name = current_name(name)
    spec = SPECS[name]
    weights = options.pop("backbone_weights", None) if spec.backbone else None
    _check_options(name, options)
    options = preset(name, options)
    try:
        if spec.task == "classify":
            spec.load()  # registers the name with timm
            return cast("nn.Module", import_module("timm").create_model(name, **options))
        if spec.backbone is None:
            return spec.load()(**options)
        own = {key: value for key, value in options.items() if key in _own_parameters(spec)}
        rest = {key: value for key, value in options.items() if key not in own}
        body = create(spec.backbone, num_classes=0, **rest)
        if weights is not None:
            from quadtree_attention.models.weights import fill_backbone

            fill_backbone(body, weights)
        return spec.load()(body, **own)
    except TypeError as error:
        raise OptionError(f"{name} cannot be built with {options}: {error}; change them") from error


def load(name_or_path: StrPath, *, task: str | None = None, **overrides: Any) -> "nn.Module":
    """Build the network of a weights file and load the weights.

    Args:
        name_or_path: A file written by `save_weights`, training or `quadtree convert`, or one of
            `names(pretrained=True)`. The card is not required. `last.ckpt` of a run
            requires the run's `best.safetensors` in the same folder.
        task: Raise an error for weights of another task.
        **overrides: Options that override the card, such as `topk` or `backend`. For other
            classes, call `reset_classifier` of a backbone afterwards.

    Raises:
        CheckpointError: The file cannot be read, is of another task, or does not fit its network.
        OptionError: The network has no such option.

    Example:
        >>> load("loftr_quadtree_small", topk=4).coarse_transformer.layers[0].attn.topk
        (4, 4)
    """
    return load_with_card(name_or_path, task=task, **overrides)[1]


def load_with_card(
    name_or_path: StrPath | None, *, task: str | None = None, **overrides: Any
) -> tuple[dict[str, Any], "nn.Module"]:
    """Return the complete card and the network of `load`; None: packaged weights of the task."""
    from quadtree_attention.models.topk import set_topk
    from quadtree_attention.models.weights import fill, read_card, read_checkpoint

    path = weights_path(name_or_path, task)
    described, tensors = path, None
    if path.suffix == ".ckpt" and path.with_name("best.safetensors").is_file():
        described = path.with_name("best.safetensors")  # weights of the same run
        found = read_checkpoint(path).items()
        tensors = {name[6:]: tensor for name, tensor in found if name.startswith("model.")}
    card = complete_card(read_card(described), path, task)
    try:
        network = create(card["model"], **{**card["kwargs"], **overrides})
        set_topk(network, card.get("topk", {}))
    except OptionError as error:
        if overrides:
            raise
        raise CheckpointError(f"the card of {path} does not fit this version: {error}") from error
    fill(network, path, tensors)
    return card, network


def weights_path(name_or_path: StrPath | None, task: str | None = None) -> Path:
    """Return the file of a name, a path, or None (the default of the task).

    Raises:
        CheckpointError: No weights of that name or task come with the package.
    """
    name, what = str(name_or_path), str(name_or_path)
    if name_or_path is None or name == "default":
        name, what = next(iter(names(task, pretrained=True)), ""), f"the task {task}"
    elif name not in PRETRAINED.keys() | SPECS.keys():
        return Path(name)
    if name not in PRETRAINED:
        raise CheckpointError(
            f"no weights of {what} come with the package, only those of {', '.join(PRETRAINED)}; "
            "pass the path of weights that quadtree train or quadtree convert has written"
        )
    if not (path := PRETRAINED[name]).is_file():
        raise CheckpointError(
            f"the weights of {name} are not installed: there is no file {path.name} in the "
            f"folder {WEIGHTS.name} of the package; pass other weights (--weights FILE), or "
            "install a version of quadtree-attention that has them"
        )
    return path


def current_name(name: str, task: str | None = None) -> str:
    """Return the current name; old names in cards are unique only within a task.

    Raises:
        OptionError: The name does not exist, or it was renamed.
    """
    if name in SPECS:
        return name
    today = {of: new for (of, old), new in _OLD_NAMES.items() if old == name}
    if task in today:
        return today[task]
    if today:
        choices = " or ".join(f"{new} (task {of})" for of, new in today.items())
        raise OptionError(f"the model {name!r} was renamed; pass {choices}")
    checks.known(name, names(task), "model")
    raise AssertionError  # a name that is listed is in SPECS


def preset(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a name, overridden by the given ones."""
    spec = SPECS[name]
    own = dict(spec.options)
    if spec.backbone is not None:
        own = {**SPECS[spec.backbone].options, "topk": 32}  # as the official ones
        both = {**own, **options}
        learned = "conv" if (both.get("variant") or "B") == "B" else "mean"
        if "conv" in (both.get("value_pyramid") or learned):
            own["value_act"] = "relu"
    if not str(options.get("attention", own.get("attention", "quadtree"))).startswith("quadtree"):
        own = {option: value for option, value in own.items() if option not in _QUADTREE}
    return {**own, **options}


def complete(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a network: given options, options of the name, defaults of the class.

    Runtime options (device, dtype, backend) are left out.

    Raises:
        OptionError: An option does not exist, or a required one is missing.
    """
    _check_options(name, options)
    full = {**_parameters(SPECS[name]), **preset(name, options)}
    if missing := [key for key, value in full.items() if value is inspect.Parameter.empty]:
        raise OptionError(f"{name} needs {', '.join(missing)}; pass it")
    return {option: value for option, value in full.items() if option not in _OF_A_CALL}


def complete_card(card: Mapping[str, Any], path: StrPath, task: str | None) -> dict[str, Any]:
    """Return the card with the current name of the network, all its options and its task.

    Raises:
        CheckpointError: The card is of another task, or its network cannot be built.
    """
    model = card["model"]
    old = " or ".join(of for of, name in _OLD_NAMES if name == model)
    found = SPECS[model].task if model in SPECS else card.get("task") or old
    if task is not None and found and task not in found.split(" or "):
        hint = ", which loads a backbone by --model.backbone_weights"
        raise CheckpointError(
            f"{path} holds weights for the task {found}, not for {task}; pass weights of quadtree "
            f"train {task}{hint if found == 'classify' and task in ('detect', 'segment') else ''}"
        )
    kwargs = {key: value for key, value in card["kwargs"].items() if key != "backbone_weights"}
    try:
        name = current_name(model, card.get("task") or task)
        kwargs = complete(name, kwargs)
    except OptionError as error:
        raise CheckpointError(f"the card of {path} does not fit this version: {error}") from error
    return {**card, "model": name, "kwargs": kwargs, "task": SPECS[name].task}


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    accepted = list(_parameters(SPECS[name]))
    for option in options:
        checks.known(option, accepted, f"an option of {name}")


def _own_parameters(spec: Spec) -> dict[str, Any]:
    """Return the options of the class with their defaults, without the backbone."""
    found = list(inspect.signature(spec.load()).parameters.values())
    return {option.name: option.default for option in found[spec.backbone is not None :]}


def _parameters(spec: Spec) -> dict[str, Any]:
    """Return the options of the class and of its backbone, with their defaults."""
    own = _own_parameters(spec)
    if spec.backbone is None:
        return own
    body = _own_parameters(SPECS[spec.backbone])
    return own | {key: value for key, value in body.items() if key not in _OF_THE_CLASSIFIER}
