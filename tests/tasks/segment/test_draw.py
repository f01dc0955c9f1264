# SPDX-License-Identifier: Apache-2.0
"""Pictures: colours over the image, outlines, a legend with shares."""

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.errors import ShapeError
from quadtree_attention.tasks.segment.draw import OPACITY, colour_in, draw, legend, outlines
from quadtree_attention.tasks.segment.result import Segmentation
from quadtree_attention.viz.canvas import HEADER, LEGEND, WITH_LEGEND
from quadtree_attention.viz.palette import BACKGROUND

NAMES, PALETTE = ["sky", "road", "car"], [(0, 0, 255), (255, 0, 0), (0, 255, 0)]


def halves(height=40, width=60):
    """Sky on the left, road on the right, a stripe of no class."""
    labels = np.zeros((height, width), np.int64)
    labels[:, width // 2 :] = 1
    labels[: height // 4] = -1
    return labels


def drawn(size, labels, names=NAMES, palette=PALETTE, colour=0, **options):
    image = Image.new("RGB", size, colour)
    known = {"labels": labels, "names": names, "palette": palette, "confidence": 0.93}
    return draw(Segmentation(images=(image,), **known), **options)


def test_legend():
    entries = legend(halves(), NAMES, PALETTE)
    assert [(e.name, e.share, e.colour) for e in entries] == [
        ("sky", 0.375, (0, 0, 255)),
        ("road", 0.375, (255, 0, 0)),
        ("unlabelled", 0.25, None),
    ]


def test_colours_lie_where_the_labels_are():
    grey = Image.new("RGB", (60, 40), (100, 100, 100))
    found = np.asarray(colour_in(grey, halves(), PALETTE, (180, 120))).astype(int)
    assert found.shape == (120, 180, 3)
    mixed = [round(100 * (1 - OPACITY) + OPACITY * c) for c in (0, 0, 255)]
    assert found[80, 30].tolist() == mixed
    assert found[80, 150].tolist() == mixed[::-1]
    assert found[10, 90].tolist() == [100, 100, 100]  # no class, no colour
    assert found[80, 89:91].max(axis=0).min() > 200  # an outline between them
    labels = np.array([[0, 0, 1], [0, 2, 1]])
    assert outlines(labels).tolist() == [[False, True, False], [True, True, False]]


def test_sizes_of_pictures():
    picture = drawn((3000, 1000), halves(1000, 3000))
    assert picture.size == (WITH_LEGEND[0] + LEGEND, HEADER + round(WITH_LEGEND[0] / 3))
    with pytest.raises(ShapeError, match=r"must be \(y, x\) = \(40, 60\) like the image"):
        drawn((60, 40), halves(60, 40))


def test_picture_tells_what_it_shows():
    picture = drawn((60, 40), halves(), colour=(90, 120, 60), title="street.jpg")
    pixels = np.asarray(picture)
    panel = pixels[HEADER:, 180:]
    for colour in PALETTE[:2]:
        assert (panel == colour).all(axis=2).sum() > 200  # its swatch
    assert not (panel == PALETTE[2]).all(axis=2).any()  # no car
    assert (pixels[:HEADER] != BACKGROUND).any() and picture.height == HEADER + 240
    other = drawn((60, 40), halves(), colour=(90, 120, 60), title="avenue.jpg")
    assert not np.array_equal(np.asarray(other), pixels)


def test_a_legend_that_is_too_long_is_cut():
    labels = np.arange(2400).reshape(40, 60) % 60
    names = [f"a very long name of a class that does not fit, {i}" for i in range(60)]
    picture = drawn((60, 40), labels, names, [(250, 0, 0)] * 60)
    pixels = np.asarray(picture)[HEADER:]
    rows = (pixels[:, 180:220] == (250, 0, 0)).all(axis=2).any(axis=1)
    assert 5 <= (np.diff(rows.astype(int)) == 1).sum() <= 8
    assert (pixels[:, -10:] == BACKGROUND).all()  # nothing runs over the edge
