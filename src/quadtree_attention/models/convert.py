# SPDX-License-Identifier: Apache-2.0
"""From the tensor names of the official implementation to ours.

The official lists of value branches run fine -> coarse, those of position encodings and level
weights coarse -> fine; ours all run coarse -> fine. Its 1x1 and 2x2 convolutions are linear layers
here, because our maps are channels last and in tree order.
"""

import re
from collections.abc import Callable, Mapping

from torch import Tensor

from quadtree_attention.errors import CheckpointError

Transform = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def _pointwise(x: Tensor) -> Tensor:
    """1x1 convolution (O, I, 1, 1) -> linear (O, I)"""
    return x.flatten(1)


def _children(x: Tensor) -> Tensor:
    """2x2 convolution of stride 2 (O, I, y, x) -> linear on children in tree order (O, y*x*I)"""
    return x.permute(0, 2, 3, 1).flatten(1)


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
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors are not part of an official attention module or block: "
            f"{', '.join(unknown)}; pass the tensors of one module, without the names above it"
        )
    return converted
