# SPDX-License-Identifier: Apache-2.0
"""K layer by layer: set by name, all or none, and stored in a card."""

import pytest

from quadtree_attention import CheckpointError, OptionError
from quadtree_attention.models import create, load, save_weights, set_topk
from quadtree_attention.models.topk import quadtree_layers
from tests.models.test_registry import STTR, TINY
from tests.support import raises

pytestmark = pytest.mark.usefixtures("only_reference")


def test_layers_of_every_network():
    for task, count in {"classify": 5, "detect": 5, "segment": 5, "match": 2, "stereo": 2}.items():
        name, options = TINY[task]
        assert len(quadtree_layers(create(name, **options))) == count, task
    assert not quadtree_layers(create("sttr", **STTR))
    assert not quadtree_layers(create("loftr", device="meta"))


def test_all_or_none_are_set():
    model = create("test_quadtree")
    first, last = "stages.0.blocks.0.attn", "stages.3.blocks.0.attn"
    layers = quadtree_layers(model)
    set_topk(model, {first: [8, 4, 2], last: 3})
    assert layers[first].topk == (8, 4, 2) and layers[last].topk == ()  # has one level
    for wrong, message in (
        ({first: 1, "stages.0.blocks.1.attn": 1}, "a quadtree layer must be one of .*did you mean"),
        ({last: 1, first: [1, 2]}, rf"{first}: topk must have one entry per level"),
        ({first: 0}, "topk must be at least 1"),
        (8, "topk must be a mapping by layer name, got 8"),
    ):
        raises(OptionError, message, set_topk, model, wrong)
        assert layers[first].topk == (8, 4, 2)


@pytest.mark.parametrize("task", ["classify", "stereo"])
def test_cards_hold_them(tmp_path, task):
    name, kwargs = TINY[task]
    model, path = create(name, **kwargs), tmp_path / "x.safetensors"
    layer = next(iter(quadtree_layers(model)))
    card = {"model": name, "kwargs": kwargs, "topk": {layer: [3, 2, 1]}}
    save_weights(path, model.state_dict(), card)
    path.with_suffix(".json").unlink()
    changed, *others = quadtree_layers(load(path)).values()
    assert tuple(changed.topk) == (3, 2, 1) and all(x.topk != (3, 2, 1) for x in others)
    save_weights(path, model.state_dict(), card | {"topk": {"none": 1}}, overwrite=True)
    raises(CheckpointError, "a quadtree layer must be one of", load, path)
