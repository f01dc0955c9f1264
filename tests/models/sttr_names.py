# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of the tensors of a checkpoint of the official STTR, written down from facts."""

import torch
from torch import Tensor


def shapes(*, statistics: bool = True) -> dict[str, tuple[int, ...]]:
    """By official name; with `statistics` also those of batch norms, which files have."""
    found: dict[str, tuple[int, ...]] = {}

    def norm(name: str, dim: int) -> None:
        found.update({f"{name}.weight": (dim,), f"{name}.bias": (dim,)})
        if statistics:
            found.update({f"{name}.running_mean": (dim,), f"{name}.running_var": (dim,)})
            found[f"{name}.num_batches_tracked"] = ()

    def dense(name: str, dim: int) -> None:
        for i in range(4):
            layer, wide = f"{name}.denselayer{i + 1}", dim + 4 * i
            norm(f"{layer}.norm1", wide)
            found[f"{layer}.conv1.weight"] = (16, wide, 1, 1)
            norm(f"{layer}.norm2", 16)
            found[f"{layer}.conv2.weight"] = (4, 16, 3, 3)

    for i, dims in zip((0, 3, 6), ((16, 3), (16, 16), (32, 16)), strict=True):
        found[f"backbone.in_conv.{i}.weight"] = (*dims, 3, 3)
        norm(f"backbone.in_conv.{i + 1}", dims[0])
    for stage, (below, dim) in enumerate(((32, 64), (64, 128)), start=1):
        for i in range(3):
            block = f"backbone.resblock_{stage}.{i}"
            found[f"{block}.conv1.weight"] = (dim, dim if i else below, 3, 3)
            norm(f"{block}.bn1", dim)
            found[f"{block}.conv2.weight"] = (dim, dim, 3, 3)
            norm(f"{block}.bn2", dim)
        found[f"backbone.resblock_{stage}.0.downsample.0.weight"] = (dim, below, 1, 1)
        norm(f"backbone.resblock_{stage}.0.downsample.1", dim)
    for i in range(1, 5):
        found[f"backbone.branch{i}.1.weight"] = (32, 128, 1, 1)
        norm(f"backbone.branch{i}.2", 32)
    dense("tokenizer.bottle_neck", 128)
    for i, dim in enumerate((144, 80)):
        found[f"tokenizer.up.{i}.convTrans.weight"] = (16, 16, 3, 3)
        found[f"tokenizer.up.{i}.convTrans.bias"] = (16,)
        dense(f"tokenizer.dense_block.{i}", dim)
    found["tokenizer.up.2.convTrans.0.weight"] = (16, 128, 3, 3)
    norm("tokenizer.up.2.convTrans.1", 128)
    found["tokenizer.up.2.convTrans.2.weight"] = (128, 128, 3, 3)
    found["tokenizer.up.2.convTrans.2.bias"] = (128,)
    for i, dim in ((0, 131), (3, 128)):
        found[f"tokenizer.dense_block.2.double_conv.{i}.weight"] = (128, dim, 3, 3)
        norm(f"tokenizer.dense_block.2.double_conv.{i + 1}", 128)
    for kind, norms in (("self", 1), ("cross", 2)):
        for i in range(6):
            layer = f"transformer.{kind}_attn_layers.{i}"
            found[f"{layer}.{kind}_attn.in_proj_weight"] = (384, 128)
            found[f"{layer}.{kind}_attn.in_proj_bias"] = (384,)
            found[f"{layer}.{kind}_attn.out_proj.weight"] = (128, 128)
            found[f"{layer}.{kind}_attn.out_proj.bias"] = (128,)
            for j in range(1, norms + 1):
                found |= {f"{layer}.norm{j}.{x}": (128,) for x in ("weight", "bias")}
    found |= {f"transformer.norm.{x}": (128,) for x in ("weight", "bias")}

    def scaled(name: str, dim: int, dim_out: int) -> None:
        found[f"{name}.bias"] = (dim_out,)
        found[f"{name}.weight_g"] = (dim_out, 1, 1, 1)
        found[f"{name}.weight_v"] = (dim_out, dim, 3, 3)

    head = "regression_head.cal"
    found["regression_head.phi"] = ()
    found |= {f"{head}.in_conv.weight": (16, 4, 3, 3), f"{head}.in_conv.bias": (16,)}
    for i in range(8):
        scaled(f"{head}.layers.{i}.module.0", 17, 64)
        scaled(f"{head}.layers.{i}.module.2", 64, 16)
    found |= {f"{head}.out_conv.weight": (1, 16, 3, 3), f"{head}.out_conv.bias": (1,)}
    for i in (0, 1, 3, 4):
        scaled(f"{head}.occ_head.{i}", 16 if i else 4, 16)
    found |= {f"{head}.occ_head.6.weight": (1, 16, 3, 3), f"{head}.occ_head.6.bias": (1,)}
    return found


def official_state(*, statistics: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """Small random numbers; norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes(statistics=statistics).items():
        state[name] = torch.randn(shape, generator=generator) * 0.05
        if "weight_g" in name or (len(shape) == 1 and name.endswith("weight")):
            state[name] += 1
    return state
