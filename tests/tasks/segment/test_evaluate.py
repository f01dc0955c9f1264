# SPDX-License-Identifier: Apache-2.0
"""Two loops: label maps are written once, and scored as often as one likes."""

import json

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("timm", reason="models need timm")

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.tasks.segment.evaluate import SETTINGS, predict, score
from quadtree_attention.tasks.segment.predictor import Segmenter
from quadtree_attention.tasks.segment.sources import open_source, read_label_map
from tests.tasks.segment.files import IGNORED, write_set, write_weights

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "best.safetensors")


@pytest.fixture(scope="module")
def segmenter(weights):
    return Segmenter(weights, device="cpu")


@pytest.fixture
def root(tmp_path):
    return write_set(tmp_path / "data", count=3, splits=("val",))


def truth_as_predictions(root, folder):
    """Label maps that are right, and sky where there is no truth."""
    folder.mkdir()
    for path in (root / "labels/val").iterdir():
        labels = np.array(Image.open(path))
        labels[labels == IGNORED] = 0
        Image.fromarray(labels).save(folder / path.name)
    return folder


def test_the_truth_scores_full_marks(root, tmp_path):
    found = score(open_source("auto", root, "val"), truth_as_predictions(root, tmp_path / "out"))
    assert (found.miou, found.accuracy, found.class_accuracy) == (100, 100, 100)
    assert (found.images, found.missing, found.skipped, found.settings) == (3, (), (), None)
    assert [c.name for c in found.classes] == ["sky", "road", "car"]
    assert sum(c.pixels for c in found.classes) == 3 * (40 * 56 - 10 * 14)


def test_scores_by_hand(root, tmp_path):
    folder = truth_as_predictions(root, tmp_path / "out")
    for path in folder.iterdir():  # all cars are taken for roads
        labels = np.array(Image.open(path))
        Image.fromarray(np.where(labels == 2, 1, labels).astype(np.uint8)).save(path)
    found = score(open_source("auto", root, "val"), folder)
    sky, road, car = found.classes
    assert (sky.iou, car.iou, car.accuracy, road.accuracy) == (100, 0, 0, 100)
    assert road.iou == pytest.approx(100 * road.pixels / (road.pixels + car.pixels))
    assert found.miou == pytest.approx((100 + road.iou) / 3)
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_class_that_is_nowhere_does_not_count(root, tmp_path):
    content = {"classes": ["sky", "road", "car", "tree"], "ignore_index": IGNORED}
    (root / "classes.json").write_text(json.dumps(content))
    found = score(open_source("auto", root, "val"), truth_as_predictions(root, tmp_path / "out"))
    assert found.miou == 100 and found.classes[3].iou is None


def test_label_maps_are_written_once(root, segmenter, tmp_path):
    source, out = open_source("auto", root, "val"), tmp_path / "out"
    done = predict(segmenter, source, out, data="data/val")
    assert (done.images, done.there, done.skipped) == (3, 0, ())
    assert sorted(p.name for p in out.iterdir()) == ["0.png", "1.png", "2.png", SETTINGS]
    image, _ = source.read(1)
    assert np.array_equal(read_label_map(out / "1.png"), segmenter(image).labels)
    first = score(source, out)
    assert first.settings["model"] == "semfpn_test_quadtree" and "images" not in first.settings
    # one is made again, the others stay
    (out / "1.png").unlink()
    Image.fromarray(np.zeros((40, 56), np.uint8)).save(out / "0.png")
    done = predict(segmenter, source, out, data="data/val")
    assert (done.images, done.there) == (1, 2)
    assert not read_label_map(out / "0.png").any()
    predict(segmenter, source, out, data="data/val", force=True)
    assert score(source, out) == first


def test_label_maps_by_other_settings_are_not_mixed(root, segmenter, weights, tmp_path):
    source, out = open_source("auto", root, "val"), tmp_path / "out"
    predict(segmenter, source, out, data="data/val")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other = Segmenter(weights, device="cpu", size=32, sliding=(32, 16))
    with pytest.raises(OptionError) as caught:
        predict(other, source, out, data="data/val")
    assert "size None there, 32 now; window and stride None there, [32, 16] now;" in str(
        caught.value
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "mine.png").write_bytes(b"keep")
    (root / "images/val/2.png").unlink()  # 2 is made no more, and must not stay either
    predict(other, open_source("auto", root, "val"), out, data="data/val", force=True)
    assert sorted(p.name for p in out.iterdir()) == ["0.png", "1.png", "mine.png", SETTINGS]
    assert before["0.png"] != (out / "0.png").read_bytes()


def test_label_maps_of_other_images_of_the_same_names_are_not_taken(root, segmenter, tmp_path):
    out = tmp_path / "out"
    predict(segmenter, open_source("auto", root, "val"), out, data="data/val")
    Image.new("RGB", (56, 40)).save(root / "images/val/1.png")
    with pytest.raises(OptionError, match=r"by other settings: images \w{12} there, \w{12} now"):
        predict(segmenter, open_source("auto", root, "val"), out, data="data/val")


def test_a_folder_of_other_files_is_left_alone(root, segmenter):
    source = open_source("auto", root, "val")
    before = sorted(path.name for path in (root / "images/val").iterdir())
    for force in (False, True):
        with pytest.raises(OptionError, match=r"holds files, and no settings\.json"):
            predict(segmenter, source, root / "images/val", data="data/val", force=force)
    assert sorted(path.name for path in (root / "images/val").iterdir()) == before


def test_bad_images_are_left_out_or_refused(root, segmenter, tmp_path):
    (root / "images/val/1.png").write_bytes(b"hello")
    source = open_source("auto", root, "val")
    done = predict(segmenter, source, tmp_path / "out", data="data/val")
    assert done.images == 2 and "cannot decode" in done.skipped[0]
    found = score(source, tmp_path / "out")
    assert (found.images, found.missing) == (2, ("1",))
    with pytest.raises(DataError, match="1 images cannot be scored: 1: has no label map"):
        score(source, tmp_path / "out", strict=True)
    with pytest.raises(DataError, match=r"cannot decode .*; remove it, or leave out --strict"):
        predict(segmenter, source, tmp_path / "strict", data="data/val", strict=True)


def test_label_maps_that_do_not_do(root, tmp_path):
    source = open_source("auto", root, "val")
    with pytest.raises(DataError, match=r"there is no folder .*nowhere of label maps"):
        score(source, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"for none of 3 images, such as 0\.png"):
        score(source, tmp_path / "empty")
    folder = truth_as_predictions(root, tmp_path / "out")
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(folder / "0.png")
    with pytest.raises(DataError, match=r"0\.png has 8x9 pixels, the truth 56x40"):
        score(source, folder)
    Image.fromarray(np.full((40, 56), 3, np.uint8)).save(folder / "0.png")
    with pytest.raises(DataError, match="must have classes from 0 to 2, got 3"):
        score(source, folder)


def test_classes_of_other_data(root, segmenter, tmp_path):
    (root / "classes.json").write_text('["road", "sky", "car", "tree"]')
    (root / "labels/val/0.png").unlink()
    with pytest.raises(CheckpointError, match="the data have 4 classes, road, sky, car"):
        predict(segmenter, open_source("auto", root, "val"), tmp_path / "out", data="data/val")
    assert not (tmp_path / "out").exists()
