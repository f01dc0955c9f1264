# SPDX-License-Identifier: Apache-2.0
"""Evaluation in two loops: what is written, when it may be used again, what it scores."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

timm = pytest.importorskip("timm", reason="models need timm")

from PIL import Image  # noqa: E402

from quadtree_attention.errors import CheckpointError, DataError, OptionError  # noqa: E402
from quadtree_attention.files import file_sha256  # noqa: E402
from quadtree_attention.tasks.classify import evaluate  # noqa: E402
from quadtree_attention.tasks.classify.evaluate import (  # noqa: E402
    ClassScore,
    match_classes,
    predict,
    read_predictions,
    score,
)
from quadtree_attention.tasks.classify.predictor import Classifier  # noqa: E402
from quadtree_attention.tasks.classify.sources import (  # noqa: E402
    FolderSource,
    NpzSource,
    open_source,
)
from tests.conftest import ROOT  # noqa: E402
from tests.tasks.classify.test_predictor import (  # noqa: E402
    CLASSES,
    CROP,
    SIZE,
    jpeg,
    pixels,
    random_model,
    write_weights,
)

pytestmark = pytest.mark.usefixtures("only_reference")

TINY = ROOT.parent / "shared" / "data" / "tiny_imagenet_20"
SETTINGS = {
    "weights_sha256": "0" * 64,
    "model": "test_quadtree",
    "image_size": 48,
    "crop": 0.9,
    "data": "pets/val",
    "data_sha256": "1" * 64,
    "device": "cpu",
    "dtype": "float32",
}


def write_images(root: Path, per_class: int = 3, classes: list[str] = CLASSES) -> Path:
    """A split of PNG files, `root/val/<class>/<i>.png`."""
    for label, name in enumerate(classes):
        (root / "val" / name).mkdir(parents=True)
        for i in range(per_class):
            image = Image.fromarray(pixels(50 + label, 40 + i, seed=label * 100 + i))
            image.save(root / "val" / name / f"{i}.png")
    return root


def write_npz(path: Path, count: int, label=lambda i: i) -> Path:
    """JPEG files one after another, as `NpzSource` reads them."""
    buffers = []
    for i in range(count):
        buffer = io.BytesIO()
        Image.fromarray(pixels(40, 50, seed=i)).save(buffer, "JPEG")
        buffers.append(buffer.getvalue())
    np.savez(
        path,
        data=np.frombuffer(b"".join(buffers), np.uint8),
        offsets=np.cumsum([0, *map(len, buffers)]),
        labels=np.array([label(i) for i in range(count)]),
    )
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "best.safetensors")


@pytest.fixture
def images(tmp_path) -> Path:
    return write_images(tmp_path / "pets")


def run(weights: Path, root: Path, out: Path, **options: object):
    options = {"data": "pets/val", "device": "cpu", **options}
    return predict(weights, FolderSource(root, "val"), out, **options)


# ---- the first loop


def test_what_is_written(tmp_path, weights, images):
    out = tmp_path / "out.npz"
    done = run(weights, images, out, batch_size=5)
    assert (done.path, done.reused, done.skipped) == (out, False, ())
    found = read_predictions(out)
    assert found.logits.dtype == np.float32 and found.logits.shape == (12, 4)
    assert found.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert found.names.tolist()[:4] == ["ant/0.png", "ant/1.png", "ant/2.png", "bee/0.png"]
    speed = found.info.pop("images_per_second")
    assert 0 < speed < 1e6
    assert len(found.info.pop("data_sha256")) == 64
    assert found.info == {
        "weights_sha256": file_sha256(weights),
        "weights": "best.safetensors",
        "model": "test_quadtree",
        "image_size": SIZE,
        "crop": CROP,
        "data": "pets/val",
        "device": "cpu",
        "dtype": "float32",
        "batch_size": 5,
        "classes": CLASSES,
        "skipped": 0,
    }
    assert str(tmp_path) not in json.dumps(found.info)
    classifier = Classifier(weights, device="cpu")
    for logits, name in zip(found.logits, found.names, strict=True):
        direct = classifier.logits(classifier.prepare(images / "val" / str(name))[None])[0]
        torch.testing.assert_close(torch.from_numpy(logits), direct, rtol=0, atol=1e-5)
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_workers_read_the_same(tmp_path, weights, images):
    run(weights, images, tmp_path / "one.npz", workers=0)
    run(weights, images, tmp_path / "two.npz", workers=2, batch_size=5)
    one, two = read_predictions(tmp_path / "one.npz"), read_predictions(tmp_path / "two.npz")
    assert one.names.tolist() == two.names.tolist()
    np.testing.assert_allclose(one.logits, two.logits, rtol=0, atol=1e-5)
    with pytest.raises(OptionError, match="workers must be 0 or more, got -1"):
        run(weights, images, tmp_path / "three.npz", workers=-1)


def test_unreadable_images_are_counted_and_left_out(tmp_path, weights, images):
    bad = images / "val" / "bee" / "1.png"
    bad.write_bytes(jpeg()[:600])
    done = run(weights, images, tmp_path / "out.npz", batch_size=5)
    assert len(done.skipped) == 1 and str(bad) in done.skipped[0]
    found = read_predictions(tmp_path / "out.npz")
    assert found.info["skipped"] == 1
    assert "bee/1.png" not in found.names and len(found.names) == 11
    assert found.labels.tolist() == [0] * 3 + [1] * 2 + [2] * 3 + [3] * 3
    scores = score(tmp_path / "out.npz")
    assert (scores.images, scores.skipped, scores.classes[1].images) == (11, 1, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_strict_fails_at_the_first(tmp_path, weights, images, workers):
    bad = images / "val" / "bee" / "1.png"
    bad.write_bytes(b"")
    with pytest.raises(DataError, match="remove it, or leave out --strict") as caught:
        run(weights, images, tmp_path / "out.npz", strict=True, workers=workers)
    assert str(bad) in str(caught.value) and "Traceback" not in str(caught.value)
    assert not (tmp_path / "out.npz").exists()
    run(weights, images, tmp_path / "out.npz")
    with pytest.raises(OptionError, match="without --strict and leaves out 1 images"):
        run(weights, images, tmp_path / "out.npz", strict=True)


def test_strict_fails_at_other_files(tmp_path, weights, images):
    (images / "val" / "bee" / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"1 files are no images, such as .*notes\.txt"):
        run(weights, images, tmp_path / "out.npz", strict=True)
    assert run(weights, images, tmp_path / "out.npz").skipped == ()


def test_nothing_to_read(tmp_path, weights, images):
    for path in images.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of 12 images can be read"):
        run(weights, images, tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def test_npz(tmp_path, weights):
    write_npz(tmp_path / "val.npz", 6, label=lambda i: i % 3)
    predict(weights, NpzSource(tmp_path, "val"), tmp_path / "out.npz", device="cpu")
    assert read_predictions(tmp_path / "out.npz").labels.tolist() == [0, 1, 2, 0, 1, 2]


# ---- classes of the data and of the weights


def test_classes_are_matched_by_name(tmp_path, weights):
    root = write_images(tmp_path / "some", classes=["dog", "bee"])  # folders are sorted: bee, dog
    run(weights, root, tmp_path / "out.npz")
    assert read_predictions(tmp_path / "out.npz").labels.tolist() == [1] * 3 + [3] * 3


@pytest.mark.parametrize(
    ("names", "theirs", "labels"),
    [
        (CLASSES, CLASSES, [0, 1, 2, 3]),
        (CLASSES, ["dog", "ant"], [3, 0]),
        (CLASSES, ["0", "1", "2"], [0, 1, 2]),  # data that only have numbers
        (None, ["n01", "n02", "n03", "n04"], [0, 1, 2, 3]),  # weights that only have numbers
        (None, ["2", "0"], [2, 0]),
        (["crane", "bee", "crane", "dog"], ["crane", "bee", "crane", "dog"], [0, 1, 2, 3]),
    ],
)
def test_matching(tmp_path, names, theirs, labels):
    path = write_weights(tmp_path / "w.safetensors", classes=names)
    assert match_classes(theirs, Classifier(path, device="cpu")) == labels


@pytest.mark.parametrize(
    ("names", "theirs"),
    [
        (CLASSES, ["ant", "bee", "cat", "elk"]),
        (CLASSES, [*CLASSES, "elk"]),
        (CLASSES, ["0", "1", "2", "3", "4"]),
        (None, ["ant", "bee"]),  # sorted folders of a part of the classes say nothing of labels
        (["crane", "bee", "crane", "dog"], ["crane", "bee"]),
    ],
)
def test_classes_that_do_not_match(tmp_path, names, theirs):
    path = write_weights(tmp_path / "w.safetensors", classes=names)
    with pytest.raises(CheckpointError, match="take weights and data of the same classes"):
        match_classes(theirs, Classifier(path, device="cpu"))


# ---- predictions that are there already


@pytest.fixture
def done(tmp_path, weights, images) -> Path:
    out = tmp_path / "out.npz"
    run(weights, images, out)
    return out


def test_the_same_call_uses_them(monkeypatch, weights, images, done):
    monkeypatch.setattr(Classifier, "logits", lambda *_: pytest.fail("the model ran"))
    before = done.read_bytes()
    assert run(weights, images, done, batch_size=3).reused  # the batch size changes nothing
    assert done.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 64}, "image size 48 there, 64 now"),
        ({"dtype": "bfloat16"}, "dtype float32 there, bfloat16 now"),
        ({"data": "cars/val"}, "data pets/val there, cars/val now"),
    ],
)
def test_other_settings_are_refused(weights, images, done, options, message):
    before = done.read_bytes()
    with pytest.raises(OptionError, match=f"{message}; write to another name, or .* --force"):
        run(weights, images, done, **options)
    assert done.read_bytes() == before
    assert not run(weights, images, done, force=True, **options).reused
    assert done.read_bytes() != before
    assert run(weights, images, done, **options).reused


def test_other_weights_are_refused(tmp_path, images, done):
    other = write_weights(tmp_path / "other.safetensors", random_model(seed=1))
    with pytest.raises(
        OptionError, match=f"weights [0-9a-f]{{12}} there, {file_sha256(other)[:12]} now"
    ):
        run(other, images, done)


def test_other_images_are_refused(weights, images, done):
    (images / "val" / "cat" / "2.png").unlink()
    with pytest.raises(OptionError, match="images and labels"):
        run(weights, images, done)


def test_what_is_no_predictions_is_never_replaced(tmp_path, weights):
    data = write_npz(tmp_path / "val.npz", 4)
    before = data.read_bytes()
    with pytest.raises(OptionError, match="holds no predictions; write to another name"):
        predict(weights, NpzSource(tmp_path, "val"), data, force=True)
    assert data.read_bytes() == before


def test_a_full_disk_leaves_what_was_there(monkeypatch, weights, images, done):
    def fail(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    before = done.read_bytes()
    monkeypatch.setattr(evaluate.np, "savez", fail)
    with pytest.raises(DataError, match="No space left on device; what was there before"):
        run(weights, images, done, force=True)
    assert done.read_bytes() == before
    assert sorted(os.listdir(done.parent)) == ["out.npz", "pets"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.txt", "written as .npz"),
        ("no/out.npz", "there is no directory"),
        ("d.npz", "is a dir"),
    ],
)
def test_places_that_do_not_do(tmp_path, weights, images, name, message):
    (tmp_path / "d.npz").mkdir()
    with pytest.raises(OptionError, match=message):
        run(weights, images, tmp_path / name)


# ---- the second loop


def write_predictions(path: Path, **changes: object) -> Path:
    """Six answers among three classes, two of them wrong and one a tie."""
    arrays = {
        "logits": np.array(
            [[3, 2, 1], [3, 2, 1], [0, 5, 1], [1, 1, 0], [0, 9, 1], [4, 5, 6]], np.float32
        ),
        "labels": np.array([0, 1, 1, 0, 1, 2]),
        "names": np.array(list("abcdef")),
    }
    info = {**SETTINGS, "classes": ["x", "y", "z"], "skipped": 2, "images_per_second": 12.5}
    arrays["info"] = np.array(json.dumps(info))
    np.savez(path, **(arrays | changes))
    return path


def test_scores_by_hand(tmp_path):
    scores = score(write_predictions(tmp_path / "p.npz"))
    assert scores.top1 == pytest.approx(100 * 4 / 6)
    assert (scores.top5, scores.images, scores.skipped) == (100.0, 6, 2)
    assert scores.images_per_second == 12.5
    assert scores.classes == (
        ClassScore(0, "x", 2, 50.0),
        ClassScore(1, "y", 3, pytest.approx(200 / 3)),
        ClassScore(2, "z", 1, 100.0),
    )
    assert scores.settings == SETTINGS


def test_a_class_without_images(tmp_path):
    path = write_predictions(tmp_path / "p.npz", labels=np.array([0, 1, 1, 0, 1, 1]))
    assert score(path).classes[2] == ClassScore(2, "z", 0, None)


def test_top5_by_hand(tmp_path):
    logits = np.tile(np.arange(8, dtype=np.float32), (8, 1))  # the best is 7, then 6, ...
    info = {**SETTINGS, "classes": list("abcdefgh"), "skipped": 0, "images_per_second": 1.0}
    path = tmp_path / "p.npz"
    arrays = {"logits": logits, "labels": np.arange(8), "names": np.array(list("abcdefgh"))}
    np.savez(path, info=np.array(json.dumps(info)), **arrays)
    assert (score(path).top1, score(path).top5) == (12.5, 62.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0, 1])}, "do not belong together"),
        ({"labels": np.array([0, 1, 1, 0, 1, 3])}, "some outside 0 to 2"),
        ({"labels": np.array([0, 1, 1, 0, 1, -1])}, "some outside 0 to 2"),
        ({"logits": np.zeros((6, 3))}, "logits are float64"),
        ({"info": np.array("{}")}, "holds no predictions"),
        ({"info": np.array('{"classes": ["x", "y", "z"]}')}, "it does not say crop, data"),
        ({"info": np.array("[1]")}, "holds no predictions"),
        ({"info": np.array("no JSON")}, "holds no predictions"),
        ({"info": np.array([object()])}, "holds no predictions"),
    ],
)
def test_files_that_are_no_predictions(tmp_path, changes, message):
    path = write_predictions(tmp_path / "p.npz", **changes)
    with pytest.raises(DataError, match=message):
        score(path)


def test_other_files(tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*quadtree evaluate classify WEIGHTS"):
        score(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello, no numbers\n")
    with pytest.raises(DataError, match="holds no predictions"):
        score(tmp_path / "text.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match="holds no predictions"):
        score(tmp_path / "one.npy")
    whole = write_predictions(tmp_path / "p.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="holds no predictions"):
        score(tmp_path / "half.npz")
    with pytest.raises(DataError, match="holds no predictions"):
        score(tmp_path)


# ---- real images


@pytest.mark.skipif(
    not TINY.is_dir(), reason="images are not at ../shared/data/tiny_imagenet_20 of the checkout"
)
def test_real_images(tmp_path):
    with np.load(TINY / "val.npz") as arrays:
        at = np.arange(40) * 25
        files = [
            arrays["data"][arrays["offsets"][i] : arrays["offsets"][i + 1]].tobytes() for i in at
        ]
        labels, names = arrays["labels"][at], arrays["names"][at]
    np.savez(
        tmp_path / "val.npz",
        data=np.frombuffer(b"".join(files), np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        labels=labels,
        names=names,
    )
    (tmp_path / "classes.json").write_bytes((TINY / "classes.json").read_bytes())
    source = open_source("auto", tmp_path, "val")
    path = write_weights(tmp_path / "w.safetensors", random_model(20), classes=source.classes)
    predict(path, source, tmp_path / "out.npz", device="cpu", batch_size=16)
    found = read_predictions(tmp_path / "out.npz")
    assert found.labels.tolist() == labels.tolist() and found.names.tolist() == names.tolist()
    # By sorting, which in metrics.py nothing does
    order = np.argsort(-found.logits, axis=1, kind="stable")
    hits = order == found.labels[:, None]
    scores = score(tmp_path / "out.npz")
    assert scores.images == 40
    assert scores.top1 == pytest.approx(hits[:, 0].mean() * 100)
    assert scores.top5 == pytest.approx(hits[:, :5].any(axis=1).mean() * 100)
    classifier = Classifier(path, device="cpu", topk=1)
    answers = [classifier(data)[0].label for data in files]
    assert answers == order[:, 0].tolist()
