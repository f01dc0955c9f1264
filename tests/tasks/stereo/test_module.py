# SPDX-License-Identifier: Apache-2.0
"""A stereo network that learns from synthetic pairs."""

import torch

from quadtree_attention.errors import CheckpointError
from quadtree_attention.files import file_sha256
from quadtree_attention.models import registry
from quadtree_attention.models.weights import read_checkpoint
from quadtree_attention.nn.renamed import with_new_names
from quadtree_attention.tasks.stereo.data import SyntheticStereoData
from quadtree_attention.tasks.stereo.losses import stereo_losses
from quadtree_attention.tasks.stereo.module import LOGGED, StereoModule
from tests.conftest import ROOT
from tests.support import raises
from tests.support.training import train

RECIPE = ROOT / "recipes" / "stereo" / "debug.yaml"


def test_debug_recipe(tmp_path):
    """Trains, stops, goes on, and leaves weights that the network takes."""
    folder = tmp_path / "run"
    train("stereo", RECIPE, folder, "--data.pairs=8", "--trainer.max_epochs=1")
    rows = train("stereo", RECIPE, folder, "--data.pairs=8", "--resume")
    assert [row["epoch"] for row in rows] == ["1", "2"]
    names = {"train/loss", "train/assignment", "train/raw", "train/disparity", "train/occlusion"}
    names |= {f"val/{name}" for name in LOGGED} | {"val/good3"}
    assert names <= rows[0].keys()
    assert all(float(row[name]) >= 0 for row in rows for name in names)
    registry.load(folder / "best.safetensors", task="stereo")


def test_starting_from_the_weights_of_the_package():
    path = registry.weights_path(None, "stereo")
    module = StereoModule(weights="default")
    for name, tensor in with_new_names(module.model, read_checkpoint(path)).items():
        assert torch.equal(module.model.state_dict()[name], tensor.float())
    assert module.start == file_sha256(path)
    assert StereoModule().start is None
    raises(CheckpointError, "does not fit STTR", StereoModule, "sttr", weights="default")


def test_compiled_convolutions_keep_their_names():
    module, compiled = StereoModule(), StereoModule(compile=True)
    assert compiled.state_dict().keys() == module.state_dict().keys()
    for part in (compiled.model.features, compiled.model.refinement):
        assert part._compiled_call_impl is not None


def test_it_learns():
    """A narrow network, on two pairs over and over: far better than no disparity at all."""
    torch.manual_seed(0)
    scene = {"objects": [1, 2], "samples": 1, "photometric": 0.0, "textureless": 0.0}
    sizes = {"procedural": 4, "texture_size": 64, "height": 32, "width": 64, "batch_size": 2}
    data = SyntheticStereoData(**sizes, scene=scene)
    data.setup()
    batch = data.on_after_batch_transfer({"indices": torch.arange(2), "training": True}, 0)
    narrow = {"dims": (8, 16, 16, 16), "dim": 16, "refine_dim": 8, "context": (8, 8, 8, 8)}
    narrow |= {"num_heads": 2, "num_layers": 1, "num_levels": 2, "layout": "hourglass"}
    model = registry.create("sttr_quadtree", **narrow)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        output = model(batch, true_disparity=batch["disparity0"])
        loss = sum(stereo_losses(output, batch, model.at_cells).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0]
    away = (output.disparity - batch["disparity0"]).abs()[batch["visible0"]].mean().item()
    assert away < 0.5 * batch["disparity0"][batch["visible0"]].mean().item()
