# SPDX-License-Identifier: Apache-2.0
"""The attention of a backbone by name: quadtree attention or a baseline."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quadtree_attention.errors import OptionError
from quadtree_attention.nn.attention import QuadtreeAttention
from quadtree_attention.nn.baselines import BASELINES, check_attention, make_attention, options_of

QUADTREE_OPTIONS = ("num_levels", "topk", "variant", "value_pyramid", "value_act", "backend")
_SET_BY_THE_MODEL = ("lepe", "proj_drop", "device", "dtype")


def options_by_stage(
    name: str,
    num_stages: int,
    *,
    quadtree: Mapping[str, Any],
    baseline: Mapping[str, Any],
    lepe: bool | None,
    proj_drop: float,
) -> list[dict[str, Any]]:
    """Options of the attention in every stage, for `build_attention`.

    Args:
        name: "quadtree" or a key of `BASELINES`.
        num_stages: Number of stages.
        quadtree: `QUADTREE_OPTIONS`, None if not given; not accepted by baselines.
        baseline: Options of the baseline; not accepted by quadtree attention.
        lepe: Position encoding; None means variant B of quadtree attention only.
        proj_drop: Dropout after the projection.

    Options that are a list or tuple have one value per stage.
    """
    check_attention(name, ["quadtree", *BASELINES])
    quadtree = {option: value for option, value in quadtree.items() if value is not None}
    options: dict[str, Any] = {"qkv_bias": True, "proj_drop": proj_drop}
    if name == "quadtree":
        _check_quadtree(baseline)
        variant = quadtree.get("variant", "B")
        options |= {
            "num_levels": _levels(num_stages),
            "value_pyramid": "conv" if variant == "B" else "mean",
            "lepe": variant == "B" if lepe is None else lepe,
            **quadtree,
        }
    else:
        _check_baseline(name, quadtree, baseline)
        options |= {"lepe": bool(lepe), **_baseline_defaults(name, num_stages), **baseline}
    by_stage = {option: _by_stage(option, value, num_stages) for option, value in options.items()}
    return [{option: values[i] for option, values in by_stage.items()} for i in range(num_stages)]


def build_attention(
    name: str, dim: int, num_heads: int, options: Mapping[str, Any], *, block: int, **dd: Any
) -> nn.Module:
    """Return the attention of the block with this index in its stage."""
    if name == "quadtree":
        return QuadtreeAttention(dim, num_heads, **options, **dd)
    options = dict(options)
    if name == "window":  # every second block shifts its windows
        half = options["window_size"] // 2 if isinstance(options["window_size"], int) else 0
        options["shift_size"] = options.get("shift_size", half) if block % 2 else 0
    return make_attention(name, dim, num_heads, **options, **dd)


def _levels(num_stages: int) -> list[int]:
    """Return levels per stage, with the same coarsest map in all stages: (4, 3, 2, 1)."""
    return list(range(num_stages, 0, -1))


def _baseline_defaults(name: str, num_stages: int) -> dict[str, Any]:
    if name == "spatial_reduction":
        return {"sr_ratio": [2 ** (level - 1) for level in _levels(num_stages)]}
    return {"window_size": 7} if name == "window" else {}


def _by_stage(option: str, value: Any, num_stages: int) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_stages
    if len(value) != num_stages:
        raise OptionError(
            f"{option} must be one value, or one per stage ({num_stages}), got "
            f"{option}={tuple(value)}; match them"
        )
    return value


def _check_quadtree(baseline: Mapping[str, Any]) -> None:
    if baseline:
        raise OptionError(
            f"attention_options are for baselines, got {_list(baseline)} with "
            f"attention='quadtree', whose options ({', '.join(QUADTREE_OPTIONS)}) are keywords of "
            "the model; pass them there"
        )


def _check_baseline(name: str, quadtree: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    known = [option for option in options_of(name) if option not in _SET_BY_THE_MODEL]
    if quadtree:
        raise OptionError(
            f"attention={name!r} does not accept options of quadtree attention, got "
            f"{_list(quadtree)}; leave them out, or set its own options in attention_options: "
            f"{', '.join(known)}"
        )
    doubled = [option for option in baseline if option in _SET_BY_THE_MODEL]
    if doubled:
        raise OptionError(
            f"attention_options of {name!r} are {', '.join(known)}, got {', '.join(doubled)}, "
            "which the model sets; leave it out and see the keywords of the model"
        )


def _list(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{option}={value!r}" for option, value in options.items())
