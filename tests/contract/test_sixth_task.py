# SPDX-License-Identifier: Apache-2.0
"""A sixth task takes the steps of CONTRIBUTING.md and no change of shared code."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

import quadtree_attention.tasks
from quadtree_attention.models import registry
from quadtree_attention.tasks import contract, evaluate, train
from quadtree_attention.tasks.store import Store
from tests.contract.toy import network

LEVELS = (0, 64, 128, 192)
RECIPE = """
task: toy
model: {model: toy_brightness}
trainer: {max_epochs: 12, accelerator: cpu, devices: 1, enable_progress_bar: false}
variants:
  plain: {}
  short: {trainer: {max_epochs: 1}}
"""


@pytest.fixture
def _toy(monkeypatch):
    """The task where a real one would be: its folder, its name, its network."""
    folder = str(Path(__file__).parent)
    monkeypatch.setattr(
        quadtree_attention.tasks, "__path__", [*quadtree_attention.tasks.__path__, folder]
    )
    monkeypatch.setattr(contract, "NAMES", (*contract.NAMES, "toy"))
    monkeypatch.setitem(sys.modules, "quadtree_attention.models.toy", network)
    monkeypatch.setitem(registry.SPECS, "toy_brightness", registry.Spec("toy", "toy:Brightness"))
    yield
    for name in [name for name in sys.modules if name.startswith("quadtree_attention.tasks.toy")]:
        del sys.modules[name]


@pytest.fixture
def data(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    for level in LEVELS:
        Image.fromarray(np.full((9, 12, 3), level, np.uint8)).save(root / f"{level}.png")
    content = {str(level): level / 255 for level in LEVELS}
    (root / "brightness.json").write_text(json.dumps(content))
    return root


@pytest.mark.usefixtures("_toy")
def test_it_is_trained_used_and_evaluated(data, tmp_path):
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(RECIPE)
    run = train(recipe, run_dir=tmp_path / "run", data={"root": str(data)})
    task = contract.get_task("toy")
    photometer = task.load("predictor").from_pretrained(run.weights)
    found = photometer(data / "128.png")
    assert found.value == pytest.approx(128 / 255, abs=0.1)
    found.save(tmp_path / "one.json")
    assert type(found).load(tmp_path / "one.json").value == found.value
    assert found.draw(tmp_path / "one.png").size == (12, 9)
    values = [result.value for result in photometer.many(sorted(data.glob("*.png")), batch=3)]
    assert len(values) == len(LEVELS)
    scores = evaluate("toy", run.weights, data=data, save=tmp_path / "saved")
    assert scores.mean["error"] < 0.1 and "mean" in scores.to_text()
    again = evaluate("toy", data=data, predictions=tmp_path / "saved")
    assert again.to_dict() == scores.to_dict()
    store = Store.open(tmp_path / "saved", task)
    assert store.get("64").value == pytest.approx(photometer(data / "64.png").value)
