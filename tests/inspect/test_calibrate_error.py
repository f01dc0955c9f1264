# SPDX-License-Identifier: Apache-2.0
"""K of accelerated models by the error of their layers."""

import pytest
import timm
import torch

from quadtree_attention import OptionError, accelerate, calibrate_topk, set_topk
from quadtree_attention.inspect import calibrate_error


@pytest.fixture(scope="module")
def model():
    network = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, depth=2).eval()
    with torch.no_grad():  # peaked attention, in which a few cells matter
        for block in network.blocks:
            block.attn.qkv.weight[:384] *= 4
    return network


def images(count=2):
    return [torch.randn(1, 3, 192, 256) for _ in range(count)]


@torch.no_grad()
def test_smallest_k_within_the_error(model, monkeypatch):
    monkeypatch.setattr(calibrate_error, "_now", lambda clock=[0.0]: clock[0])
    items = images()
    with accelerate(model, topk=1, min_tokens=1, num_levels=3) as accelerated:
        dense = None
        found = calibrate_topk(model, items, error=0.6)
        assert all(k is None for k in found.values())  # nothing was faster on that clock
        errors = found.errors["blocks.0.attn"]
        assert errors[48] < 1e-5 < errors[16] < errors[1]  # of 6x8 cells above the tokens
        assert all(layer.topk == 1 and layer.probe is None for layer in accelerated.values())
    dense = model(items[0])
    assert torch.equal(model(items[0]), dense)


@torch.no_grad()
def test_chosen_k_is_applied_and_expected_error_is_that_of_the_layer(model):
    (item,) = images(1)
    with accelerate(model, min_tokens=1, num_levels=3, use_plan=False) as accelerated:
        found = calibrate_topk(model, [item], error=0.6)
        found.seconds = {
            name: dict.fromkeys(s, 1.0) | {0: 3.0} for name, s in found.seconds.items()
        }
        for name in found.errors:
            found[name] = found.within(name, 0.6)
        assert found.speedup() == pytest.approx(3)
        first = "blocks.0.attn"
        assert 1 < found[first] < 48
        set_topk(model, found)
        assert accelerated[first].topk == found[first]
        results = {}
        for k in (None, found[first]):
            set_topk(model, {first: k})
            hook = model.blocks[0].attn.norm.register_forward_hook(
                lambda _, args, out, k=k: results.__setitem__(k, args[0])
            )
            model(item)
            hook.remove()
        error = (results[found[first]] - results[None]).norm() / results[None].norm()
        assert found.error(first) == pytest.approx(float(error), rel=1e-4)
        assert "speed-up" in found.to_text() and found.to_dict()["error"] == 0.6


def test_mistakes(model):
    with pytest.raises(OptionError, match="models of accelerate"):
        calibrate_topk(model, images(1), error=0.1)
    with accelerate(model):
        with pytest.raises(OptionError, match="error must be above 0"):
            calibrate_topk(model, images(1), error=0.0)
        with pytest.raises(OptionError, match="at least one image"):
            calibrate_topk(model, [], error=0.1)
        with pytest.raises(OptionError, match="topk must be at least 1"):
            set_topk(model, {"blocks.0.attn": 0})
