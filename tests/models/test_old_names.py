# SPDX-License-Identifier: Apache-2.0
"""Weights saved under earlier names of parameters load, and stay where they were."""

from pathlib import Path

import pytest
import torch

from quadtree_attention import CheckpointError
from quadtree_attention.models.convert import check_fit
from quadtree_attention.nn.renamed import with_new_names
from tests.support import raises

timm = pytest.importorskip("timm", reason="the backbones need timm (extra 'models')")
pytest.importorskip("quadtree_attention.models.backbone")  # registers them
NAMES = Path(__file__).with_name("names_of_quadtree_b_b0.txt")  # as they were at first


def first_weights():
    rng = torch.Generator().manual_seed(0)
    state = {}
    for line in NAMES.read_text().splitlines():
        name, sizes = line.split()
        state[name] = torch.randn([int(size) for size in sizes.split("x")], generator=rng)
    return state


def test_weights_of_a_backbone():
    state, model = first_weights(), timm.create_model("quadtree_b_b0")
    check_fit(model, state)
    given = dict(state)
    model.load_state_dict(state)
    assert state.keys() == given.keys()  # those of the caller stay as they were
    loaded = model.state_dict()
    branch = "stages.0.blocks.1.attn.value_branches.2."
    for old, new in {
        branch + "norm1.weight": branch + "reduce.norm_weight",
        branch + "norm2.bias": branch + "mix.norm_bias",
        branch + "reduce.weight": branch + "reduce.weight",
        "stages.2.blocks.0.attn.lepe.1.conv.bias": "stages.2.blocks.0.attn.lepe.1.bias",
        "stages.3.blocks.1.mlp.dwconv.conv.weight": "stages.3.blocks.1.mlp.dwconv.weight",
    }.items():
        assert torch.equal(loaded[new], state[old]), old
    # in the same order, which is that of optimizer states
    assert [*with_new_names(model, state)] == [*with_new_names(model, loaded)] == [*loaded]
    assert all(torch.equal(x, y) for x, y in zip(state.values(), loaded.values(), strict=True))


def test_what_is_missing_goes_by_its_new_name():
    state, model = first_weights(), timm.create_model("quadtree_b_b0")
    del state["stages.0.blocks.0.mlp.dwconv.conv.weight"]
    name = r"stages\.0\.blocks\.0\.mlp\.dwconv\.weight"
    raises(CheckpointError, f"1 missing: {name}", check_fit, model, state)
    raises(RuntimeError, f'Missing key.*"{name}"', model.load_state_dict, state)
