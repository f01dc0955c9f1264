# SPDX-License-Identifier: Apache-2.0
"""Conversion of tensor names of the official STTR to ours.

Its attention has one matrix for queries, keys and values, ours three. Statistics of its batch norms
are stored but never used, not even by the official code; they are dropped.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from quadtree_attention.errors import CheckpointError

_PREFIX = "module."  # prefix added by training on several devices
_BUFFER = re.compile(r".+\.(running_mean|running_var|num_batches_tracked)")
_JOINT = re.compile(r"transformer\.(self|cross)_attn_layers\.(\d+)\.\1_attn\.in_proj_(weight|bias)")
_END = r"(weight|bias)"
# {first} and {second} are numbers of a name less one, {n} a third of one, {next} one more.
_RULES: tuple[tuple[str, str], ...] = (
    (r"backbone\.in_conv\.(?P<third>[036])\.weight", "features.stem.{n}.0.weight"),
    (rf"backbone\.in_conv\.(?P<third>[147])\.{_END}", r"features.stem.{n}.1.\2"),
    (
        r"backbone\.resblock_(?P<first>[12])\.([012])\.conv(?P<second>[12])\.weight",
        r"features.stages.{first}.\2.body.{second}.0.weight",
    ),
    (
        rf"backbone\.resblock_(?P<first>[12])\.([012])\.bn(?P<second>[12])\.{_END}",
        r"features.stages.{first}.\2.body.{second}.1.\4",
    ),
    (
        rf"backbone\.resblock_(?P<first>[12])\.0\.downsample\.([01])\.{_END}",
        r"features.stages.{first}.0.shortcut.\2.\3",
    ),
    (r"backbone\.branch(?P<first>[1-4])\.1\.weight", "features.pools.{first}.0.weight"),
    (rf"backbone\.branch(?P<first>[1-4])\.2\.{_END}", r"features.pools.{first}.1.\2"),
    (
        rf"tokenizer\.bottle_neck\.denselayer(?P<first>[1-4])\.(norm1|conv1|norm2|conv2)\.{_END}",
        r"features.dense.0.{first}.{\2}.\3",
    ),
    (
        r"tokenizer\.dense_block\.(?P<next>[01])\.denselayer(?P<first>[1-4])"
        rf"\.(norm1|conv1|norm2|conv2)\.{_END}",
        r"features.dense.{next}.{first}.{\3}.\4",
    ),
    (rf"tokenizer\.up\.([01])\.convTrans\.{_END}", r"features.up.\1.\2"),
    (rf"tokenizer\.up\.2\.convTrans\.([012])\.{_END}", r"features.last_up.\1.\2"),
    (
        r"tokenizer\.dense_block\.2\.double_conv\.(?P<third>[03])\.weight",
        "features.out.{n}.0.weight",
    ),
    (rf"tokenizer\.dense_block\.2\.double_conv\.(?P<third>[14])\.{_END}", r"features.out.{n}.1.\2"),
    (
        rf"transformer\.(self|cross)_attn_layers\.(\d+)\.\1_attn\.out_proj\.{_END}",
        r"transformer.blocks.\2.\1_attn.proj.\3",
    ),
    (
        rf"transformer\.(self|cross)_attn_layers\.(\d+)\.norm1\.{_END}",
        r"transformer.blocks.\2.\1_norm.\3",
    ),
    (
        rf"transformer\.cross_attn_layers\.(\d+)\.norm2\.{_END}",
        r"transformer.blocks.\1.right_norm.\2",
    ),
    (rf"transformer\.norm\.{_END}", r"transformer.norm.\1"),
    (r"regression_head\.phi", "assignment.bin_score"),
    (rf"regression_head\.cal\.in_conv\.{_END}", r"refinement.embed.\1"),
    (rf"regression_head\.cal\.out_conv\.{_END}", r"refinement.head.\1"),
    (
        r"regression_head\.cal\.layers\.(\d+)\.module\.([02])\.(weight_g|weight_v|bias)",
        r"refinement.blocks.\1.\2.{\3}",
    ),
    (
        r"regression_head\.cal\.occ_head\.([0134])\.(weight_g|weight_v|bias)",
        r"refinement.occlusion.\1.{\2}",
    ),
    (rf"regression_head\.cal\.occ_head\.6\.{_END}", r"refinement.occlusion.6.\1"),
)
_WORDS = {  # places in a dense layer, and the two parts of a weight with a learned length
    "norm1": "0", "conv1": "2", "norm2": "3", "conv2": "5",
    "weight_g": "length", "weight_v": "weight", "bias": "bias",
}  # fmt: skip


def is_official_stereo(state: Mapping[str, Tensor]) -> bool:
    """True if the names are of an official STTR."""
    return any(name.removeprefix(_PREFIX).startswith("regression_head.") for name in state)


def convert_stereo(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Convert an official STTR to our names; also return the names of unused tensors.

    Args:
        state: Official state dict, with or without the prefix `module.`.

    Raises:
        CheckpointError: A name is not a tensor of an official STTR.
    """
    converted: dict[str, Tensor] = {}
    left_out, unknown = [], []
    for given, tensor in state.items():
        name = given.removeprefix(_PREFIX)
        if _BUFFER.fullmatch(name) and _renamed(re.sub(r"[^.]+$", "weight", name)):
            left_out.append(given)
        elif match := _JOINT.fullmatch(name):
            start = f"transformer.blocks.{match[2]}.{match[1]}_attn."
            parts = zip("qkv", tensor.chunk(3), strict=False)
            converted |= {f"{start}{x}_proj.{match[3]}": part.clone() for x, part in parts}
        elif target := _renamed(name):
            converted[target] = tensor
        else:
            unknown.append(given)
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors are not part of an official STTR: {', '.join(unknown)}; pass "
            "the state dict of one, such as the entry 'state_dict' of its file"
        )
    return converted, left_out


def _renamed(name: str) -> str | None:
    for pattern, target in _RULES:
        if match := re.fullmatch(pattern, name):
            numbers = {key: int(value) for key, value in match.groupdict().items() if value}
            places = {key: str(value - 1) for key, value in numbers.items()}
            places["n"] = str(numbers.get("third", 0) // 3)
            places["next"] = str(numbers.get("next", 0) + 1)
            return match.expand(target).format(**places, **_WORDS)
    return None
