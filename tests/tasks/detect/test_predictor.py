# SPDX-License-Identifier: Apache-2.0
"""The detector for images of any kind, what it gives back, and weights it cannot use."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.models.registry import create
from quadtree_attention.models.weights import read_checkpoint
from quadtree_attention.tasks.detect.predictor import Detector
from quadtree_attention.tasks.detect.result import Detections
from quadtree_attention.tasks.detect.rle import decode_mask
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


def detector(path, **options):
    return Detector.from_pretrained(path, device="cpu", **{"threshold": 0.0, **options})


def test_what_the_model_finds(folder, image):
    found = detector(folder / "boxes.safetensors")(image)
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
    assert (np.diff(found.scores) <= 0).all()  # highest score first
    assert found.boxes[:, 2].max() <= 70 and found.boxes[:, 3].max() <= 45  # pixels as given
    assert found.masks is None and found.images == (image,) and found.seconds > 0
    assert found.seen == ((64, 41),)  # the longer side is the limit


def test_score_and_size(folder, image):
    path = folder / "boxes.safetensors"
    everything = detector(path)(image)
    limit = float(np.median(everything.scores))
    some = detector(path, threshold=limit)(image)
    assert 0 < len(some) < len(everything) and some.scores.min() >= limit
    larger = detector(path, shorter_side=96)
    assert larger.sides == (96, 128)
    assert not np.allclose(larger(image).scores[:5], everything.scores[:5])
    for options, size in (
        ({"size": 96}, (96, 61)),
        ({"size": 96, "shorter_side": 32}, (49, 32)),
        ({"shorter_side": 32}, (43, 27)),  # the longer side is limited to 43
    ):
        found = detector(path, **options)(image)
        assert found.seen == (size,), options


def test_seen_is_what_the_network_sees(folder, image, monkeypatch):
    detect = detector(folder / "boxes.safetensors", size=57)
    sizes = []
    backbone = type(detect.network.backbone)
    original = backbone.forward
    monkeypatch.setattr(
        backbone, "forward", lambda self, x: sizes.append(x.image_sizes) or original(self, x)
    )
    for shape in ((70, 45), (45, 70), (3, 400), (61, 61)):
        found = detect(image.resize(shape))
        (height, width) = sizes.pop()[0]
        assert found.seen == ((width, height),)


def test_masks_are_made_of_what_is_reported_alone(folder, image):
    """A photograph has room for few masks of its size; what is left is the same."""
    path = folder / "masks.safetensors"
    everything = detector(path)(image)
    limit = float(everything.scores[len(everything) // 2])
    detect = detector(path, threshold=limit)
    with torch.inference_mode():
        (raw,) = detect.forward([detect.preprocess(image)])
    kept = everything.scores >= limit
    assert 0 < kept.sum() < len(everything) and len(raw["masks"]) == kept.sum()
    some = detect(image)
    assert np.array_equal(some.boxes, everything.boxes[kept])
    assert np.array_equal(some.masks, everything.masks[kept])


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_the_network_is_not_changed(folder, image, kind):
    """Threshold and sizes are arguments of its forward pass."""
    own = detector(folder / f"{kind}.safetensors")
    other = Detector(own.network, own.card, device="cpu", threshold=0.9, size=40)
    before = own(image)
    assert other(image).seen == ((40, 25),) and other(image).scores.min(initial=1) >= 0.9
    assert (own.network.transform.min_size, own.network.transform.max_size) == ((48,), 64)
    after = own(image)
    assert after.seen == before.seen == ((64, 41),)
    assert np.array_equal(after.boxes, before.boxes)


def test_masks_and_dicts(folder, image):
    found = detector(folder / "masks.safetensors")(image)
    assert len(found) > 0
    assert found.masks.shape == (len(found), 45, 70) and found.masks.dtype == bool
    assert found.to_dict().keys() == {"width", "height", "objects", "seconds"}
    listed = json.loads(json.dumps(found.to_dict()))["objects"]
    assert [entry["name"] for entry in listed] == list(found.names)
    for i, entry in enumerate(listed):
        assert np.allclose(entry["box"], found.boxes[i], atol=1e-3)
        assert entry["score"] == pytest.approx(found.scores[i], abs=1e-6)
        assert (decode_mask(entry["segmentation"], 45, 70) == found.masks[i]).all()


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_results_are_saved_and_loaded(folder, image, tmp_path, kind):
    detect = detector(folder / f"{kind}.safetensors")
    found = detect(image)
    found.save(tmp_path / "a.json")
    loaded = Detections.load(tmp_path / "a.json")
    assert len(loaded) == len(found) > 0 and loaded.names == found.names
    assert np.array_equal(loaded.labels, found.labels)
    assert np.allclose(loaded.boxes, found.boxes, atol=2e-3)
    assert np.allclose(loaded.scores, found.scores, atol=1e-6)
    assert loaded.segmentations == found.segmentations
    assert kind == "boxes" or np.array_equal(loaded.masks, found.masks)
    Detector(detect.network, detect.card, threshold=1.0)(image).save(tmp_path / "b.json")
    assert len(Detections.load(tmp_path / "b.json")) == 0
    first, _ = detect.many([image, image.crop((0, 0, 30, 45))], batch=2)
    assert np.allclose(first.boxes, found.boxes, atol=1e-3)
