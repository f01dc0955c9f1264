# SPDX-License-Identifier: Apache-2.0
"""Labels of images: at the size that was given, by whole images or windows."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quadtree_attention.errors import CheckpointError
from quadtree_attention.tasks.segment import predictor
from quadtree_attention.tasks.segment.predictor import Segmenter, best_classes
from quadtree_attention.viz.palette import distinct
from tests.support import raises
from tests.tasks.segment.files import CLASSES, photo, write_weights

pytestmark = pytest.mark.usefixtures("only_reference")


def load(path, **options):
    return Segmenter.from_pretrained(path, device="cpu", **options)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "best.safetensors")


@pytest.fixture(scope="module")
def segmenter(weights):
    return load(weights)


def test_labels_are_the_best_class_of_every_pixel(segmenter):
    image = photo(45, 70)
    found = segmenter(image)
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
    mean, std = (
        torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    with torch.no_grad():
        probabilities = segmenter.network((pixels - mean) / std).softmax(dim=1)[0]
    assert found.labels.dtype == np.uint8 and found.labels.shape == (45, 70)
    assert np.array_equal(found.labels, probabilities.argmax(dim=0).numpy())
    assert len(np.unique(found.labels)) > 1
    assert found.confidence == pytest.approx(probabilities.amax(dim=0).mean().item(), abs=1e-5)
    assert (found.names, found.seen, found.images[0].size) == (CLASSES, ((70, 45),), (70, 45))
    assert found.palette[1] == (200, 100, 0)


def test_size_and_windows(weights, segmenter, tmp_path):
    image = photo(60, 90)
    small = load(weights, shorter_side=40)(image)
    assert small.labels.shape == (60, 90) and small.seen == ((60, 40),)
    assert not np.array_equal(small.labels, segmenter(image).labels)
    assert np.array_equal(load(weights, size=60)(image).labels, small.labels)
    by_card = write_weights(tmp_path / "40.safetensors", base_size=40)
    assert np.array_equal(load(by_card)(image).labels, small.labels)
    assert load(by_card, size=80)(image).seen == ((80, 53),)  # the card's size gives way
    assert load(weights, shorter_side=80, size=60)(image).seen == ((60, 40),)
    options = {"size": None, "shorter_side": 40, "window": 32, "stride": 21}
    assert load(by_card, window=32).settings()["options"] == options
    image = photo(50, 90)
    whole = segmenter(image).labels
    assert np.array_equal(load(weights, window=96)(image).labels, whole)
    sliding = load(weights, window=32, stride=24)(image)
    assert sliding.labels.shape == whole.shape and not np.array_equal(sliding.labels, whole)


def test_images_of_one_batch(weights):
    """Of one size as the network sees them, of different sizes as given."""
    segmenter = load(weights, size=48)
    images = [photo(30, 40), photo(60, 80, seed=1), photo(44, 20, seed=2)]
    for image, found in zip(images, segmenter.many(images, batch=3), strict=True):
        alone = segmenter(image)
        assert found.labels.shape == image.shape[:2] and found.seen == alone.seen
        assert (found.labels == alone.labels).mean() > 0.99
        assert found.confidence == pytest.approx(alone.confidence, abs=1e-4)


def test_few_classes_at_a_time_are_all_at_once(monkeypatch):
    logits = torch.randn(7, 9, 11)
    size = (20, 31)
    large = F.interpolate(logits[None], size, mode="bilinear", align_corners=False)[0]
    monkeypatch.setattr(predictor, "_NUMBERS_AT_ONCE", 2 * 20 * 31)
    labels, confidence = best_classes(logits, size)
    assert torch.equal(labels, large.argmax(dim=0))
    assert confidence == pytest.approx(large.softmax(dim=0).amax(dim=0).mean().item(), abs=1e-6)


def test_a_card_without_names(tmp_path):
    found = load(write_weights(tmp_path / "bare.safetensors", classes=..., palette=...))
    assert found.names == ["0", "1", "2"] and found.palette == distinct(3)


def test_weights_that_answer_nothing(weights):
    broken = load(weights)
    torch.nn.init.constant_(broken.network.classifier.bias, torch.nan)
    raises(CheckpointError, "answers nan", broken, photo(20, 30))
