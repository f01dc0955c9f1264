# SPDX-License-Identifier: Apache-2.0
"""Segmentations: shares, label maps as files, text, plain data, pictures."""

import json

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.tasks.segment.readers import read_label_map
from quadtree_attention.tasks.segment.result import Segmentation, SegmentationCodec
from quadtree_attention.viz.palette import distinct
from tests.tasks.segment.files import CLASSES, photo

PALETTE = [(10, 20, 30), (200, 100, 0), (0, 250, 120)]


@pytest.fixture
def found():
    """A third sky, two thirds car."""
    labels = np.zeros((30, 45), np.uint8)
    labels[:, 15:] = 2
    about = {"names": CLASSES, "palette": PALETTE, "confidence": 0.75}
    image = Image.fromarray(photo(30, 45))
    return Segmentation(labels=labels, images=(image,), seen=((90, 60),), seconds=0.5, **about)


def test_plain_data_and_text(found):
    assert list(found.shares().items()) == [("car", pytest.approx(2 / 3)), ("sky", 1 / 3)]
    assert json.loads(json.dumps(found.to_dict())) == {
        "size": [45, 30],
        "seen": [90, 60],
        "confidence": 0.75,
        "seconds": 0.5,
        "classes": [
            {"label": 2, "name": "car", "share": 0.666667},
            {"label": 0, "name": "sky", "share": 0.333333},
        ],
    }
    assert found.to_text().splitlines() == [
        "   66.7 %  █████████████▍        car",
        "   33.3 %  ██████▋               sky",
        "  mean confidence 0.75, 0.50 s, seen at 90x60",
    ]


def test_label_maps_are_written_with_their_colours(found, tmp_path):
    path = tmp_path / "labels.png"
    found.save(path)
    assert np.array_equal(read_label_map(path), found.labels)
    with Image.open(path) as picture:
        assert picture.mode == "P"
        colours = np.asarray(picture.convert("RGB"))
    assert np.array_equal(colours, np.array(found.palette, np.uint8)[found.labels])
    loaded = Segmentation.load(path)
    assert np.array_equal(loaded.labels, found.labels) and loaded.labels.dtype == np.uint8
    assert (loaded.names, loaded.confidence, loaded.images) == (["0", "1", "2"], None, ())
    assert loaded.to_text().count("\n") == 1


def test_label_maps_of_many_classes(tmp_path):
    labels = np.arange(600, dtype=np.uint16).reshape(20, 30)
    names = [f"c{i}" for i in range(600)]
    many = Segmentation(labels=labels, names=names, palette=distinct(600))
    many.save(tmp_path / "a.png")
    (read,) = SegmentationCodec(classes=names).decode(tmp_path / "a.png").values()
    assert np.array_equal(read.labels, labels) and read.labels.dtype == np.uint16
    assert read.names == names
