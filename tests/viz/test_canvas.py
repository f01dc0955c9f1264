# SPDX-License-Identifier: Apache-2.0
"""Pictures: where panels are, text that fits, colour bars, legends."""

import numpy as np
import pytest
from PIL import Image, ImageFont

from quadtree_attention.viz import canvas as module
from quadtree_attention.viz.canvas import HEADER, LEAST_HEIGHT, Canvas, Entry, Scale, lay_out
from quadtree_attention.viz.palette import BACKGROUND, CONFIDENCE, TEXT

SCALE = Scale(CONFIDENCE, 0, 1, "confidence")


def test_wide_images_are_below_each_other():
    first, second = lay_out([(2000, 200), (1000, 100)])
    assert (first.x, first.y, *first.size) == (0, HEADER, 1600, 160)
    assert second.size == (1600, 160) and second.y > HEADER + 160
    first, second = lay_out([(640, 480), (480, 640)])
    assert (*first.size, *second.size) == (800, 600, 600, 800)
    assert second.x > 800 and first.y - second.y == 100
    assert first.place(np.array([[0, 0], [639, 479]])).tolist() == [
        [0.625, HEADER + 100.625],
        [799.375, HEADER + 699.375],
    ]


def test_one_image():
    (panel,) = lay_out([(3200, 400)])
    assert (panel.x, panel.y, *panel.size) == (0, HEADER, 1600, 200)
    (panel,) = lay_out([(60, 40)])  # in the middle
    assert (*panel.size, panel.x) == (180, 120, (760 - 180) // 2)
    (panel,) = lay_out([(60, 40)], legend=True)
    assert (panel.x, panel.y) == (0, HEADER + (LEAST_HEIGHT - 120) // 2)
    (panel,) = lay_out([(6000, 400)], legend=True)
    assert panel.width == module.WITH_LEGEND[0]


@pytest.mark.parametrize("sizes", [[(1, 1)] * 2, [(20_000, 3), (3, 20_000)], [(5, 9)], [(9, 9999)]])
def test_extreme_sizes_give_a_picture_with_room_for_words(sizes):
    picture = Canvas(lay_out(sizes)).picture
    assert 760 <= picture.width <= 1610 and HEADER < picture.height <= 1000


def test_a_header_stays_in_its_place():
    canvas = Canvas(lay_out([(60, 40)]))
    canvas.paste(0, Image.new("RGB", canvas.panels[0].size, (90, 120, 90)))
    below = np.asarray(canvas.picture)[HEADER:].copy()
    headers = []
    for heading, facts in (("a", ["b"]), ("a", ["c"]), ("d" * 500, ["e" * 99] * 9), ("", [])):
        canvas.header(heading, facts, SCALE)
        pixels = np.asarray(canvas.picture)
        assert np.array_equal(pixels[HEADER:], below)
        headers.append(pixels[:HEADER].copy())
    nothing = headers[-1]
    assert len({header.tobytes() for header in headers}) == 4  # what was there before is gone
    bar = (nothing != BACKGROUND).any(axis=(0, 2)).nonzero()[0].min()  # its unit begins here
    assert (headers[2][:, bar - 10 :] == nothing[:, bar - 10 :]).all()
    assert (nothing[20, -24 - module.BAR_WIDTH] == CONFIDENCE[0]).all()
    assert (nothing[20, -25] == CONFIDENCE[-1]).all()
    canvas.header("d" * 500, [])  # without a bar there is more room
    assert (np.asarray(canvas.picture)[:HEADER, bar:-24] == TEXT).any()


def test_a_legend():
    canvas = Canvas(lay_out([(60, 40)], legend=True), legend=True)
    assert canvas.picture.size == (180 + module.LEGEND, HEADER + LEAST_HEIGHT)
    entries = [Entry("red " * 50, 0.7, (250, 0, 0)), Entry("none", 0.3, None)]
    canvas.legend(entries)
    pixels = np.asarray(canvas.picture)[:, 180:]
    assert (pixels == (250, 0, 0)).all(axis=-1).sum() > 200
    assert (pixels[:, -10:] == BACKGROUND).all()  # nothing runs over the edge


def test_cut():
    font = ImageFont.load_default(14)
    assert module.cut("short", 100, font) == "short"
    found = module.cut("a text that is too long", 100, font)
    assert found.endswith("...") and found.startswith("a text") and font.getlength(found) <= 100


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 60, [0, 10, 20, 30, 40, 50, 60]),
        (18.2, 52.9, [20, 30, 40, 50]),
        (6.5, 7.5, [6.6, 6.8, 7.0, 7.2, 7.4]),
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks(low, high, expected):
    assert module.ticks(low, high) == pytest.approx(expected)
