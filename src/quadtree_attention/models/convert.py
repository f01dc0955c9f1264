# SPDX-License-Identifier: Apache-2.0
"""From the tensor names of the official implementation to ours.

The official lists of value branches run fine -> coarse, those of position encodings and level
weights coarse -> fine; ours all run coarse -> fine. Its 1x1 and 2x2 convolutions are linear layers
here, because our maps are channels last and in tree order.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from quadtree_attention.errors import CheckpointError

Transform = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


# Another shape than that of the official layer stays as it is, for `check_fit` to name.
def _pointwise(x: Tensor) -> Tensor:
    """1x1 convolution (O, I, 1, 1) -> linear (O, I)"""
    return x.flatten(1) if x.shape[2:] == (1, 1) else x


def _children(x: Tensor) -> Tensor:
    """2x2 convolution of stride 2 (O, I, y, x) -> linear on children in tree order (O, y*x*I)"""
    return x.permute(0, 2, 3, 1).flatten(1) if x.shape[2:] == (2, 2) else x


# Every official name of an attention module or block, and what it becomes. {level} is the level
# of a value branch counted from the coarsest.
_RULES: tuple[tuple[str, str, Transform], ...] = (
    (r"(q|k|v)_proj\.weight", r"\1_proj.weight", _pointwise),
    (r"(q|k|v)_proj\.bias", r"\1_proj.bias", _same),
    (r"proj\.(weight|bias)", r"proj.\1", _same),
    (r"py_att\.weight", "level_logits", _same),
    (r"py_att\.get_vs\.(\d+)\.(weight|bias)", r"lepe.\1.conv.\2", _same),
    (r"value_branchs\.\d+\.0\.(weight|bias)", r"value_branches.{level}.norm1.\1", _same),
    (r"value_branchs\.\d+\.2\.weight", "value_branches.{level}.reduce.weight", _children),
    (r"value_branchs\.\d+\.2\.bias", "value_branches.{level}.reduce.bias", _same),
    (r"value_branchs\.\d+\.3\.(weight|bias)", r"value_branches.{level}.norm2.\1", _same),
    (r"value_branchs\.\d+\.5\.weight", "value_branches.{level}.mix.weight", _pointwise),
    (r"value_branchs\.\d+\.5\.bias", "value_branches.{level}.mix.bias", _same),
    (r"norm(1|2)\.(weight|bias)", r"norm\1.\2", _same),
    (r"mlp\.fc(1|2)\.(weight|bias)", r"mlp.fc\1.\2", _same),
    (r"mlp\.dwconv\.dwconv\.(weight|bias)", r"mlp.dwconv.conv.\1", _same),
)


def convert_attention(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one official attention module or block, under our names and in our shapes.

    Args:
        state: Official state dict of a module; a block has its attention under `attn.`.

    Raises:
        CheckpointError: A name is not one of an official attention module or block.
    """
    converted, unknown = _convert_block(state)
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors are not part of an official attention module or block: "
            f"{', '.join(unknown)}; pass the tensors of one module, without the names above it"
        )
    return converted


NAMED = 6  # tensors that an error names, of each kind
_BLOCK = re.compile(r"block(\d+)\.(\d+)\.(.+)")
_AROUND_BLOCKS = re.compile(
    r"(?P<embed>patch_embed(?P<embed_stage>[1-9])\.(proj|norm)\.(weight|bias))"
    r"|(?P<norm>norm(?P<norm_stage>[1-9])\.(weight|bias))"
    r"|(?P<head>head\.(weight|bias))"
)


def is_official_backbone(state: Mapping[str, Tensor]) -> bool:
    """Whether the names are those of an official backbone, alone or inside a larger model."""
    return any(name.removeprefix("backbone.").startswith("patch_embed1.") for name in state)


def split_backbone(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of the backbone, and the names of those around it.

    Full detectors and segmenters have their backbone under `backbone.`; without such names, all
    tensors are taken to be the backbone's.
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
    """Tensors of an official classification, detection or segmentation backbone, as ours.

    Where names start with `backbone.`, as in full detectors and segmenters, only those are taken.

    Args:
        state: Official state dict.

    Raises:
        CheckpointError: A name is not one of an official backbone.
    """
    state, _ = split_backbone(state)
    converted: dict[str, Tensor] = {}
    unknown: list[str] = []
    blocks: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if inside := _BLOCK.fullmatch(name):
            blocks.setdefault((inside[1], inside[2]), {})[inside[3]] = tensor
        elif target := _around_blocks(name):
            converted[target] = tensor
        else:
            unknown.append(name)
    for (stage, index), tensors in blocks.items():
        inner, left = _convert_block(tensors)
        unknown += [f"block{stage}.{index}.{name}" for name in left]
        prefix = f"stages.{int(stage) - 1}.blocks.{index}."
        converted |= {prefix + name: tensor for name, tensor in inner.items()}
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors are not part of an official backbone: {', '.join(unknown)}; "
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
    """Name of the model that tensors from `convert_backbone` belong to.

    A tensor that is missing or of a wrong shape does not mislead it: the depths are read off the
    block numbers, the widths off the norms of all blocks.

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
            f"known are {known}; name the model to see which tensors do not fit it"
        )
    letter = "b" if any(name.endswith(".level_logits") for name in state) else "a"
    return f"quadtree_{letter}_{_OFFICIAL_SIZES[shape]}"


def infer_options(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Options that rebuild the model that tensors from `convert_backbone` belong to.

    `num_classes` is the size of the classifier. The activation of the value branches and K leave
    no trace in the tensors: classification used GELU and 8, detection and segmentation, which
    have no classifier, ReLU and 32. Variant A has no value branches and gets no `value_act`.
    """
    head = [tensor for name, tensor in state.items() if name.startswith("head.")]
    options: dict[str, Any] = {
        "num_classes": head[0].shape[:1].numel() if head else 0,
        "topk": 8 if head else 32,
    }
    if any(".value_branches." in name for name in state):
        options["value_act"] = "gelu" if head else "relu"
    return options


def load_official(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads an official state dict into one of our backbones, every tensor or none.

    Args:
        model: The backbone, with `num_classes=0` for weights without a classifier.
        state: Official state dict.

    Raises:
        CheckpointError: Tensors are missing, left over, or of another shape; all are named.
    """
    converted = convert_backbone(state)
    check_fit(model, converted)
    model.load_state_dict(converted)


def check_fit(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises `CheckpointError` naming the first tensors of `state` that do not fit `model`."""
    expected = model.state_dict()
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
            f"{len(names)} {kind}: {_first(names)}" for kind, names in problems.items() if names
        )
        raise CheckpointError(
            f"the checkpoint does not fit {type(model).__name__}: {found}; build the model the "
            "checkpoint was made for, with the same options (size, variant, num_classes, ...)"
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


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


def _convert_block(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under our names, and the names that are no part of a module or block."""
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
