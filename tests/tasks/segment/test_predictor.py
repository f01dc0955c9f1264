# SPDX-License-Identifier: Apache-2.0
"""Labels of images: at the size that was given, by whole images or windows, written and drawn."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

pytest.importorskip("timm", reason="models need timm")

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.tasks.segment import predictor
from quadtree_attention.tasks.segment.predictor import (
    Segmentation,
    Segmenter,
    best_classes,
    label_png,
)
from quadtree_attention.tasks.segment.sources import palette, read_label_map
from tests.tasks.segment.files import CLASSES, photo, write_weights

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "best.safetensors")


@pytest.fixture(scope="module")
def segmenter(weights):
    return Segmenter(weights, device="cpu")


def test_labels_are_the_best_class_of_every_pixel(segmenter):
    image = photo(45, 70)
    found = segmenter(image)
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
    mean, std = (
        torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    with torch.no_grad():
        probabilities = segmenter.model((pixels - mean) / std).softmax(dim=1)[0]
    assert found.labels.dtype == np.uint8 and found.labels.shape == (45, 70)
    assert np.array_equal(found.labels, probabilities.argmax(dim=0).numpy())
    assert len(np.unique(found.labels)) > 1
    assert found.confidence == pytest.approx(probabilities.amax(dim=0).mean().item(), abs=1e-5)
    assert (found.names, found.seen, found.image.size) == (CLASSES, (70, 45), (70, 45))
    assert found.palette[1] == (200, 100, 0)


def test_shares(segmenter):
    found = segmenter(photo(45, 70))
    shares = found.shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    for name, share in shares.items():
        assert share == (found.labels == CLASSES.index(name)).mean()


def test_size(weights, segmenter, tmp_path):
    image = photo(60, 90)
    small = Segmenter(weights, device="cpu", size=40)(image)
    assert small.labels.shape == (60, 90) and small.seen == (60, 40)
    assert not np.array_equal(small.labels, segmenter(image).labels)
    by_card = Segmenter(write_weights(tmp_path / "40.safetensors", base_size=40), device="cpu")
    assert np.array_equal(by_card(image).labels, small.labels)


def test_windows(weights, segmenter):
    image = photo(50, 90)
    whole = segmenter(image).labels
    covering = Segmenter(weights, device="cpu", sliding=96)(image)
    assert np.array_equal(covering.labels, whole)
    sliding = Segmenter(weights, device="cpu", sliding=(32, 24))(image)
    assert sliding.labels.shape == whole.shape and not np.array_equal(sliding.labels, whole)


def test_few_classes_at_a_time_are_all_at_once(monkeypatch):
    logits = torch.randn(7, 9, 11)
    size = (20, 31)
    large = F.interpolate(logits[None], size, mode="bilinear", align_corners=False)[0]
    monkeypatch.setattr(predictor, "_NUMBERS_AT_ONCE", 2 * 20 * 31)
    labels, confidence = best_classes(logits, size)
    assert torch.equal(labels, large.argmax(dim=0))
    assert confidence == pytest.approx(large.softmax(dim=0).amax(dim=0).mean().item(), abs=1e-6)


def test_label_maps_are_written_with_their_colours(segmenter, tmp_path):
    found = segmenter(photo(45, 70))
    found.save(tmp_path / "labels.png")
    assert np.array_equal(read_label_map(tmp_path / "labels.png"), found.labels)
    with Image.open(tmp_path / "labels.png") as picture:
        assert picture.mode == "P"
        colours = np.asarray(picture.convert("RGB"))
    assert np.array_equal(colours, np.array(found.palette, np.uint8)[found.labels])
    with pytest.raises(OptionError, match=r"label maps are written as \.png, got"):
        found.save(tmp_path / "labels.jpg")
    assert [path.name for path in tmp_path.iterdir()] == ["labels.png"]


def test_label_maps_of_many_classes(tmp_path):
    labels = np.arange(600, dtype=np.uint16).reshape(20, 30)
    (tmp_path / "a.png").write_bytes(label_png(labels, palette(600)))
    assert np.array_equal(read_label_map(tmp_path / "a.png"), labels)


def test_picture(segmenter, tmp_path):
    found = segmenter(photo(45, 70))
    picture = found.draw(tmp_path / "a.png", title="street")
    with Image.open(tmp_path / "a.png") as written:
        assert np.array_equal(np.asarray(written), np.asarray(picture))
    alone = Segmentation(found.labels, found.names, found.palette, found.confidence)
    with pytest.raises(OptionError, match="these labels have no image"):
        alone.draw()
    assert alone.draw(image=photo(45, 70)).size == picture.size


def test_names_without_a_card(weights, tmp_path):
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes(weights.read_bytes())
    found = Segmenter(bare, device="cpu")
    assert found.names == CLASSES and found.palette[0] == (10, 20, 30)  # inside the weights


def test_what_is_no_image(segmenter, tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none\.png"):
        segmenter(tmp_path / "none.png")


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (
            {"model": "test_quadtree", "kwargs": {}},
            "for the task classify, not for segment",
        ),
        ({"classes": ["a"]}, "must name the 3 classes of the model, got 1 names"),
        ({"palette": [[1, 2, 3]]}, "a colour of three bytes for each of 3 classes"),
        ({"palette": [[1, 2], [3], []]}, "a colour of three bytes for each of 3 classes"),
        ({"base_size": "big"}, "base_size in the card of .* must be pixels or null, got 'big'"),
    ],
)
def test_weights_that_do_not_do(tmp_path, card, message):
    path = write_weights(tmp_path / "bad.safetensors", **card)
    with pytest.raises(CheckpointError, match=message):
        Segmenter(path, device="cpu")


def test_weights_that_answer_nothing(weights, tmp_path):
    with pytest.raises(CheckpointError, match=r"must be a \.safetensors file"):
        Segmenter(__file__)
    with pytest.raises(CheckpointError, match="there is no file"):
        Segmenter(tmp_path / "none.safetensors")
    broken = Segmenter(weights, device="cpu")
    torch.nn.init.constant_(broken.model.classifier.bias, torch.nan)
    with pytest.raises(CheckpointError, match="answers nan"):
        broken(photo(20, 30))


@pytest.mark.parametrize("options", [{"size": 0}, {"sliding": 0}, {"sliding": (8, 9)}])
def test_options_that_do_not_do(weights, options):
    with pytest.raises(OptionError, match="must be at least 1 pixel"):
        Segmenter(weights, device="cpu", **options)
