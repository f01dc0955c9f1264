# SPDX-License-Identifier: Apache-2.0
"""Photographs of a folder: EXIF, sizes, cameras."""

import numpy as np
import pytest
from PIL import ExifTags, Image

from quadtree_attention.sfm.photos import GUESS, cameras, read_photos
from tests.support.tiny import picture

Base = ExifTags.Base


def save(path, size=(60, 40), seed=0, turned=1, **tags):
    exif = Image.Exif()
    exif[Base.Orientation], exif[Base.Make] = turned, "Maker"
    exif.get_ifd(ExifTags.IFD.Exif).update({Base[name]: value for name, value in tags.items()})
    picture(seed, size).save(path, exif=exif)


@pytest.mark.parametrize(
    ("tags", "focal"),
    [
        ({"FocalLengthIn35mmFilm": 54}, 90.0),
        (
            {
                "FocalLength": 12.0,
                "FocalPlaneXResolution": 100.0,
                "FocalPlaneResolutionUnit": 3,
                "ExifImageWidth": 120,
                "ExifImageHeight": 80,
            },
            60.0,
        ),
        ({"FocalLength": 12.0}, None),
        ({"FocalLength": float("nan"), "FocalLengthIn35mmFilm": 0}, None),
        ({}, None),
    ],
)
def test_focal_length_of_exif(tmp_path, tags, focal):
    save(tmp_path / "a.jpg", **tags)
    save(tmp_path / "b.jpg", seed=1)
    first, second = read_photos(tmp_path).used
    assert first.focal == (None if focal is None else pytest.approx(focal))
    assert second.focal is None and second.camera == "Maker"


@pytest.mark.parametrize(
    ("size", "focal"), [((60, 40), 60.0), ((40, 30), 41.603), ((48, 27), 45.823)]
)
def test_equivalent_focal_lengths_are_those_of_the_diagonal(tmp_path, size, focal):
    """36 mm with the 43.27 mm diagonal of 35 mm film, on sensors of 3:2, 4:3 and 16:9."""
    save(tmp_path / "a.jpg", size, FocalLengthIn35mmFilm=36)
    save(tmp_path / "b.jpg", size, seed=1)
    assert read_photos(tmp_path).used[0].focal == pytest.approx(focal, abs=1e-3)


def test_sizes_are_upright(tmp_path):
    save(tmp_path / "a.jpg", turned=6)
    save(tmp_path / "b.jpg")
    first, second = read_photos(tmp_path).used
    assert (first.size, first.turned) == ((40, 60), True)
    assert (second.size, second.turned) == ((60, 40), False)


def test_who_shares_a_camera(tmp_path):
    save(tmp_path / "a.jpg", FocalLengthIn35mmFilm=54)
    save(tmp_path / "b.jpg", seed=1, FocalLengthIn35mmFilm=54)
    save(tmp_path / "c.jpg", seed=2, FocalLengthIn35mmFilm=27)
    save(tmp_path / "d.jpg", seed=3, size=(40, 60))
    used = read_photos(tmp_path).used
    views, chosen = cameras(used)
    assert chosen == [0, 0, 1, 2]
    assert [v.focal for v in views] == pytest.approx([90, 45, GUESS * 60])
    assert [v.known for v in views] == [True, True, False]
    assert cameras(used, sharing="one")[1] == [0, 0, 0, 1]
    assert cameras(used, sharing="each", focal=70.0)[1] == [0, 1, 2, 3]
    matrix = np.array([[50, 0, 30], [0, 52, 20], [0, 0, 1.0]])
    (view, *_), _ = cameras(used, matrix=matrix)
    assert view.known and view.focal == 51 and view.matrix is matrix
