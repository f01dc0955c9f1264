# SPDX-License-Identifier: Apache-2.0
"""Labelled images from folders, npz files and the generator, and what is said of bad files."""

import io
import json
import os
import zlib

import numpy as np
import pytest

pytest.importorskip("PIL", reason="images need the extra 'models'")

from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.images import decode
from quadtree_attention.tasks.classify.readers import (
    FolderSource,
    GeneratedSource,
    NpzSource,
    open_source,
)


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


def message(error, call, *args, **options):
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)


def test_folder(tmp_path):
    source = FolderSource(make_folder(tmp_path), "val")
    assert (source.classes, len(source), source.skipped) == (["cat", "dog"], 6, [])
    assert [source.truth(i) for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert source.name(4) == os.path.join("dog", "1.jpg")
    image = source.images(4)[0]
    assert (image.size, image.mode) == ((20, 12), "RGB")
    assert np.array_equal(image, decode(encoded(picture(11)), ""))


def test_files_that_are_no_images_are_listed_and_counted(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "dog" / "deeper").mkdir()
    (tmp_path / "train" / "dog" / "deeper" / "more.JPG").write_bytes(encoded(picture()))
    (tmp_path / "train" / "dog" / ".DS_Store").write_bytes(b"\0")
    source = FolderSource(tmp_path, "train")
    assert len(source) == 7
    assert source.skipped == [
        f"{tmp_path}/train/cat/notes.txt: not an image by its name",
        f"{tmp_path}/train/dog/.DS_Store: not an image by its name",
    ]


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


def test_image_that_claims_to_be_enormous():
    header = encoded(picture(), "BMP")
    bomb = header[:18] + (200_000).to_bytes(4, "little") * 2 + header[26:]
    told = message(DataError, decode, bomb, "bomb.bmp")
    assert "exceeds limit" in told and "make it smaller first" in told


def test_missing_folders(tmp_path):
    text = message(DataError, open_source, tmp_path / "nowhere", split="train", source="auto")
    assert text == f"there is no folder {tmp_path}/nowhere; pass the one that holds train and val"
    text = message(DataError, open_source, tmp_path, split="train", source="auto")
    assert text == (
        f"there is no folder {tmp_path}/train; images are expected in "
        f"{tmp_path}/train/<class>/ and {tmp_path}/val/<class>/"
    )
    (tmp_path / "train" / "cat").mkdir(parents=True)
    text = message(DataError, open_source, tmp_path, split="train", source="folder")
    assert text.startswith(f"there are no images in {tmp_path}/train/<class>/; names must end in ")
    text = message(DataError, open_source, tmp_path, split="val", source="npz")
    assert text == f"there is no file '{tmp_path}/val.npz'; check the path, or write it again"
    text = message(OptionError, open_source, None, split="train", source="npz")
    assert text.startswith("data from a 'npz' source need a root, got none; pass --data.root FOLD")


def test_npz(tmp_path):
    source = open_source(make_npz(tmp_path), split="train")
    assert isinstance(source, NpzSource)
    assert (len(source), source.classes, source.skipped) == (5, ["0", "1"], ())
    assert (source.truth(3), source.name(3)) == (1, "image 3")
    assert np.array_equal(source.images(3)[0], decode(encoded(picture(3)), ""))


@pytest.mark.parametrize(
    "entries",
    [["cat", "dog"], [{"name": "cat"}, {"name": "dog"}], {"0": "cat", "1": "dog"}],
    ids=["strings", "objects", "by label"],
)
def test_npz_class_names(tmp_path, entries):
    (tmp_path / "classes.json").write_text(json.dumps(entries))
    assert NpzSource(make_npz(tmp_path), "train").classes == ["cat", "dog"]


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
    told = message(DataError, NpzSource, make_npz(tmp_path), "train")
    assert str(tmp_path / "classes.json") in told and told.endswith(expected)


def test_npz_corrupt_image_is_named(tmp_path):
    offsets = np.array([0, 100, 200, 300, 400, 500])
    source = NpzSource(make_npz(tmp_path, offsets=offsets), "train")
    assert message(DataError, source.images, 2).startswith(
        f"cannot decode {tmp_path}/train.npz[2] image 2: "
    )


def test_npz_with_pickled_objects_is_refused_and_runs_nothing(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    make_npz(tmp_path, labels=np.array([Hostile()], dtype=object))
    text = message(DataError, NpzSource, tmp_path, "train")
    assert text.startswith(f"cannot read {tmp_path}/train.npz: ")
    assert not (tmp_path / "ran").exists()


def damaged_npz(whole):
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0xFF
    single = io.BytesIO()
    np.save(single, np.arange(3))
    return {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"hello\n" * 50,
        "one array": single.getvalue(),
        "flipped bits": bytes(flipped),
        "compressed": zlib.compress(whole),
    }


@pytest.mark.parametrize("kind", damaged_npz(b"x" * 9))
def test_damaged_npz(tmp_path, kind):
    path = make_npz(tmp_path) / "train.npz"
    path.write_bytes(damaged_npz(path.read_bytes())[kind])
    text = message(DataError, NpzSource, tmp_path, "train")
    assert text.startswith(f"cannot read {path}: ")


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [
        ({"labels": np.arange(4)}, "do not belong together: 4 labels, 6 offsets"),
        ({"labels": np.zeros(5)}, "labels of {} must be a list of integers, got float64"),
        (
            {"labels": np.array([list("ab")] * 5)},
            "labels of {} must be a list of integers, got <U1",
        ),
        ({"offsets": np.arange(12).reshape(6, 2)}, "offsets of {} must be a list of integers"),
        ({"offsets": np.array([0, 9, 8, 10, 11, 12])}, "ascending"),
        ({"offsets": np.array([0, 1, 2, 3, 4, 10**9])}, "end inside the data"),
        ({"offsets": np.array([-1, 1, 2, 3, 4, 5])}, "end inside the data"),
        ({"data": np.zeros(9)}, "data of {} must be a list of bytes (uint8), got float64"),
        ({"names": np.array(["a"])}, "names as many as labels"),
        ({"data": None}, "must hold the arrays data, offsets, labels"),
        (
            {"labels": np.zeros(0, int), "offsets": np.zeros(1, int), "names": None},
            "0 labels, 1 offsets",
        ),
    ],
)
def test_npz_arrays_that_do_not_fit(tmp_path, replaced, expected):
    text = message(DataError, NpzSource, make_npz(tmp_path, **replaced), "train")
    assert expected.format(tmp_path / "train.npz") in text


def test_generated():
    source = GeneratedSource("train", count=10, classes=4, size=24)
    assert len(source) == 10
    assert source.classes == ["0 degrees", "45 degrees", "90 degrees", "135 degrees"]
    assert (source.truth(6), source.name(6)) == (2, "train-6")
    image = source.images(6)[0]
    assert (image.size, image.mode) == ((24, 24), "RGB")
    assert np.array_equal(image, source.images(6)[0])
    other = GeneratedSource("val", count=10, classes=4, size=24).images(6)[0]
    assert not np.array_equal(image, other)


def test_generated_direction_is_the_class():
    """Stripes of class 0 change along x, those of 90 degrees along y."""
    source = GeneratedSource("train", count=8, classes=2, size=48)
    for i in range(8):
        pixels = np.asarray(source.images(i)[0]).mean(axis=-1)
        along_y, along_x = pixels.mean(axis=1).std(), pixels.mean(axis=0).std()
        assert (along_x > along_y) == (source.truth(i) == 0)


def test_names_are_unique(tmp_path):
    source = NpzSource(make_npz(tmp_path, names=np.array(list("abaca"))), "train")
    assert [source.name(i) for i in range(5)] == ["a (0)", "b", "a (2)", "c", "a (4)"]
    assert NpzSource(make_npz(tmp_path, names=None), "train").name(2) == "train-2"


def test_identities_follow_files_and_labels(tmp_path):
    source = FolderSource(make_folder(tmp_path), "val")
    before = source.identity(0)
    assert before != source.identity(1) and before == FolderSource(tmp_path, "val").identity(0)
    (tmp_path / "val" / "cat").rename(tmp_path / "val" / "cow")
    assert FolderSource(tmp_path, "val").identity(0) != before


def test_strict(tmp_path):
    (make_folder(tmp_path) / "val" / "cat" / "notes.txt").write_text("hello")
    assert len(open_source(tmp_path)) == 6
    text = message(DataError, open_source, tmp_path, strict=True)
    assert text.startswith("1 files are no images: ") and "--strict" in text
