# SPDX-License-Identifier: Apache-2.0
"""K of accelerated models by the error of their layers."""

import pytest
import timm
import torch

from quadtree_attention import OptionError, accelerate, calibrate_topk, set_topk
from quadtree_attention.inspect import calibrate_error
from tests.support import raises


@pytest.fixture(scope="module")
def model():
    options = {"dynamic_img_size": True, "depth": 2, "global_pool": "avg"}
    network = timm.create_model("vit_tiny_patch16_224", **options).eval()
    with torch.no_grad():  # peaked attention that matters, and in which a few cells do
        for block in network.blocks:
            block.attn.qkv.weight[:384] *= 4
            block.attn.proj.weight *= 30
    return network


def images(count=2):
    return [torch.randn(1, 3, 192, 256) for _ in range(count)]


@torch.no_grad()
def test_nothing_is_chosen_that_is_not_faster(model, monkeypatch):
    monkeypatch.setattr(calibrate_error, "_now", lambda clock=[0.0]: clock[0])
    items = images()
    before = model(items[0])
    with accelerate(model, topk=1, min_tokens=1, num_levels=3) as accelerated:
        found = calibrate_topk(model, items, error=0.6)
        assert all(k is None for k in found.values())  # nothing was faster on that clock
        assert found.output_error == 0
        errors = found.errors["blocks.0.attn"]
        assert errors[48] < 1e-5 < errors[16] < errors[1]  # of 6x8 cells above the tokens
        for layer in accelerated.values():
            assert layer.topk == 1 and layer.probe is None and layer.by_plan
    assert torch.equal(model(items[0]), before)


@torch.no_grad()
@pytest.mark.parametrize("target", [0.15, 0.2])
def test_smallest_k_whose_output_is_within_the_error(model, target):
    items = images()
    dense = torch.cat([model(item) for item in items])

    def error_with(topk):
        set_topk(model, topk)
        return float((torch.cat([model(item) for item in items]) - dense).norm() / dense.norm())

    with accelerate(model, min_tokens=1, num_levels=3, use_plan=False):
        found = calibrate_error.calibrate_error(model, items, target, by_time=False)
        assert found.output_error == pytest.approx(error_with(found), rel=1e-4)
        assert target / 10 < found.output_error <= target
        for name, k in found.items():  # with the K before, the error is larger
            before = max((other for other in found.errors[name] if other < k), default=None)
            if before is not None:
                more = {**found, name: before}
                assert error_with(more) > found.output_error
        assert 1 < found["blocks.0.attn"] < 48
        name = "blocks.1.attn"  # its effect is that of its error on the output
        probed = calibrate_error._probed(found.errors[name])
        assert 0.1 < found.errors[name][probed] < 0.4
        alone = error_with(dict.fromkeys(found) | {name: probed})
        assert found.effects[name] * found.errors[name][probed] == pytest.approx(alone, rel=1e-4)
    rows = found.to_text().splitlines()
    assert rows[0].split() == ["layer", "K", "error", "speed-up"]
    assert rows[-1].split()[1] == f"{found.output_error:.4f}"
    assert found.to_dict()["output_error"] == round(found.output_error, 5)


@torch.no_grad()
def test_expected_error_of_a_layer_is_that_of_its_result(model):
    (item,) = images(1)
    with accelerate(model, min_tokens=1, num_levels=3, use_plan=False):
        found = calibrate_topk(model, [item], error=0.3)
        results, name = {}, "blocks.0.attn"
        for k in (None, 8):
            set_topk(model, {name: k})
            hook = model.blocks[0].attn.norm.register_forward_hook(
                lambda _, args, out, k=k: results.__setitem__(k, args[0])
            )
            model(item)
            hook.remove()
    error = (results[8] - results[None]).norm() / results[None].norm()
    assert found.errors[name][8] == pytest.approx(float(error), rel=1e-4)


@torch.no_grad()
def test_k_whose_output_misses_the_error_are_not_kept(model, monkeypatch):
    asked, choices = [], iter([32, 1, 32])

    def chosen(found, error, *_):
        asked.append(error)
        return dict.fromkeys(found, next(choices))

    monkeypatch.setattr(calibrate_error, "_chosen", chosen)
    with accelerate(model, min_tokens=1, num_levels=3, use_plan=False):
        found = calibrate_error.calibrate_error(model, images(), 0.2, by_time=False)
    assert set(found.values()) == {32} and found.output_error < 0.2
    assert asked[0] == 0.2 < asked[1]  # more was allowed, and then less again
    assert asked[0] < asked[2] < asked[1]


@torch.no_grad()
def test_outputs_that_cannot_be_compared(model):
    """Tensors whose shapes vary do not count; without others the errors of layers do."""

    class Selecting(torch.nn.Module):
        def __init__(self, scores):
            super().__init__()
            self.network, self.scores, self.calls = model, scores, 0

        def forward(self, x):
            self.calls += 1
            features = self.network(x)
            best = {"kept": features[0, : self.calls], "at": features.argmax(-1)}
            return best | ({"scores": features} if self.scores else {})

    found = {}
    for scores in (True, False):
        wrapped = Selecting(scores)
        with accelerate(wrapped, min_tokens=1, num_levels=3, use_plan=False):
            found[scores] = calibrate_error.calibrate_error(wrapped, images(1), 0.3, by_time=False)
    assert set(found[False].effects.values()) == {1.0} != set(found[True].effects.values())
    expected = sum(found[False].error(name) ** 2 for name in found[False]) ** 0.5
    assert found[False].output_error == pytest.approx(expected) and 0 < expected <= 0.3


def test_mistakes(model):
    raises(OptionError, "models of accelerate", calibrate_topk, model, images(1), error=0.1)
    with accelerate(model):
        raises(OptionError, "error must be above 0", calibrate_topk, model, images(1), error=0.0)
        raises(OptionError, "at least one image", calibrate_topk, model, [], error=0.1)
        items = [*images(1), torch.full((1, 3, 192, 256), torch.nan)]
        raises(OptionError, r"images\[1\] has NaN", calibrate_topk, model, items, error=0.1)
        raises(OptionError, "topk must be at least 1", set_topk, model, {"blocks.0.attn": 0})
