# SPDX-License-Identifier: Apache-2.0
"""Labelled images from folders, npz files and the generator, and what is said of bad files."""

import io
import json
import os
import zlib

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.images import decode
from quadtree_attention.tasks.classify.readers import (
    FolderSource,
    GeneratedSource,
    NpzSource,
    open_source,
)
from tests.support import Hostile
from tests.support.commands import refusal


def picture(seed=0, size=(20, 12), mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image, kind="JPEG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def make_folder(root, classes=("cat", "dog"), each=3):
    """Images of 20 x 12 pixels in train and val."""
    for split in ("train", "val"):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(each):
                (folder / f"{i}.jpg").write_bytes(encoded(picture(10 * label + i)))
    return root


def make_npz(root, split="train", count=5, **replaced):
    files = [encoded(picture(i)) for i in range(count)]
    arrays = {
        "data": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": np.arange(count) % 2,
        "names": np.array([f"image {i}" for i in range(count)]),
        **replaced,
    }
    np.savez(root / f"{split}.npz", **{k: v for k, v in arrays.items() if v is not None})
    return root


def test_folder(tmp_path):
    """Files that are no images are listed and counted, or refused."""
    source = FolderSource(make_folder(tmp_path), "val")
    assert (source.classes, len(source), source.skipped) == (["cat", "dog"], 6, [])
    assert [source.truth(i) for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert source.name(4) == os.path.join("dog", "1.jpg")
    image = source.images(4)[0]
    assert (image.size, image.mode) == ((20, 12), "RGB")
    assert np.array_equal(image, decode(encoded(picture(11)), ""))
    before = source.identity(0)
    assert before != source.identity(1) and before == FolderSource(tmp_path, "val").identity(0)
    (tmp_path / "val" / "cat").rename(tmp_path / "val" / "cow")
    assert FolderSource(tmp_path, "val").identity(0) != before
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "dog" / "deeper").mkdir()
    (tmp_path / "train" / "dog" / "deeper" / "more.JPG").write_bytes(encoded(picture()))
    (tmp_path / "train" / "dog" / ".DS_Store").write_bytes(b"\0")
    source = open_source(tmp_path, split="train")
    assert len(source) == 7
    assert source.skipped == [
        f"{tmp_path}/train/{name}: not an image by its name"
        for name in ("cat/notes.txt", "dog/.DS_Store")
    ]
    text = refusal(DataError, open_source, tmp_path, split="train", strict=True)
    assert text.startswith("2 files are no images: ") and "--strict" in text


@pytest.mark.filterwarnings("ignore:Image size")  # a damaged header asks for a large one
def test_damaged_bytes_are_always_a_data_error():
    rng = np.random.default_rng(0)
    failed = 0
    for kind in ("JPEG", "PNG", "BMP", "WEBP", "PPM"):
        whole = encoded(picture(), kind)
        for _ in range(60):
            damaged = bytearray(whole[: rng.integers(1, len(whole) + 1)])
            for at in rng.integers(0, min(64, len(damaged)), 3):
                damaged[at] = rng.integers(0, 256)
            try:
                decode(bytes(damaged), "x")
            except DataError:
                failed += 1
    assert failed > 100
    header = encoded(picture(), "BMP")  # of an image that claims to be enormous
    bomb = header[:18] + (200_000).to_bytes(4, "little") * 2 + header[26:]
    told = refusal(DataError, decode, bomb, "bomb.bmp")
    assert "exceeds limit" in told and "make it smaller first" in told


def test_missing_folders(tmp_path):
    root = str(tmp_path)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    for folder, split, source, expected in (
        ("/nowhere", "val", "auto", "there is no folder {}/nowhere; pass the one that holds train"),
        ("", "val", "auto", "there is no folder {}/val; images are expected in {}/train/<class>/"),
        ("", "train", "folder", "there are no images in {}/train/<class>/; names must end in ."),
        ("", "val", "npz", "there is no file '{}/val.npz'; check the path, or write it again"),
    ):
        told = refusal(DataError, open_source, root + folder, split=split, source=source)
        assert told.startswith(expected.replace("{}", root))
    text = refusal(OptionError, open_source, None, split="train", source="npz")
    assert text.startswith("data from a 'npz' source need a root, got none; pass --data.root FOLD")


def test_npz(tmp_path):
    source = open_source(make_npz(tmp_path), split="train")
    assert isinstance(source, NpzSource)
    assert (len(source), source.classes, source.skipped) == (5, ["0", "1"], ())
    assert (source.truth(3), source.name(3)) == (1, "image 3")
    assert np.array_equal(source.images(3)[0], decode(encoded(picture(3)), ""))
    both = ["cat", "dog"]
    for entries in (both, [{"name": name} for name in both], {"0": "cat", "1": "dog"}):
        (tmp_path / "classes.json").write_text(json.dumps(entries))
        assert NpzSource(tmp_path, "train").classes == both
    (tmp_path / "classes.json").unlink()
    source = NpzSource(make_npz(tmp_path, names=np.array(list("abaca"))), "train")
    assert source.names == ["a (0)", "b", "a (2)", "c", "a (4)"]
    assert NpzSource(make_npz(tmp_path, names=None), "train").name(2) == "train-2"
    source = NpzSource(make_npz(tmp_path, offsets=np.arange(6) * 100), "train")
    told = refusal(DataError, source.images, 2)
    assert told.startswith(f"cannot decode {tmp_path}/train.npz[2] image 2: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["cat"]', "lists 1 classes, the labels need 2; add the rest"),
        ('["cat",', "it must list the classes as strings or objects with a name"),
        ('[{"nam": "cat"}]', "it must list the classes as strings or objects with a name"),
        ("3", "it must list the classes as strings or objects with a name"),
    ],
)
def test_npz_class_names_that_do_not_do(tmp_path, text, expected):
    (tmp_path / "classes.json").write_text(text)
    told = refusal(DataError, NpzSource, make_npz(tmp_path), "train")
    assert str(tmp_path / "classes.json") in told and told.endswith(expected)


def test_npz_with_pickled_objects_is_refused_and_runs_nothing(tmp_path):
    make_npz(tmp_path, labels=np.array([Hostile(tmp_path / "ran")], dtype=object))
    text = refusal(DataError, NpzSource, tmp_path, "train")
    assert text.startswith(f"cannot read {tmp_path}/train.npz: ")
    assert not (tmp_path / "ran").exists()


def test_damaged_npz(tmp_path):
    path = make_npz(tmp_path) / "train.npz"
    whole, single = path.read_bytes(), io.BytesIO()
    np.save(single, np.arange(3))
    third = len(whole) // 3
    flipped = whole[:third] + bytes([whole[third] ^ 0xFF]) + whole[third + 1 :]
    broken = [whole[: len(whole) // 2], b"", b"hello\n" * 50, flipped, zlib.compress(whole)]
    for content in (*broken, single.getvalue()):
        path.write_bytes(content)
        assert refusal(DataError, NpzSource, tmp_path, "train").startswith(f"cannot read {path}: ")


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [
        ({"labels": np.arange(4)}, "do not belong together: 4 labels, 6 offsets"),
        ({"labels": np.zeros(5)}, "labels of {} must be a list of integers, got float64"),
        ({"labels": np.array([list("ab")] * 5)}, "must be a list of integers, got <U1"),
        ({"offsets": np.arange(12).reshape(6, 2)}, "offsets of {} must be a list of integers"),
        ({"offsets": np.array([0, 9, 8, 10, 11, 12])}, "ascending"),
        ({"offsets": np.array([0, 1, 2, 3, 4, 10**9])}, "end inside the data"),
        ({"offsets": np.array([-1, 1, 2, 3, 4, 5])}, "end inside the data"),
        ({"data": np.zeros(9)}, "data of {} must be a list of bytes (uint8), got float64"),
        ({"names": np.array(["a"])}, "names as many as labels"),
        ({"data": None}, "must hold the arrays data, offsets, labels"),
        ({"labels": np.zeros(0, int), "offsets": [0], "names": None}, "0 labels, 1 offsets"),
    ],
)
def test_npz_arrays_that_do_not_fit(tmp_path, replaced, expected):
    text = refusal(DataError, NpzSource, make_npz(tmp_path, **replaced), "train")
    assert expected.format(tmp_path / "train.npz") in text


def test_generated():
    source = GeneratedSource("train", count=10, classes=4, size=24)
    assert len(source) == 10
    assert source.classes == ["0 degrees", "45 degrees", "90 degrees", "135 degrees"]
    assert (source.truth(6), source.name(6)) == (2, "train-6")
    image = source.images(6)[0]
    assert (image.size, image.mode) == ((24, 24), "RGB")
    # Stripes of class 0 change along x, those of 90 degrees along y
    source = GeneratedSource("train", count=8, classes=2, size=48)
    for i in range(8):
        pixels = np.asarray(source.images(i)[0]).mean(axis=-1)
        along_y, along_x = pixels.mean(axis=1).std(), pixels.mean(axis=0).std()
        assert (along_x > along_y) == (source.truth(i) == 0)
