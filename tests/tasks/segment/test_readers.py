# SPDX-License-Identifier: Apache-2.0
"""Folders of images and label maps: layouts, kinds of label maps, what is bad."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.segment.metrics import IGNORE
from quadtree_attention.tasks.segment.readers import (
    GeneratedSource,
    open_source,
    read_classes,
    read_label_map,
)
from tests.conftest import ROOT
from tests.support import raises
from tests.support.commands import refusal
from tests.tasks.segment.files import CLASSES, IGNORED, label_map, write_set


@pytest.fixture
def root(tmp_path):
    return write_set(tmp_path / "data")


def read(source, index):
    (image,) = source.images(index)
    return image, source.truth(index)


def refused(source, index=0):
    return refusal(DataError, read, source, index)


def test_folder(root):
    source = open_source(root, split="train")
    assert (source.classes, len(source), source.skipped) == (CLASSES, 4, [])
    assert [source.name(i) for i in range(4)] == ["0", "1", "2", "3"]
    image, labels = read(source, 2)
    stored = label_map(40, 56, seed=2)
    assert image.size == (56, 40) and labels.dtype == np.int16
    assert np.array_equal(labels == IGNORE, stored == IGNORED) and (labels == IGNORE).any()
    assert np.array_equal(labels[labels >= 0], stored[stored != IGNORED])
    assert np.array_equal(source.truth(2), labels)
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(root / "images/train/2.png")))
    for kind in ("images", "labels"):
        (root / kind / "train" / "aachen").mkdir()
        shutil.move(root / kind / "train" / "1.png", root / kind / "train" / "aachen" / "1.png")
    source = open_source(root, split="train", layout="folder")
    assert [source.name(i) for i in range(4)] == ["0", "2", "3", "aachen/1"]
    assert np.array_equal(source.truth(3)[30], label_map(40, 56, seed=1)[30])


def test_ade20k(tmp_path):
    for folder in ("images/training", "annotations/training"):
        (tmp_path / folder).mkdir(parents=True)
    Image.new("RGB", (30, 20)).save(tmp_path / "images/training/a.jpg")
    values = np.arange(600).reshape(20, 30) % 151
    Image.fromarray(values.astype(np.uint8)).save(tmp_path / "annotations/training/a.png")
    source = open_source(tmp_path, split="train")
    assert source.classes == [str(i) for i in range(1, 151)] and len(source.palette) == 150
    assert np.array_equal(source.truth(0), values - 1)  # 0 is none
    rows = ["Idx\tRatio\tTrain\tVal\tStuff\tName"]
    rows += [
        f"{i}\t0.1\t1\t1\t1\t{'screen, CRT' if i > 148 else f'thing{i}'}" for i in range(1, 151)
    ]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows) + "\n")
    names = open_source(tmp_path, split="training", layout="ade20k").classes
    assert names[0] == "thing1" and names[-2:] == ["screen 149", "screen 150"]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows[:-1]))
    with pytest.raises(DataError, match="must name 150 classes, got 149"):
        open_source(tmp_path, split="train", layout="ade20k")


def test_generated():
    train = GeneratedSource("train", count=6, size=32)
    image, labels = read(train, 3)
    assert image.size == (48, 32) and labels.shape == (32, 48)
    seen = np.unique(np.concatenate([read(train, i)[1].ravel() for i in range(6)]))
    assert seen.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("mode", ["L", "P", "I;16", "I", "1"])
def test_kinds_of_label_maps(tmp_path, mode):
    values = np.array([[0, 1, 2], [2, 1, IGNORED]]) if mode != "1" else np.array([[0, 1, 0]])
    if mode == "P":
        picture = Image.fromarray(values.astype(np.uint8))
        picture.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200] * 4)  # several values of one colour
    elif mode == "1":
        picture = Image.fromarray(values.astype(bool))
    else:
        kind = {"L": np.uint8, "I;16": np.uint16, "I": np.int32}[mode]
        picture = Image.fromarray(values.astype(kind))
    path = tmp_path / ("a.tif" if mode == "I" else "a.png")
    picture.save(path)
    with Image.open(path) as written:
        assert written.mode == mode
    assert np.array_equal(read_label_map(path), values)


def test_classes_of_sixteen_bits(root):
    (root / "classes.json").write_text(json.dumps([f"c{i}" for i in range(1000)]))
    wide = label_map(40, 56).astype(np.uint16)
    wide[wide == IGNORED] = 999
    wide[0, 0] = 255  # a class here, as all others
    Image.fromarray(wide).save(root / "labels/train/0.png")
    assert np.array_equal(open_source(root, split="train").truth(0), wide)
    wide[0, 0] = 1000
    Image.fromarray(wide).save(root / "labels/train/0.png")
    assert refused(open_source(root, split="train")).endswith(
        "unknown classes 1000; known are 0 to 999, and no value for none"
    )


@pytest.mark.parametrize("value", [-1, 65536, 70000])
def test_values_beyond_sixteen_bits(root, value):
    """Of files of 32 bits: -1 is not class 0."""
    wide = label_map(40, 56).astype(np.int32)
    wide[0, 0] = value
    (root / "labels/train/0.png").unlink()
    path = root / "labels/train/0.tif"
    Image.fromarray(wide).save(path)
    assert refused(open_source(root, split="train")) == (
        f"{path} must be a label map with values from 0 to 65535, got {value}; write such, also "
        "for pixels of no class"
    )


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "F"])
def test_colours_are_no_classes(tmp_path, mode):
    path = tmp_path / ("a.tif" if mode == "F" else "a.png")
    Image.new(mode, (4, 3)).save(path)
    raises(DataError, rf"of one channel.* mode {mode}; write numbers", read_label_map, path)


def test_missing_partners_and_other_files(root):
    (root / "images/train/0.png").unlink()
    (root / "labels/train/1.png").unlink()
    (root / "images/train/notes.txt").write_text("hello")
    Image.new("RGB", (5, 5)).save(root / "images/train/2.jpg")
    source = open_source(root, split="train")
    assert [source.name(i) for i in range(len(source))] == ["2", "3"]
    assert [reason.removeprefix(f"{root}/") for reason in source.skipped] == [
        "images/train/2.png: 2.jpg has the same name",
        "images/train/notes.txt: not an image by its name",
        f"images/train/1.png: has no label map in {root}/labels/train",
        f"labels/train/0.png: has no image in {root}/images/train",
    ]
    for path in (root / "labels/train").iterdir():
        path.unlink()
    raises(DataError, "there are no images with label maps in", open_source, root, split="train")


def test_label_map_of_another_size_or_unknown_classes(root):
    path = root / "labels/train/0.png"
    Image.fromarray(label_map(41, 56)).save(path)
    told = refused(open_source(root, split="train"))
    assert told == f"{path} has 56x41 pixels, its image 0.png 56x40; both need the same"
    bad = label_map(40, 56)
    bad[0, 0], bad[1, 1] = 3, 255
    Image.fromarray(bad).save(path)
    told = refused(open_source(root, split="train"))
    known = "known are 0 to 2, and 9 for none"
    assert told == f"{path} has pixels of unknown classes 3, 255; {known}"


@pytest.mark.parametrize("kind", ["images", "labels"])
@pytest.mark.parametrize("content", ["cut", b"", b"hello"])
def test_damaged_files(root, kind, content):
    path = root / kind / "train" / "0.png"
    path.write_bytes(path.read_bytes()[:60] if content == "cut" else content)
    assert refused(open_source(root, split="train")).startswith(f"cannot decode {path}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("{", "cannot read"),
        ('{"names": []}', "it must be like"),
        ('{"classes": []}', "1 to 32767 different classes, got 0"),
        ('["a", "a"]', "got 2, 1 of them different"),
        ('{"classes": ["a"], "palette": [[1, 2, 3], [4, 5, 6]]}', "2 colours for 1 classes"),
        ('{"classes": ["a"], "palette": [[1, 2, 300]]}', "is not a colour"),
        ('{"classes": ["a"], "ignore_index": -1}', "from 0 to 65535, got -1"),
        ('{"classes": ["a", "b"], "ignore_index": [1, 2]}', "got 1 among the classes 0 to 1; pass"),
    ],
)
def test_classes_that_do_not_do(tmp_path, content, message):
    path = tmp_path / "classes.json"
    if content is not None:
        path.write_text(content)
    raises(DataError, message, read_classes, path)


def test_classes_with_colours_and_several_values_for_none(tmp_path):
    path = tmp_path / "classes.json"
    entries = {"classes": [{"name": "a"}, {"name": "b"}], "ignore_index": [7, 255]}
    path.write_text(json.dumps({**entries, "palette": [[1, 2, 3], [4, 5, 6]]}))
    found = read_classes(path)
    assert (found.names, found.ignored) == (["a", "b"], (7, 255))
    assert found.palette == [(1, 2, 3), (4, 5, 6)]


@pytest.mark.parametrize(("count", "ignored"), [(255, (255,)), (256, ()), (300, ())])
def test_values_for_none_unless_told(tmp_path, count, ignored):
    path = tmp_path / "classes.json"
    path.write_text(json.dumps([f"c{i}" for i in range(count)]))
    found = read_classes(path)
    assert found.ignored == ignored and found.table()[:count].tolist() == list(range(count))
    path.write_text(json.dumps({"classes": ["a", "b"], "ignore_index": 0}))
    assert read_classes(path, first=1).ignored == (0,)  # as in ADE20K, where 1 is the first class


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(OptionError, match=r"need a root, got none; pass --data\.root FOLDER"):
        open_source(None, split="train")
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        open_source(tmp_path / "nowhere", split="train")
    with pytest.raises(DataError, match=r"images/train; images are expected in images/<split>"):
        open_source(tmp_path, split="train")
    with pytest.raises(OptionError, match="source must be one of auto, folder"):
        open_source(tmp_path, split="train", layout="npz")


CAMVID = ROOT.parent / "shared/data/camvid11"
NO_CAMVID = "camvid11 is not at ../shared/data beside the checkout"


@pytest.mark.skipif(not CAMVID.is_dir(), reason=NO_CAMVID)
def test_camvid():
    counts = {split: len(open_source(CAMVID, split=split)) for split in ("train", "val")}
    assert counts == {"train": 367, "val": 101}
    source = open_source(CAMVID, split="val")
    assert source.classes[0] == "sky" and len(source.classes) == 11 and source.skipped == []
    image, labels = read(source, 0)
    assert image.size == (480, 360) and labels.min() == IGNORE and labels.max() <= 10
    upper, lower = labels[:60], labels[-60:]
    assert (upper == 3).sum() == 0 < (lower == 3).sum()  # the road is below
