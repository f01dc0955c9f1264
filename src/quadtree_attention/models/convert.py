# SPDX-License-Identifier: Apache-2.0
"""Conversion of tensor names of the official implementation to ours.

The official lists of value branches run fine -> coarse, those of position encodings and level
weights coarse -> fine; ours all run coarse -> fine. Its 1x1 and 2x2 convolutions are linear layers
here, because maps are channels last and in tree order.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from quadtree_attention.checks import few
from quadtree_attention.errors import CheckpointError
from quadtree_attention.nn.renamed import with_new_names

Transform = Callable[[Tensor], Tensor]


_same = nn.Identity()


# Tensors with an unexpected shape are kept unchanged; `check_fit` reports them.
def _pointwise(x: Tensor) -> Tensor:
    """1x1 convolution (O, I, 1, 1) -> linear (O, I)"""
    return x.flatten(1) if x.shape[2:] == (1, 1) else x


def _children(x: Tensor) -> Tensor:
    """2x2 convolution of stride 2 (O, I, y, x) -> linear on children in tree order (O, y*x*I)"""
    return x.permute(0, 2, 3, 1).flatten(1) if x.shape[2:] == (2, 2) else x


# Official names of attention modules and blocks, and ours. {level} is the level
# of a value branch, counted from the coarsest.
_RULES: tuple[tuple[str, str, Transform], ...] = (
    (r"(q|k|v)_proj\.weight", r"\1_proj.weight", _pointwise),
    (r"(q|k|v)_proj\.bias", r"\1_proj.bias", _same),
    (r"proj\.(weight|bias)", r"proj.\1", _same),
    (r"py_att\.weight", "level_logits", _same),
    (r"py_att\.get_vs\.(\d+)\.(weight|bias)", r"lepe.\1.\2", _same),
    (r"value_branchs\.\d+\.0\.(weight|bias)", r"value_branches.{level}.reduce.norm_\1", _same),
    (r"value_branchs\.\d+\.2\.weight", "value_branches.{level}.reduce.weight", _children),
    (r"value_branchs\.\d+\.2\.bias", "value_branches.{level}.reduce.bias", _same),
    (r"value_branchs\.\d+\.3\.(weight|bias)", r"value_branches.{level}.mix.norm_\1", _same),
    (r"value_branchs\.\d+\.5\.weight", "value_branches.{level}.mix.weight", _pointwise),
    (r"value_branchs\.\d+\.5\.bias", "value_branches.{level}.mix.bias", _same),
    (r"norm(1|2)\.(weight|bias)", r"norm\1.\2", _same),
    (r"mlp\.fc(1|2)\.(weight|bias)", r"mlp.fc\1.\2", _same),
    (r"mlp\.dwconv\.dwconv\.(weight|bias)", r"mlp.dwconv.\1", _same),
)


_BLOCK = re.compile(r"block(\d+)\.(\d+)\.(.+)")
_AROUND_BLOCKS = re.compile(
    r"(?P<embed>patch_embed(?P<embed_stage>[1-9])\.(proj|norm)\.(weight|bias))"
    r"|(?P<norm>norm(?P<norm_stage>[1-9])\.(weight|bias))"
    r"|(?P<head>head\.(weight|bias))"
)


def is_official_backbone(state: Mapping[str, Tensor]) -> bool:
    """True if the names are of an official backbone, alone or inside a larger model."""
    return any(name.removeprefix("backbone.").startswith("patch_embed1.") for name in state)


def split_backbone(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of the backbone, and the names of all other tensors.

    Full detectors and segmenters have their backbone under `backbone.`; without this prefix, all
    tensors are assumed to be the backbone's.
    """
    inside = {
        name.removeprefix("backbone."): tensor
        for name, tensor in state.items()
        if name.startswith("backbone.")
    }
    if not inside:
        return dict(state), []
    return inside, [name for name in state if not name.startswith("backbone.")]


def convert_backbone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert an official classification, detection or segmentation backbone.

    If names start with `backbone.`, as in full detectors and segmenters, only these are converted.

    Args:
        state: Official state dict.

    Raises:
        CheckpointError: A name is not a tensor of an official backbone.
    """
    return convert_parts(
        split_backbone(state)[0],
        "backbone",
        _BLOCK,
        lambda stage, index: f"stages.{int(stage) - 1}.blocks.{index}.",
        convert_block,
        _around_blocks,
    )


def convert_parts(
    state: Mapping[str, Tensor],
    what: str,
    block: re.Pattern[str],
    prefix: Callable[[str, str], str],
    convert_inside: Callable[[Mapping[str, Tensor]], tuple[dict[str, Tensor], list[str]]],
    convert_around: Callable[[str], str | None],
) -> dict[str, Tensor]:
    """Convert an official network to our tensor names.

    Args:
        state: Official state dict.
        what: Name of the network for the error message.
        block: Pattern of names inside blocks: two groups that identify the block, and a name.
        prefix: Maps the two groups to the prefix of our names.
        convert_inside: Converts the tensors of a block; also returns unknown names.
        convert_around: Converts a name outside of blocks; None if it is unknown.

    Raises:
        CheckpointError: A name is not a tensor of such a network.
    """
    converted: dict[str, Tensor] = {}
    unknown: list[str] = []
    blocks: dict[str, tuple[re.Match[str], dict[str, Tensor]]] = {}
    for name, tensor in state.items():
        if inside := block.fullmatch(name):
            blocks.setdefault(name[: inside.start(3)], (inside, {}))[1][inside[3]] = tensor
        elif target := convert_around(name):
            converted[target] = tensor
        else:
            unknown.append(name)
    for start, (inside, tensors) in blocks.items():
        found, left = convert_inside(tensors)
        unknown += [start + name for name in left]
        converted |= {prefix(inside[1], inside[2]) + name: x for name, x in found.items()}
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors are not part of an official {what}: {', '.join(unknown)}; "
            "pass the state dict of one, such as the entry 'model' or 'state_dict' of its file"
        )
    return converted


_NARROW, _WIDE = (32, 64, 160, 256), (64, 128, 320, 512)
_OFFICIAL_SIZES = {  # by blocks and channels per stage
    ((2, 2, 2, 2), _NARROW): "b0",
    ((2, 2, 2, 2), _WIDE): "b1",
    ((3, 4, 6, 3), _WIDE): "b2",
    ((3, 4, 18, 3), _WIDE): "b3",
    ((3, 8, 27, 3), _WIDE): "b4",
}
_BLOCK_NORM = re.compile(r"stages\.(\d+)\.blocks\.(\d+)\.norm[12]\.(weight|bias)")


def infer_name(state: Mapping[str, Tensor]) -> str:
    """Infers the name of the model from tensors of `convert_backbone`.

    Depths are inferred from the block numbers, widths from the norms of all blocks, so that single
    tensors may be missing or have a wrong shape.

    Raises:
        CheckpointError: No official backbone has these depths and widths.
    """
    depths: dict[int, int] = {}
    widths: dict[int, Counter[int]] = {}
    for name, tensor in state.items():
        if match := _BLOCK_NORM.fullmatch(name):
            stage, block = int(match[1]), int(match[2])
            depths[stage] = max(depths.get(stage, 0), block + 1)
            widths.setdefault(stage, Counter())[tensor.numel()] += 1
    shape = (
        tuple(depths[stage] for stage in sorted(depths)),
        tuple(widths[stage].most_common(1)[0][0] for stage in sorted(widths)),
    )
    if shape not in _OFFICIAL_SIZES:
        known = ", ".join(f"{size} {d} x {w}" for (d, w), size in _OFFICIAL_SIZES.items())
        raise CheckpointError(
            f"no official backbone has the blocks {shape[0]} and channels {shape[1]} per stage; "
            f"known are {known}; pass the model name to see which tensors do not fit it"
        )
    letter = "b" if any(name.endswith(".level_logits") for name in state) else "a"
    return f"quadtree_{letter}_{_OFFICIAL_SIZES[shape]}"


def infer_options(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Infers the options of the model from tensors of `convert_backbone`.

    `num_classes` is the size of the classifier. The activation of the value branches and K cannot
    be inferred from tensors: classification used GELU and 8; detection and segmentation, without
    a classifier, ReLU and 32. Variant A has no value branches and gets no `value_act`.
    """
    head = [tensor for name, tensor in state.items() if name.startswith("head.")]
    options: dict[str, Any] = {
        "num_classes": head[0].shape[:1].numel() if head else 0,
        "topk": 8 if head else 32,
    }
    if any(".value_branches." in name for name in state):
        options["value_act"] = "gelu" if head else "relu"
    return options


def check_fit(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` with the first tensors of `state` that do not fit `model`."""
    expected, state = model.state_dict(), with_new_names(model, state)
    problems = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "mismatched": [
            f"{name} is {tuple(state[name].shape)}, must be {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in state and state[name].shape != tensor.shape
        ],
    }
    if any(problems.values()):
        found = "; ".join(
            f"{len(names)} {kind}: {few(names)}" for kind, names in problems.items() if names
        )
        raise CheckpointError(
            f"the checkpoint does not fit {type(model).__name__}: {found}; build the model the "
            "checkpoint was made for, with the same options (size, variant, num_classes, ...)"
        )


def _around_blocks(name: str) -> str | None:
    match = _AROUND_BLOCKS.fullmatch(name)
    if match is None:
        return None
    if match["head"]:
        return name
    leaf = name.split(".", 1)[1]
    if match["norm"]:
        return f"stages.{int(match['norm_stage']) - 1}.norm.{leaf}"
    stage = int(match["embed_stage"]) - 1
    return f"stages.{stage}.downsample.{leaf}" if stage else f"patch_embed.{leaf}"


def convert_block(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Convert one official attention module or block; also return unknown names.

    A block has its attention under `attn.`.
    """
    branches = {m[0] for name in state if (m := re.search(r"value_branchs\.\d+", name))}
    converted: dict[str, Tensor] = {}
    unknown: list[str] = []
    for name, tensor in state.items():
        prefix, leaf = ("attn.", name[5:]) if name.startswith("attn.") else ("", name)
        for pattern, target, transform in _RULES:
            if match := re.fullmatch(pattern, leaf):
                found = re.search(r"value_branchs\.(\d+)", leaf)
                level = len(branches) - 1 - int(found[1]) if found else 0
                converted[prefix + match.expand(target).format(level=level)] = transform(tensor)
                break
        else:
            unknown.append(name)
    return converted, unknown
