"""K by attention mass: large enough, not larger, and kept by files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from quadtree_attention import (
    OptionError,
    QuadtreeAttention,
    calibrate_topk,
    models,
    record,
    set_topk,
)
from quadtree_attention.models.weights import save_weights
from tests.support import raises

SMALL = {"dims": (16, 24, 32), "num_pairs": 1}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    network = models.create("loftr_quadtree_small", **SMALL).eval()
    for layer in network.coarse_transformer.layers:  # sharp enough to have something to lose
        layer.attn.scale = 30.0
    return network


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(1)
    return [
        {f"image{i}": torch.rand(1, 1, *size, generator=generator) for i in range(2)}
        for size in ((96, 128), (64, 80))
    ]


@torch.no_grad()
def test_the_kept_cells_carry_the_mass_and_one_less_does_not(model, images):
    found = calibrate_topk(model, images[:1], mass=0.8)
    assert len(found) == 2
    with record(model, layers=list(found)) as seen:
        model(images[0])
    for name, topk in found.items():
        goals = (0.9, 0.8)
        mass = seen[name].mass(topk, queries=256)
        assert mass == pytest.approx(found.mass(name), abs=1e-6)
        assert all(share >= goal - 1e-5 for share, goal in zip(mass, goals, strict=True))
        for level in range(2):
            if topk[level] > 1:
                fewer = list(topk)
                fewer[level] -= 1
                assert seen[name].mass(fewer, queries=256)[level] < goals[level]


def test_more_mass_needs_more_cells(model, images):
    low, high = (calibrate_topk(model, images, mass=mass) for mass in (0.3, 0.95))
    assert low.images == 2 and set(low) == set(high)
    for name in low:
        assert all(a <= b for a, b in zip(low[name], high[name], strict=True))
        assert low[name] != high[name]
        for curve in low.curves[name]:
            assert np.all(np.diff(curve) >= -1e-9) and curve[-1] <= 1 + 1e-6
    assert "0.3" in str(low.to_dict()["mass"])
    assert all(name in low.to_text() for name in low)


def test_the_model_keeps_its_own_k_and_a_file_remembers(model, images, tmp_path):
    before = {name: layer.topk for name, layer in model.named_modules() if hasattr(layer, "topk")}
    found = calibrate_topk(model, images[:1], mass=0.5)
    found.draw(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    after = {name: layer.topk for name, layer in model.named_modules() if hasattr(layer, "topk")}
    assert before == after
    card = {"model": "loftr_quadtree_small", "kwargs": SMALL, "topk": dict(found)}
    save_weights(tmp_path / "k.safetensors", model.state_dict(), card)
    loaded = models.load(tmp_path / "k.safetensors")
    for name, topk in found.items():
        assert loaded.get_submodule(name).topk == topk
    set_topk(model, found)
    try:
        assert all(model.get_submodule(name).topk == topk for name, topk in found.items())
    finally:
        set_topk(model, {name: before[name] for name in found})


def test_bad_arguments(model, images):
    linear, compiled = torch.nn.Linear(2, 2), torch.compile(QuadtreeAttention(16, 2))
    for message, options in (
        ("exactly one", {}),
        ("exactly one", {"mass": 0.9, "error": 0.1}),
        ("mass must be", {"mass": 0}),
        ("mass must be", {"mass": 1.5}),
        ("mass must be", {"mass": float("nan")}),
        ("accelerate", {"error": 0.1}),
    ):
        raises(OptionError, message, calibrate_topk, model, images, **options)
    raises(OptionError, "at least one image", calibrate_topk, model, [], mass=0.9)
    for wrong in (torch.rand(1, 1, 64, 80), Path("a.jpg"), images[0], None):
        raises(OptionError, "images must be a list", calibrate_topk, model, wrong, mass=0.9)
    pixels = np.zeros((64, 80))
    for wrong in ("a.jpg", Path("a.jpg"), pixels, {"image0": pixels}, (torch.rand(1, 3), 1), {}):
        text = rf"images\[0\] must be an input .*got {type(wrong).__name__}"
        raises(OptionError, text, calibrate_topk, model, [wrong], mass=0.9)
    byte = torch.zeros(1, 3, 64, 80, dtype=torch.uint8)
    raises(OptionError, "got torch.uint8", calibrate_topk, model, [byte], mass=0.9)
    raises(OptionError, "no quadtree layers", calibrate_topk, linear, images, mass=0.9)
    raises(OptionError, "eager", calibrate_topk, compiled, images, mass=0.9)
