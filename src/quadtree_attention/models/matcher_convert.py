# SPDX-License-Identifier: Apache-2.0
"""Conversion of tensor names of official matchers (LoFTR and its quadtree variant) to ours."""

import re
from collections.abc import Mapping

from torch import Tensor

from quadtree_attention.errors import CheckpointError
from quadtree_attention.models.convert import convert_block, convert_parts

_NORM = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
_PREFIX = "matcher."  # prefix added by the Lightning module around the network
_BLOCK = re.compile(r"loftr_(coarse|fine)\.layers\.(\d+)\.(.+)")
# {stage} is the number in the official name less one: 1/2, 1/4, 1/8 are 1, 2, 3 there.
_AROUND_BLOCKS: tuple[tuple[str, str], ...] = (
    (r"backbone\.conv1\.weight", "backbone.stem.weight"),
    (rf"backbone\.bn1\.{_NORM}", r"backbone.stem_norm.\1"),
    (
        r"backbone\.layer(?P<stage>[123])\.([01])\.conv([12])\.weight",
        r"backbone.stages.{stage}.\2.conv\3.weight",
    ),
    (
        rf"backbone\.layer(?P<stage>[123])\.([01])\.bn([12])\.{_NORM}",
        r"backbone.stages.{stage}.\2.norm\3.\4",
    ),
    (
        rf"backbone\.layer(?P<stage>[123])\.0\.downsample\.([01])\.{_NORM}",
        r"backbone.stages.{stage}.0.shortcut.\2.\3",
    ),
    (r"backbone\.layer(?P<stage>[123])_outconv\.weight", "backbone.lateral.{stage}.weight"),
    (r"backbone\.layer(?P<stage>[12])_outconv2\.0\.weight", "backbone.smooth.{stage}.conv1.weight"),
    (rf"backbone\.layer(?P<stage>[12])_outconv2\.1\.{_NORM}", r"backbone.smooth.{stage}.norm.\2"),
    (r"backbone\.layer(?P<stage>[12])_outconv2\.3\.weight", "backbone.smooth.{stage}.conv2.weight"),
    (r"coarse_matching\.bin_score", "coarse_matching.bin_score"),
    (r"fine_preprocess\.down_proj\.(weight|bias)", r"fine_windows.project.\1"),
    (r"fine_preprocess\.merge_feat\.(weight|bias)", r"fine_windows.merge.\1"),
)
_LOFTR_BLOCK: tuple[tuple[str, str], ...] = (
    (r"(q|k|v)_proj\.weight", r"attn.\1_proj.weight"),
    (r"merge\.weight", "attn.proj.weight"),
    (r"mlp\.([02])\.weight", r"mlp.\1.weight"),
    (r"norm([12])\.(weight|bias)", r"norm\1.\2"),
)


def is_official_matcher(state: Mapping[str, Tensor]) -> bool:
    """True if the names are of an official matcher."""
    return any(name.removeprefix(_PREFIX).startswith("loftr_coarse.") for name in state)


def convert_matcher(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of an official matcher to our names and shapes.

    Args:
        state: Official state dict, with or without the prefix `matcher.`.

    Raises:
        CheckpointError: A name is not a tensor of an official matcher.
    """
    return convert_parts(
        {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()},
        "matcher",
        _BLOCK,
        lambda part, index: f"{part}_transformer.layers.{index}.",
        convert_match_block,
        lambda name: _renamed(name, _AROUND_BLOCKS),
    )


def convert_match_block(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Convert one block of the transformers; also return unknown names."""
    if not any(name.startswith("merge.") for name in state):
        return convert_block(state)
    names = {name: _renamed(name, _LOFTR_BLOCK) for name in state}
    found = {target: state[name] for name, target in names.items() if target is not None}
    return found, [name for name, target in names.items() if target is None]


def infer_matcher(state: Mapping[str, Tensor]) -> str:
    """Infers the name of the matcher from tensors of `convert_matcher`.

    Raises:
        CheckpointError: It has quadtree attention: the indoor and outdoor matchers differ only in
            K, which cannot be inferred from tensors.
    """
    if any(name.endswith(".attn.proj.bias") for name in state):
        raise CheckpointError(
            "the tensors fit loftr_quadtree_indoor (K 32, 16) and loftr_quadtree_outdoor (K 16, 8) "
            "equally; pass the name that the file was published as"
        )
    return "loftr"


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, target in rules:
        if match := re.fullmatch(pattern, name):
            stage = int(match.groupdict().get("stage") or 1) - 1
            return match.expand(target).replace("{stage}", str(stage))
    return None
