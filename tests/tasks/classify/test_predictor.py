# SPDX-License-Identifier: Apache-2.0
"""The predictor: all kinds of images and weights, against the model called directly."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.errors import CheckpointError
from quadtree_attention.models.registry import load
from quadtree_attention.tasks.classify.data import GeneratedClassifyData
from quadtree_attention.tasks.classify.predictor import Classifier
from tests.support import raises, tiny

pytestmark = pytest.mark.usefixtures("only_reference")

CLASSES = ["ant", "bee", "cat", "dog"]
SIZE, CROP = 48, 0.9
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def write_weights(path: Path, **card: object) -> Path:
    """Weights as training writes them; entries of the card that are ... are left out."""
    own = {"kwargs": {"num_classes": 4}, "classes": CLASSES, "image_size": SIZE, "eval_crop": CROP}
    return tiny.write_weights("classify", path, **own | card)


def pixels(height: int = 70, width: int = 45) -> np.ndarray:
    return np.asarray(tiny.picture(0, (width, height)))


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "best.safetensors")


@pytest.fixture(scope="module")
def classifier(weights) -> Classifier:
    return Classifier.from_pretrained(weights, device="cpu")


def prepared(classifier: Classifier, image: object) -> torch.Tensor:
    return classifier.preprocess(image).inputs[0]


def prepared_by_hand(image: Image.Image) -> torch.Tensor:
    """Short side to 53 = floor(48 / 0.9) pixels, the middle of it, normalised."""
    short = 53
    scale = short / min(image.size)
    width, height = (max(short, int(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - SIZE) / 2), round((height - SIZE) / 2)
    image = image.crop((left, top, left + SIZE, top + SIZE))
    values = (np.asarray(image) / 255 - MEAN) / STD
    return torch.from_numpy(values).permute(2, 0, 1).float()


@pytest.mark.parametrize("size", [(70, 45), (45, 70), (30, 41), (60, 60)])
def test_equals_the_model_called_directly(weights, classifier, size):
    image = Image.fromarray(pixels(*size))
    x = prepared_by_hand(image)
    torch.testing.assert_close(prepared(classifier, image), x, rtol=0, atol=1e-5)
    with torch.no_grad():
        expected = load(weights).eval()(x[None]).softmax(dim=1)[0]
    got = classifier(image)
    assert got.scores.tolist() == pytest.approx(sorted(expected.tolist(), reverse=True), abs=1e-5)
    assert got.names == tuple(CLASSES[label] for label in got.labels)
    assert got.scores.tolist() == pytest.approx(expected[got.labels].tolist(), abs=1e-5)
    assert got.images == (image,) and got.seen == ((SIZE, SIZE),) and got.seconds > 0


def test_prepares_and_orders_as_told(classifier, weights):
    data = GeneratedClassifyData(image_size=SIZE, eval_crop=CROP, augment="none")
    image = Image.fromarray(pixels())
    assert torch.equal(prepared(classifier, image), data.transform(image))
    small = Classifier.from_pretrained(weights, device="cpu", size=33)
    assert prepared(small, pixels()).shape == (3, 33, 33)
    two = Classifier.from_pretrained(weights, device="cpu", top=2)(pixels())
    assert len(two.labels) == len(two.names) == 2 and two.scores[0] >= two.scores[1]
    everything = Classifier.from_pretrained(weights, device="cpu", top=50)(pixels())
    assert everything.names[:2] == two.names and len(everything.names) == len(CLASSES)
    assert everything.scores.sum() == pytest.approx(1, abs=1e-5)


def test_equal_scores_come_in_the_order_of_labels(weights):
    even = Classifier.from_pretrained(weights, device="cpu", top=3)
    for parameter in even.network.head.parameters():
        parameter.data.zero_()
    found = even(pixels())
    assert found.to_dict() == {
        "predictions": [
            {"label": 0, "name": "ant", "probability": 0.25},
            {"label": 1, "name": "bee", "probability": 0.25},
            {"label": 2, "name": "cat", "probability": 0.25},
        ]
    }
    assert found.to_text().splitlines()[1] == f"   25.0 %  {'█' * 5:20}  bee"


def test_mixed_precision_is_near(weights, classifier):
    mixed = Classifier.from_pretrained(weights, device="cpu", dtype="bfloat16")(pixels()).logits
    exact = classifier(pixels()).logits
    assert mixed.dtype == np.float32 and not np.array_equal(mixed, exact)
    np.testing.assert_allclose(mixed, exact, rtol=0.1, atol=0.1 * np.abs(exact).max())


def test_every_way_to_pass_images(tmp_path, classifier):
    array, image = pixels(), Image.fromarray(pixels())
    path, tensor = tmp_path / "a.png", torch.from_numpy(array).permute(2, 0, 1)
    image.save(path)
    expected = classifier(image)
    ways = [str(path), path.read_bytes(), array / 255]
    for many in (ways, tuple(ways), iter(ways), np.stack([array] * 3), tensor[None]):
        answers = list(classifier.many(many))
        assert len(answers) in (1, 3) and {answer.names for answer in answers} == {expected.names}
    assert list(classifier.many([])) == []


def test_weights_without_names_or_size(tmp_path):
    silent = {"classes": ..., "image_size": ..., "eval_crop": ..., "task": ...}
    path = write_weights(tmp_path / "converted.safetensors", **silent)
    classifier = Classifier.from_pretrained(path, device="cpu")
    chosen = classifier.preprocess
    assert (chosen.size, chosen.crop) == (96, 0.95)  # as the network's in timm
    assert sorted(classifier(pixels()).names) == ["0", "1", "2", "3"]


def test_checkpoint_of_a_run(tmp_path, weights, classifier):
    path, network = tmp_path / "last.ckpt", load(weights)
    torch.nn.init.normal_(network.head.weight)
    state = {f"model.{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save({"state_dict": state, "loops": {}, "epoch": 1}, path)
    raises(CheckpointError, r"pass the run's best\.safetensors", Classifier.from_pretrained, path)
    write_weights(tmp_path / "best.safetensors")
    found = Classifier.from_pretrained(path, device="cpu")
    later = Classifier(network, found.card, device="cpu")
    assert found.names == CLASSES
    assert np.array_equal(found(pixels()).logits, later(pixels()).logits)
    assert not np.array_equal(found(pixels()).logits, classifier(pixels()).logits)
    write_weights(tmp_path / "best.safetensors", kwargs={"num_classes": 7}, classes=...)
    raises(CheckpointError, "head", Classifier.from_pretrained, path)


def test_weights_without_a_classifier(tmp_path):
    path = write_weights(tmp_path / "b.safetensors", kwargs={"num_classes": 0}, classes=...)
    raises(CheckpointError, "no classifier, only a backbone", Classifier.from_pretrained, path)
