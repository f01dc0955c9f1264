# SPDX-License-Identifier: Apache-2.0
"""Synthetic pairs in batches, and a matcher that learns from them."""

import sys

import pytest
import torch

from quadtree_attention.errors import CheckpointError
from quadtree_attention.models.registry import create
from quadtree_attention.models.weights import save_weights
from quadtree_attention.tasks.match.data import MOTION, MatchData, grey
from quadtree_attention.tasks.match.metrics import MatchMetric
from quadtree_attention.tasks.match.module import MatchModule, add_poses, correct, f_scores, views
from quadtree_attention.tasks.match.truth import true_matches, view_from_flow
from quadtree_attention.tasks.training.loader import Draw
from tests.conftest import ROOT
from tests.support import tiny
from tests.support.training import train

RECIPE = ROOT / "recipes" / "match" / "debug.yaml"
SMALL = tiny.NETWORKS["match"][1]


@pytest.fixture(scope="module")
def data():
    scene = {"objects": [1, 3], "samples": 1, "photometric": 0.0}
    made = MatchData(
        procedural=8, texture_size=64, height=64, width=80, pairs=8, val_pairs=2, batch_size=4,
        planes=0.4, scene=scene,
    )  # fmt: skip
    made.setup()
    return made


def batch_of(data, loader, draws):
    return data.on_after_batch_transfer(loader.dataset.__getitems__(draws), 0)


def test_planes_and_scenes_are_mixed(data):
    loader = data.train_dataloader()
    batch = batch_of(data, loader, [Draw(0, i) for i in range(8)])
    assert batch["image0"].shape == (8, 3, 64, 80)
    assert batch["visible0"].any(dim=2).any(dim=1).all()
    # a homography has a projective flow: 3 x 3 numbers explain it, as no scene with objects does
    residuals = [projective_residual(flow) for flow in batch["flow0to1"]]
    assert min(residuals) < 1e-2 < 0.5 < max(residuals)


def pose_errors(found, batch):
    metric = MatchMetric(estimators=("poselib",))
    add_poses(metric, found | {"confidence": torch.ones(len(found["keypoints0"]))}, batch)
    return [row["error_poselib"] for row in metric.rows]


def projective_residual(flow):
    """How far a flow (H, W, 2) is from the best homography, in pixels."""
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(80.0), indexing="ij")
    target = torch.stack([x, y], dim=-1) + flow
    near = target.abs().amax(dim=-1) < 500
    x, y, (u, v) = x[near].double(), y[near].double(), target[near].double().unbind(dim=-1)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    rows = torch.cat([
        torch.stack([x, y, one, zero, zero, zero, -u * x, -u * y], dim=1),
        torch.stack([zero, zero, zero, x, y, one, -v * x, -v * y], dim=1),
    ])  # fmt: skip
    aim = torch.cat([u, v])
    solution = torch.linalg.lstsq(rows, aim).solution
    return (rows @ solution - aim).abs().mean().item()


def test_curriculum_grows_the_motion():
    data = MatchData(curriculum_epochs=4, start=0.25)
    spans = [data._harder(epoch) for epoch in (0, 2, 4)]
    assert spans[2] == data.scene
    for name in MOTION[:3]:
        low, middle, full = (getattr(span, name)[1] for span in spans)
        assert low == pytest.approx(0.25 * full) and low < middle < full
    assert 1 < spans[0].focal_ratio[1] < spans[2].focal_ratio[1]


def test_true_matches_are_correct_and_give_the_pose(data):
    batch = batch_of(data, data.val_dataloader(), [Draw(0, 0), Draw(0, 1)])
    view0, view1 = views(batch)
    truth, points = true_matches(view0, view1, 4)
    columns = (80 + 3) // 4
    points0 = torch.stack([truth.cells0 % columns, truth.cells0 // columns], dim=1) * 4.0
    found = {"keypoints0": points0, "keypoints1": points, "batch_indexes": truth.batch_indexes}
    assert correct(found, view0).all()
    assert max(pose_errors(found, batch)) < 1.0
    wrong = found | {"keypoints1": points + 4.0}
    assert not correct(wrong, view0).any()
    nothing = {name: value[:0] for name, value in found.items()}
    assert pose_errors(nothing, batch) == [float("inf")] * 2
    still = view_from_flow(torch.zeros(1, 9, 17, 2), torch.ones(1, 9, 17, dtype=torch.bool))
    points = torch.tensor([[-2.0, -1.0], [18.0, 10.0]])
    found = {"keypoints0": points, "keypoints1": points}
    assert correct(found | {"batch_indexes": torch.zeros(2).long()}, still).all()


def test_f_score_counts_wrong_and_missing_matches(data):
    batch = batch_of(data, data.val_dataloader(), [Draw(0, 0), Draw(0, 1)])
    view0, view1 = views(batch)
    truth, points = true_matches(view0, view1, 8)
    points0 = torch.stack([truth.cells0 % 10, truth.cells0 // 10], dim=1) * 8.0
    found = {"keypoints0": points0, "keypoints1": points, "batch_indexes": truth.batch_indexes}

    def scores(found):
        return f_scores(found, correct(found, view0), truth, 2).tolist()

    assert scores(found) == [1.0, 1.0]
    first = truth.batch_indexes == 0
    none_of_second = {name: value[first] for name, value in found.items()}
    assert scores(none_of_second) == [1.0, 0.0]
    moved = found | {"keypoints1": torch.where(first[:, None], points, points + 4)}
    assert scores(moved) == [1.0, 0.0]
    half = {name: value[::2] for name, value in found.items()}
    there, true = len(half["batch_indexes"]), len(first)
    assert sum(scores(half)) / 2 == pytest.approx(2 * there / (there + true), abs=0.02)
    nothing = {name: value[:0] for name, value in found.items()}
    assert scores(nothing) == [0.0, 0.0]


def test_grey_weighs_colours():
    assert grey(torch.ones(1, 3, 2, 2)).allclose(torch.ones(1, 1, 2, 2))
    assert grey(torch.eye(3).view(3, 3, 1, 1)).flatten().tolist() == pytest.approx(
        [0.299, 0.587, 0.114]
    )


def test_a_batch_can_be_learnt(data):
    """The loss falls on a batch that is shown again and again, whatever the number of threads."""
    batch = batch_of(data, data.train_dataloader(), [Draw(0, 0), Draw(0, 1)])
    module = MatchModule(options=SMALL | {"num_levels": 2, "topk": 4}, fine_matches=32)
    module.log = lambda *args, **options: None
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    losses = []
    for step in range(30):
        torch.manual_seed(0)  # the fine stage learns from the same matches in every step
        loss = module.training_step(batch, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)  # as in recipes
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in module.model.parameters() if p.requires_grad)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_trains_without_estimators(tmp_path, monkeypatch, capsys):
    """The best epoch is told by what needs no estimator; their scores are left out, and said so."""
    monkeypatch.setitem(sys.modules, "poselib", None)  # what an import finds if it is not installed
    short = ("--trainer.max_epochs=1", "--data.pairs=4")
    (row,) = train("match", RECIPE, tmp_path / "run", *short)
    assert {"val/fscore", "val/matches"} <= set(row) and "val/auc10" not in row
    assert (tmp_path / "run" / "best.safetensors").exists()
    said = capsys.readouterr().err
    assert said.count("validation leaves out val/auc5") == 1
    assert "needs poselib, which is not installed" in said


def test_cnn_of_other_weights_is_not_trained(data, tmp_path):
    """It stays in evaluation, with the statistics of its norms; all else learns."""
    torch.manual_seed(5)
    other = create("loftr_quadtree_small", **SMALL)
    for norm in (m for m in other.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        norm.running_mean.fill_(0.5)
    card = {"model": "loftr_quadtree_small", "kwargs": {}, "task": "match"}
    path = tmp_path / "other.safetensors"
    save_weights(path, other.state_dict(), card)
    module = MatchModule(options=SMALL, cnn=str(path)).train()
    cnn = module.model.backbone
    before = {name: tensor.clone() for name, tensor in cnn.state_dict().items()}
    assert all(torch.equal(x, before[k]) for k, x in other.backbone.state_dict().items())
    assert module.model.training and not cnn.training and module.start is not None
    batch = batch_of(data, data.train_dataloader(), [Draw(0, i) for i in range(2)])
    module.losses(batch)[0].backward()
    assert all(parameter.grad is None for parameter in cnn.parameters())
    assert all(p.grad is not None for p in module.model.coarse_transformer.parameters())
    assert all(torch.equal(x, before[k]) for k, x in cnn.state_dict().items())
    with pytest.raises(CheckpointError):
        MatchModule(options=SMALL | {"dims": (16, 24, 40)}, cnn=str(path))
