"""K by attention mass: large enough, not larger, and kept by files."""

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


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    network = models.create("loftr_quadtree_small", dims=(16, 24, 32), num_pairs=1).eval()
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
    after = {name: layer.topk for name, layer in model.named_modules() if hasattr(layer, "topk")}
    assert before == after
    card = {
        "model": "loftr_quadtree_small",
        "kwargs": {"dims": (16, 24, 32), "num_pairs": 1},
        "topk": dict(found),
    }
    save_weights(tmp_path / "k.safetensors", model.state_dict(), card)
    loaded = models.load(tmp_path / "k.safetensors")
    for name, topk in found.items():
        assert loaded.get_submodule(name).topk == topk
    set_topk(model, found)
    try:
        assert all(model.get_submodule(name).topk == topk for name, topk in found.items())
    finally:
        set_topk(model, {name: before[name] for name in found})


def test_a_picture(model, images, tmp_path):
    calibrate_topk(model, images[:1], mass=0.5).draw(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_bad_arguments(model, images):
    for options in ({}, {"mass": 0.9, "error": 0.1}):
        with pytest.raises(OptionError, match="exactly one"):
            calibrate_topk(model, images, **options)
    for mass in (0, 1.5, float("nan")):
        with pytest.raises(OptionError, match="mass must be"):
            calibrate_topk(model, images, mass=mass)
    with pytest.raises(OptionError, match="at least one image"):
        calibrate_topk(model, [], mass=0.9)
    with pytest.raises(OptionError, match="no quadtree layers"):
        calibrate_topk(torch.nn.Linear(2, 2), images, mass=0.9)
    with pytest.raises(OptionError, match="accelerate"):
        calibrate_topk(model, images, error=0.1)
    with pytest.raises(OptionError, match="eager"):
        calibrate_topk(torch.compile(QuadtreeAttention(16, 2)), images, mass=0.9)
