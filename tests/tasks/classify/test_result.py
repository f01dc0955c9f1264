# SPDX-License-Identifier: Apache-2.0
"""Files of predictions: what is written, what they score without the data, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.tasks import evaluate
from tests.support import raises
from tests.tasks.classify.test_predictor import CLASSES, write_weights
from tests.tasks.classify.test_readers import make_folder, make_npz

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "best.safetensors")


@pytest.fixture
def images(tmp_path) -> Path:
    return make_folder(tmp_path / "pets", CLASSES)


def run(weights: Path, root: Path, out: Path, **options: object):
    return evaluate("classify", weights, data=root, save=out, device="cpu", **options)


def read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


def alone(path: Path):
    """Scores of a file without the data."""
    return evaluate("classify", data=path, predictions=path)


def test_what_is_written(tmp_path, weights, images):
    out = tmp_path / "out.npz"
    run(weights, images, out, batch=5)
    found = read(out)
    assert found["logits"].dtype == np.float32 and found["logits"].shape == (12, 4)
    assert found["labels"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert found["names"].tolist()[:4] == ["ant/0.jpg", "ant/1.jpg", "ant/2.jpg", "bee/0.jpg"]
    assert json.loads(str(found["info"])) == {"classes": CLASSES, "top": 5}


def test_labels_are_those_of_the_network(tmp_path, weights):
    root = make_folder(tmp_path / "some", ["dog", "bee"])  # folders are sorted: bee, dog
    scores = run(weights, root, tmp_path / "out.npz")
    assert read(tmp_path / "out.npz")["labels"].tolist() == [1] * 3 + [3] * 3
    assert alone(tmp_path / "out.npz").mean == scores.mean
    Path(tmp_path / "out.settings.json").unlink()  # the file has the classes, too
    again = evaluate("classify", data=root, predictions=tmp_path / "out.npz")
    assert again.mean == scores.mean and again.settings is None
    other = make_folder(tmp_path / "cars", ["bus", "van"])
    raises(CheckpointError, "it does not know bus, van", run, weights, other, tmp_path / "cars.npz")


def test_images_of_npz_files(tmp_path, weights):
    labels = np.array([0, 1, 2, 0, -1, 2])  # one without a label
    root = make_npz(tmp_path, "val", 6, labels=labels, names=None)
    scores = run(weights, root, tmp_path / "out.npz")
    assert read(tmp_path / "out.npz")["labels"].tolist() == [0, 1, 2, 0, -1, 2]
    assert scores.facts["images"] == 5 and "has no label" in scores.skipped[0]
    assert alone(tmp_path / "out.npz").mean == scores.mean
    with pytest.raises(OptionError, match=r"exists without a val\.settings\.json"):
        run(weights, tmp_path, tmp_path / "val.npz", force=True)  # the data themselves


def write_predictions(path: Path, **changes: object) -> Path:
    """Six answers among three classes, two of them wrong and one a tie; as earlier versions did."""
    info = {"model": "test_quadtree", "classes": ["x", "y", "z"], "skipped": 2, "crop": 0.9}
    arrays = {
        "logits": np.array(
            [[3, 2, 1], [3, 2, 1], [0, 5, 1], [1, 1, 0], [0, 9, 1], [4, 5, 6]], np.float32
        ),
        "labels": np.array([0, 1, 1, 0, 1, 2]),
        "names": np.array(list("abcdef")),
        "info": np.array(json.dumps(info)),
    }
    np.savez(path, **(arrays | changes))
    return path


def test_scores_by_hand(tmp_path):
    scores = alone(write_predictions(tmp_path / "p.npz"))
    assert scores.mean == {"top1": pytest.approx(100 * 4 / 6), "top5": 100.0}
    assert scores.facts == {"images": 6} and scores.settings is None
    assert scores.rows == [
        {"label": 0, "name": "x", "images": 2, "accuracy": 50.0},
        {"label": 1, "name": "y", "images": 3, "accuracy": pytest.approx(200 / 3)},
        {"label": 2, "name": "z", "images": 1, "accuracy": 100.0},
    ]
    text = [line.split() for line in scores.to_text().splitlines()]
    assert text[-4:-2] == [["class", "images", "top-1", "%"], ["x", "2", "50.00"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0, 1])}, "differ"),
        ({"labels": np.array([0, 1, 1, 0, 1, 3])}, "some outside -1 to 2"),
        ({"labels": np.array([0, 1, 1, 0, 1, -2])}, "some outside -1 to 2"),
        ({"logits": np.zeros((6, 3))}, "logits are float64"),
        ({"info": np.array("{}")}, "holds no predictions"),
        ({"info": np.array('{"classes": ["x", "y", "z"], "top": 0}')}, "top must be an integer"),
        ({"info": np.array("[1]")}, "holds no predictions"),
        ({"info": np.array("no JSON")}, "holds no predictions"),
        ({"info": np.array([object()])}, "cannot read"),
    ],
)
def test_files_that_are_no_predictions(tmp_path, changes, message):
    path = write_predictions(tmp_path / "p.npz", **changes)
    raises(DataError, message, alone, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    raises(DataError, "cannot read", alone, path)
