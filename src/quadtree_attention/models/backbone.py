# SPDX-License-Identifier: Apache-2.0
"""Pyramid backbones with configurable attention, registered as timm models.

Four stages at 1/4, 1/8, 1/16 and 1/32 of the image, in two layouts: PVTv2 (overlapping
patch embeddings, an MLP with a convolution inside, a norm at the end of every stage), used by the
`quadtree_*` models, and Swin (patch embedding and merging, a plain MLP).

Example:
    >>> import timm, torch
    >>> import quadtree_attention.models.backbone  # registers the names
    >>> model = timm.create_model("test_quadtree", num_classes=5)
    >>> model(torch.randn(1, 3, 70, 45)).shape
    torch.Size([1, 5])
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.models.convert import convert_backbone, is_official_backbone
from quadtree_attention.models.parts.attention import build_attention, options_by_stage
from quadtree_attention.models.parts.masks import masks_of_maps
from quadtree_attention.models.parts.patches import PatchEmbed, PatchMerging
from quadtree_attention.models.parts.resnet_fpn import hide_map
from quadtree_attention.models.registry import BACKBONES, preset
from quadtree_attention.nn.attention import QuadtreeAttention, ValuePyramid
from quadtree_attention.nn.baselines import MapAttention
from quadtree_attention.nn.block import Block, ConvMlp
from quadtree_attention.nn.norm import TokenNorm
from quadtree_attention.nn.position import DepthwiseConv
from quadtree_attention.nn.value_pyramid import Activation, NormActLinear
from quadtree_attention.ops.attention.problem import Variant, check_mask
from quadtree_attention.ops.attention.tree import hide

with checks.needs("models", "a backbone"):
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from timm.layers.mlp import Mlp
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

Layout = Literal["pvt", "swin"]
_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg": lambda x: x.mean(dim=(2, 3)),
    "max": lambda x: x.amax(dim=(2, 3)),
    "": lambda x: x,
}


class Stage(nn.Module):
    """Blocks at one resolution, after an optional downsampling to that resolution.

    Inputs and outputs are (B, C, H, W), so that timm's feature extraction can chain stages; their
    memory format is channels last throughout.
    """

    def __init__(self, downsample: nn.Module, blocks: Sequence[Block], norm: nn.Module) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.grad_checkpointing = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W'); `mask` (B, H', W') is of the output, x is 0 if hidden"""
        x = self.downsample(x).movedim(1, -1)  # (B, H, W, C)
        options: dict[str, Any] = {} if mask is None else {"mask": mask}
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, **options)
            else:
                x = block(x, **options)
        return hide(self.norm(x), mask).movedim(-1, 1)


class PyramidTransformer(nn.Module):
    """Four-stage vision transformer for images of any size.

    Args:
        in_chans: Number of image channels.
        num_classes: Number of classes; 0 omits the classifier.
        global_pool: "avg", "max", or "" to keep the map (the classifier is then applied per cell).
        depths: Blocks per stage.
        embed_dims: Channels per stage.
        num_heads: Heads per stage.
        mlp_ratios: Hidden channels of the MLP per channel, per stage.
        layout: "pvt" or "swin".
        attention: "quadtree", or the name of a baseline in `quadtree_attention.nn.BASELINES`.
            PVTv2's "linear_spatial_reduction" also adds the ReLU of its MLPs.
        attention_options: Options of the baseline, such as `{"window_size": 8}`; a list or tuple
            has one value per stage. By default spatial reduction has `sr_ratio` (8, 4, 2, 1), and
            every second block shifts its windows by half of their size (by `shift_size`).
        num_levels: Levels of the quadtree: one number, or one per stage; None means (4, 3, 2, 1).
            This and the next five options apply to quadtree attention only.
        topk: Cells kept per query cell: one number, or one per stage; None means 8.
        variant: "A" or "B"; None means "B".
        value_pyramid: "mean" or "conv"; None means "conv" for variant B, "mean" for A.
        value_act: Activation of a learned value pyramid: "gelu" (classification; None means this)
            or "relu" (detection and segmentation).
        backend: "auto" or the name of a backend; None means "auto".
        lepe: Locally enhanced position encoding; None means variant B of quadtree attention only.
        drop_rate: Dropout before the classifier.
        proj_drop_rate: Dropout in the blocks.
        drop_path_rate: Stochastic depth of the last block; increases linearly from 0 at the first.
    """

    def __init__(
        self,
        *,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        depths: Sequence[int] = (2, 2, 2, 2),
        embed_dims: Sequence[int] = (32, 64, 160, 256),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        layout: Layout = "pvt",
        attention: str = "quadtree",
        attention_options: Mapping[str, Any] | None = None,
        num_levels: int | Sequence[int] | None = None,
        topk: int | Sequence[int] | None = None,
        variant: Variant | None = None,
        value_pyramid: ValuePyramid | None = None,
        value_act: Activation | None = None,
        backend: str | None = None,
        lepe: bool | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        per_stage = {
            "depths": depths,
            "embed_dims": embed_dims,
            "num_heads": num_heads,
            "mlp_ratios": mlp_ratios,
        }
        _check_options(per_stage, layout, global_pool)
        options = options_by_stage(
            attention,
            len(depths),
            quadtree={
                "num_levels": num_levels,
                "topk": topk,
                "variant": variant,
                "value_pyramid": value_pyramid,
                "value_act": value_act,
                "backend": backend,
            },
            baseline=attention_options or {},
            lepe=lepe,
            proj_drop=proj_drop_rate,
        )
        dd = {"device": device, "dtype": dtype}
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = embed_dims[-1]
        swin = layout == "swin"
        self.patch_embed = PatchEmbed(
            in_chans, embed_dims[0], stride=4, kernel_size=4 if swin else 7, **dd
        )
        self.feature_info: list[dict[str, Any]] = []
        norm_eps = 1e-5 if swin else 1e-6
        make_mlp = _mlp_maker(layout, attention, drop=proj_drop_rate, **dd)
        last_block = max(1, sum(depths) - 1)
        stages = []
        for i, dim in enumerate(embed_dims):
            blocks = [
                Block(
                    dim,
                    build_attention(attention, dim, num_heads[i], options[i], block=j, **dd),
                    make_mlp(dim, int(dim * mlp_ratios[i])),
                    norm_eps=norm_eps,
                    drop_path=drop_path_rate * (sum(depths[:i]) + j) / last_block,
                    **dd,
                )
                for j in range(depths[i])
            ]
            downsample = _downsample(layout, embed_dims[i - 1], dim, **dd) if i else nn.Identity()
            closed = not swin or i == len(depths) - 1
            norm = TokenNorm(dim, norm_eps, **dd) if closed else nn.Identity()
            stages.append(Stage(downsample, blocks, norm))
            self.feature_info.append(
                {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"}
            )
        self.stages = nn.Sequential(*stages)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._classifier(num_classes, **dd)
        self.init_weights()

    def init_weights(self) -> None:
        """Reinitialises all parameters, also those created on the meta device."""
        for module in reversed(list(self.modules())):  # submodules before their parent
            _init(module)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, num_classes)"""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, in_chans, H, W) -> (B, C, H/32, W/32), sizes rounded up

        `mask` as in `forward_intermediates`.
        """
        x, masks = self._embed(x, mask)
        for stage, visible in zip(self.stages, masks, strict=True):
            x = stage(x, visible)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, C, H, W) -> (B, num_classes), or (B, C) with `pre_logits`"""
        x = self.head_drop(_POOLS[self.global_pool](x))
        return x if pre_logits else self.head(x.movedim(1, -1)).movedim(-1, 1)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        mask: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the feature maps of stages, and the last feature map.

        Args:
            x: Image (B, in_chans, H, W).
            indices: Stages: the last n, a list (negative from the end), or None for all.
            norm: No effect; the norms are part of their stages.
            stop_early: Do not run stages after the last requested one.
            output_fmt: "NCHW" or "NHWC".
            intermediates_only: Return the feature maps only.
            mask: Boolean (B, H, W), True = visible. Hidden pixels have no effect: in evaluation
                an image padded at the bottom and right gives the same maps as without padding.
                Cells without a visible pixel are 0. Quadtree attention accepts any mask, baselines
                only masks of such padding.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise OptionError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt=}; pass one")
        take = self._take(indices)
        x, masks = self._embed(x, mask)
        maps = []
        for i, stage in enumerate(self.stages):
            if stop_early and i > max(take):
                break
            x = stage(x, masks[i])
            if i in take:
                maps.append(x if output_fmt == "NCHW" else x.movedim(1, -1))
        return maps if intermediates_only else (x, maps)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last of `indices` and the classifier; return indices."""
        take = self._take(indices)
        self.stages = self.stages[: max(take) + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one for `num_classes`; 0 removes it."""
        if global_pool is not None:
            _check_pool(global_pool)
            self.global_pool = global_pool
        weight = self.patch_embed.proj.weight
        self.num_classes = num_classes
        self.head = self._classifier(num_classes, device=weight.device, dtype=weight.dtype)
        self.head.train(self.training)
        _init(self.head)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable gradient checkpointing of blocks."""
        for stage in self.stages:
            assert isinstance(stage, Stage)
            stage.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: the level weights."""
        return {name for name, _ in self.named_parameters() if name.endswith(".level_logits")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns for layer-wise learning rates, by stage or by block."""
        by_block = [
            (r"^stages\.(\d+)\.downsample", (0,)),  # together with the first block
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^stages\.(\d+)\.norm", (99999,)),  # together with the last block
        ]
        return {"stem": r"^patch_embed", "blocks": r"^stages\.(\d+)" if coarse else by_block}

    def _embed(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """Return the first map, and the masks of the maps of all stages."""
        check_mask("mask", mask, "x", (x.shape[0], *x.shape[2:]), x.device)
        # The first map is at 1/4, the third of the levels
        return self.patch_embed(hide_map(x, mask)), masks_of_maps(mask, len(self.stages) + 2)[2:]

    def _classifier(self, num_classes: int, *, device: Any, dtype: Any) -> nn.Module:
        if num_classes == 0:
            return nn.Identity()
        return nn.Linear(self.num_features, num_classes, device=device, dtype=dtype)

    def _take(self, indices: int | Sequence[int] | None) -> list[int]:
        count = len(self.stages)
        if indices is None:
            return list(range(count))
        wanted = list(range(-indices, 0)) if isinstance(indices, int) else list(indices)
        if not wanted or not all(-count <= i < count for i in wanted):
            raise OptionError(
                f"indices must be 1 to {count} (the last stages), or a list of stages from "
                f"{-count} to {count - 1}, got {indices=}"
            )
        return [i % count for i in wanted]


def _mlp_maker(layout: Layout, attention: str, **options: Any) -> Callable[[int, int], nn.Module]:
    """Return a factory of MLPs by channels and hidden channels."""
    if layout == "swin":
        return lambda dim, hidden: Mlp(dim, hidden, **options)
    relu = attention == "linear_spatial_reduction"  # PVTv2-li combines both
    return lambda dim, hidden: ConvMlp(dim, hidden, extra_relu=relu, **options)


def _downsample(layout: Layout, dim: int, dim_out: int, **dd: Any) -> nn.Module:
    """Return the downsampling layer before a stage."""
    if layout == "swin":
        return PatchMerging(dim, dim_out, **dd)
    return PatchEmbed(dim, dim_out, stride=2, kernel_size=3, **dd)


def _init(module: nn.Module) -> None:
    """Initialise as the original, whose truncation at 100 standard deviations has no effect."""
    if isinstance(module, nn.Linear):
        _normal(module.weight, 0.02)
    elif isinstance(module, nn.Conv2d):
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        _normal(module.weight, math.sqrt(2.0 / fan_out))
    elif isinstance(module, DepthwiseConv):
        _normal(module.weight, math.sqrt(2.0 / 3**module.ndim))
    elif isinstance(module, NormActLinear):
        _normal(module.weight, 0.02)
        nn.init.ones_(module.norm_weight)
        nn.init.zeros_(module.norm_bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, QuadtreeAttention) and module.level_logits is not None:
        _normal(module.level_logits, 1.0)
    elif isinstance(module, MapAttention):
        module.init_own_weights()
    if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
        nn.init.zeros_(bias)


def _normal(parameter: Tensor, std: float) -> None:
    with torch.no_grad():
        parameter.copy_(torch.empty_like(parameter, dtype=torch.float32).normal_(std=std))


def _check_options(per_stage: Mapping[str, Sequence[float]], layout: str, global_pool: str) -> None:
    if len({len(values) for values in per_stage.values()}) != 1:
        given = ", ".join(f"{name}={tuple(values)}" for name, values in per_stage.items())
        raise OptionError(f"all stages need one value of each option, got {given}; match them")
    checks.one_of(get_args(Layout), layout=layout)
    _check_pool(global_pool)


def _check_pool(global_pool: str) -> None:
    if global_pool not in _POOLS:
        raise OptionError(
            f"global_pool must be one of {', '.join(map(repr, _POOLS))}, got {global_pool=}; "
            "'' keeps the map"
        )


def checkpoint_filter_fn(state: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """Filter for timm: converts official weights; ours and PVTv2's load unchanged."""
    return convert_backbone(state) if is_official_backbone(state) else state


def _cfg(**options: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "fixed_input_size": False,
        "license": "apache-2.0",
        **options,
    }


_DIFFERENT: dict[str, dict[str, Any]] = {
    "swin_tiny_quadtree_b": {"crop_pct": 0.9},
    "test_quadtree": {"input_size": (3, 96, 96), "pool_size": (3, 3), "crop_pct": 0.95},
}
default_cfgs = generate_default_cfgs({name: _cfg(**_DIFFERENT.get(name, {})) for name in BACKBONES})


def _registered(name: str) -> Callable[..., nn.Module]:
    """Return the entry point that timm calls for the backbone of this name."""

    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        options = preset(name, kwargs)
        # "variant" is also what timm calls the name of a model.
        network = partial(PyramidTransformer, variant=options.pop("variant", None))
        return build_model_with_cfg(
            network,
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg={"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
            **options,
        )

    build.__name__ = name
    return register_model(build)


globals().update({name: _registered(name) for name in BACKBONES})
