# SPDX-License-Identifier: Apache-2.0
"""The detector for images of any kind, what it gives back, and weights it cannot use."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("timm", reason="models need timm")

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.models.registry import create, weights_path
from quadtree_attention.models.weights import card_path, read_checkpoint
from quadtree_attention.tasks.detect.masks import decode_mask
from quadtree_attention.tasks.detect.predictor import Detector
from tests.tasks.detect.files import write_weights

pytestmark = pytest.mark.usefixtures("only_reference")
NAMES = ["square", "disc", "star"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(1)
    write_weights(folder / "boxes.safetensors")
    write_weights(folder / "masks.safetensors", "mask_rcnn")
    return folder


@pytest.fixture(scope="module")
def image():
    pixels = np.random.default_rng(0).integers(0, 255, (45, 70, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_what_the_model_finds(folder, image):
    found = Detector(folder / "boxes.safetensors", device="cpu", score=0.0)(image)
    options = {"min_size": 48, "max_size": 64, "channels": 16, "score_thresh": 0.0}
    model = create("retinanet_test_quadtree", num_classes=3, **options)
    model.load_state_dict(read_checkpoint(folder / "boxes.safetensors"))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    with torch.no_grad():
        (expected,) = model.eval()([pixels])
    assert len(found) == len(expected["scores"]) > 0
    assert np.allclose(found.boxes, expected["boxes"], atol=1e-4)
    assert np.allclose(found.scores, expected["scores"], atol=1e-6)
    assert found.names == tuple(NAMES[label - 1] for label in expected["labels"])
    assert (np.diff(found.scores) <= 0).all()  # surest first
    assert found.boxes[:, 2].max() <= 70 and found.boxes[:, 3].max() <= 45  # pixels as given
    assert found.masks is None and found.image is not None and found.seconds > 0


def test_score_and_size(folder, image):
    path = folder / "boxes.safetensors"
    everything = Detector(path, device="cpu", score=0.0)(image)
    limit = float(np.median(everything.scores))
    some = Detector(path, device="cpu", score=limit)(image)
    assert 0 < len(some) < len(everything) and some.scores.min() >= limit
    larger = Detector(path, device="cpu", score=0.0, size=96)
    assert (larger.size, larger.max_size) == (96, 128)
    assert not np.allclose(larger(image).scores[:5], everything.scores[:5])


def test_masks_are_made_of_what_is_reported_alone(folder, image):
    """A photograph has room for few masks of its size; what is left is the same."""
    path = folder / "masks.safetensors"
    everything = Detector(path, device="cpu", score=0.0)(image)
    limit = float(everything.scores[len(everything) // 2])
    detect = Detector(path, device="cpu", score=limit)
    with torch.no_grad():
        (raw,) = detect.model([torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255])
    kept = everything.scores >= limit
    assert 0 < kept.sum() < len(everything) and len(raw["masks"]) == kept.sum()
    some = detect(image)
    assert np.array_equal(some.boxes, everything.boxes[kept])
    assert np.array_equal(some.masks, everything.masks[kept])
    assert Detector(path, device="cpu", score=0.0).model.roi_heads.score_thresh == 0  # its own
    boxes = Detector(folder / "boxes.safetensors", device="cpu", score=0.7).model
    assert boxes.score_thresh == pytest.approx(0.7, abs=1e-6)


def test_masks_and_dicts(folder, image):
    found = Detector(folder / "masks.safetensors", device="cpu", score=0.0)(image)
    assert len(found) > 0
    assert found.masks.shape == (len(found), 45, 70) and found.masks.dtype == bool
    listed = json.loads(json.dumps(found.as_dicts()))
    assert [entry["name"] for entry in listed] == list(found.names)
    for i, entry in enumerate(listed):
        assert np.allclose(entry["box"], found.boxes[i], atol=1e-3)
        assert entry["score"] == pytest.approx(found.scores[i], abs=1e-6)
        assert (decode_mask(entry["segmentation"], 45, 70) == found.masks[i]).all()


def test_images_of_all_kinds(folder, image, tmp_path):
    detect = Detector(folder / "boxes.safetensors", device="cpu", score=0.0)
    image.save(tmp_path / "image.png")
    pixels = np.array(image)
    kinds = [
        tmp_path / "image.png",
        pixels,
        pixels / 255,
        torch.from_numpy(pixels).permute(2, 0, 1),
    ]
    expected = detect(image)
    for kind in kinds:
        assert np.array_equal(detect(kind).boxes, expected.boxes)
    with pytest.raises(DataError, match="cannot read"):
        detect(tmp_path / "none.png")
    together = detect.many([image, image.crop((0, 0, 30, 45))])
    assert np.allclose(together[0].boxes, expected.boxes, atol=1e-3)


def test_names_without_a_card(folder, tmp_path):
    alone = shutil.copy(folder / "boxes.safetensors", tmp_path)
    assert Detector(alone, device="cpu").names == ["square", "disc", "star"]  # inside them


def test_weights_that_do_not_do(folder, tmp_path):
    with pytest.raises(CheckpointError, match="there is no file"):
        Detector(tmp_path / "none.safetensors")
    (tmp_path / "last.ckpt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"must be a \.safetensors file"):
        Detector(tmp_path / "last.ckpt")
    path = shutil.copy(folder / "boxes.safetensors", tmp_path)
    card = json.loads(card_path(folder / "boxes.safetensors").read_text())
    stereo = weights_path(None, "stereo")
    with pytest.raises(CheckpointError, match="weights for the task stereo, not for detect"):
        Detector(stereo)
    card_path(path).write_text(json.dumps({**card, "classes": ["one"]}))
    with pytest.raises(CheckpointError, match="must name the 3 classes of the model, got 1 names"):
        Detector(path)


def test_options_that_do_not_do(folder):
    with pytest.raises(OptionError, match="score must be between 0 and 1, got 50"):
        Detector(folder / "boxes.safetensors", score=50)
    with pytest.raises(OptionError, match="size must be at least 1"):
        Detector(folder / "boxes.safetensors", size=0)
    with pytest.raises(OptionError, match="there is no device 'tpu'"):
        Detector(folder / "boxes.safetensors", device="tpu")
