# SPDX-License-Identifier: Apache-2.0
"""Training: the loss, schedules, runs that are stopped and go on, what the weights say."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from quadtree_attention import models
from quadtree_attention.errors import CheckpointError
from quadtree_attention.models.weights import save_weights
from quadtree_attention.tasks.evaluation import evaluate
from quadtree_attention.tasks.segment.data import GeneratedSegmentData
from quadtree_attention.tasks.segment.metrics import IGNORE, SegmentMetric
from quadtree_attention.tasks.segment.module import SegmentModule, at_size, equal_sizes, pixel_loss
from quadtree_attention.tasks.segment.predictor import Segmenter
from tests.support import raises
from tests.support.training import train
from tests.tasks.segment.files import CLASSES, write_set

pytestmark = pytest.mark.usefixtures("only_reference")
OPTIONS = {"channels": 8, "head_channels": 8, "topk": 4, "depths": [1, 1, 1, 1]}


def module(**options):
    usual = {"options": OPTIONS, "num_classes": 4, "lr": 1e-3, "seed": 1}
    return SegmentModule("semfpn_test_quadtree", **{**usual, **options})


def data(**options):
    usual = {"generated_count": 8, "generated_size": 32, "height": 32, "width": 32}
    return GeneratedSegmentData(batch_size=4, workers=0, **{**usual, **options})


def test_pixels_without_a_class_do_not_count():
    logits, labels = torch.randn(2, 3, 5, 7), torch.randint(0, 3, (2, 5, 7), dtype=torch.int16)
    labels[0, :3] = IGNORE
    seen = labels != IGNORE
    expected = F.cross_entropy(logits.movedim(1, -1)[seen], labels[seen].long())
    torch.testing.assert_close(pixel_loss(logits, labels), expected)
    nothing = pixel_loss(logits.requires_grad_(), torch.full_like(labels, IGNORE))
    nothing.backward()
    assert nothing == 0 and not logits.grad.any()
    assert module().scores(SegmentMetric(SimpleNamespace(classes=CLASSES))) == {}


def test_images_of_one_size_go_together():
    shapes = [(8, 9), (4, 5), (8, 9)]
    batch = {
        "images": [torch.full((3, *s), i) for i, s in enumerate(shapes)],
        "labels": [torch.full(s, i) for i, s in enumerate(shapes)],
    }
    first, second = equal_sizes(batch)
    assert first[0].shape == (2, 3, 8, 9) and second[0].shape == (1, 3, 4, 5)
    assert first[1][:, 0, 0].tolist() == [0, 2] == first[0][:, 0, 0, 0].tolist()
    assert at_size(torch.zeros(1, 4, 20, 30), torch.zeros(1, 31, 47)).shape == (1, 4, 31, 47)


def test_weights_score_what_training_said(tmp_path, capsys):
    """Through the command: a recipe that steps end, then the two loops of evaluation."""
    root = write_set(tmp_path / "data", count=4)
    (root / "images/train/3.png").write_bytes(b"hello")
    classifier = models.create("test_quadtree", depths=(1, 1, 1, 1), num_classes=2)
    card = {"model": "test_quadtree", "kwargs": {"num_classes": 2}}
    backbone = tmp_path / "backbone.safetensors"
    save_weights(backbone, classifier.state_dict(), card)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{model: semfpn_test_quadtree, options: {json.dumps(OPTIONS)}, lr: 1e-2,"
        f" backbone_weights: {backbone}}}\n"
        f"data: {{root: {root}, height: 32, width: 32, base_size: 32, batch_size: 2,"
        " eval_batch_size: 3, workers: 0}\n"
        "trainer: {max_steps: 5, val_check_interval: 3, check_val_every_n_epoch: null,"
        " accelerator: cpu}\n"
    )
    rows = [row for row in train("segment", recipe, tmp_path / "run") if row["val/miou"]]
    assert "skipped 1 unusable files so far: cannot decode" in capsys.readouterr().err
    weights = tmp_path / "run" / "best.safetensors"
    segmenter = Segmenter.from_pretrained(weights, device="cpu")
    assert segmenter.names == CLASSES and segmenter.preprocess.shorter_side == 32
    assert segmenter.card["pretrained"]["backbone"] == "backbone.safetensors"
    found = evaluate("segment", weights, data=root, save=tmp_path / "out", device="cpu")
    # images are scaled by the same code, one or three at a time
    miou = pytest.approx(found.mean["miou"], abs=0.05)
    assert max(float(row["val/miou"]) for row in rows) == miou
    assert segmenter.card["metrics"]["val/miou"] == miou


def test_weights_of_another_backbone(tmp_path):
    wide = models.create("test_quadtree", embed_dims=(16, 16, 24, 32), num_classes=0)
    path = tmp_path / "wide.safetensors"
    save_weights(path, wide.state_dict(), {"model": "test_quadtree", "kwargs": {}})
    raises(CheckpointError, "mismatched: patch_embed", module, backbone_weights=str(path))
