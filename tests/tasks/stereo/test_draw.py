# SPDX-License-Identifier: Apache-2.0
"""Pictures of disparities."""

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("timm", reason="the predictor needs the extra 'models'")

from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.stereo.draw import (
    COLOURS,
    HEADER,
    NOT_KNOWN,
    colours,
    draw,
    lay_out,
    shown_range,
    ticks,
)
from quadtree_attention.tasks.stereo.result import Disparity
from quadtree_attention.viz.canvas import BACKGROUND


def steps(width=400, height=300, *, image=True, **options) -> Disparity:
    """The left half far, the right half near."""
    values = np.full((height, width), 10.0, np.float32)
    values[:, width // 2 :] = 50
    occlusion = options.pop("occlusion", np.zeros_like(values))
    images = (Image.new("RGB", (width, height), (90, 120, 90)),) if image else ()
    return Disparity(disparity=values, occlusion=occlusion, images=images, **options)


def test_near_is_bright_and_beside_the_image():
    picture = draw(steps())
    assert picture.size == (1606, HEADER + 600)
    pixels = np.asarray(picture)
    assert (pixels[HEADER:, :800] == (90, 120, 90)).all()
    assert (pixels[HEADER:, 806 : 806 + 400] == COLOURS[0]).all()
    assert (pixels[HEADER:, 806 + 400 :] == COLOURS[-1]).all()
    assert picture.getpixel((2, 2)) == BACKGROUND


def test_hidden_pixels_are_hatched_on_dark_and_bright_colours():
    occlusion = np.zeros((300, 400), np.float32)
    occlusion[100:200] = 0.9
    shown = np.asarray(draw(steps(occlusion=occlusion)), int)[HEADER:, 806:]
    plain = np.asarray(draw(steps()), int)[HEADER:, 806:]
    changed = np.abs(shown - plain).sum(axis=-1) > 60
    assert not changed[:199].any() and not changed[401:].any()
    for half in (changed[210:390, 10:390], changed[210:390, 410:790]):
        assert 0.4 < half.mean() < 0.6  # stripes


def test_values_that_are_not_finite_are_grey():
    found = steps()
    found.disparity[:50] = np.nan
    found.disparity[50:100] = np.inf
    shown = np.asarray(draw(found))[HEADER:, 806:]
    assert (shown[:200] == NOT_KNOWN).all() and not (shown[200:] == NOT_KNOWN).all(-1).any()
    found.disparity[:] = np.nan
    assert (np.asarray(draw(found))[HEADER:, 806:] == NOT_KNOWN).all()


def test_the_range_leaves_out_a_few_wild_values_and_what_is_hidden():
    values = np.random.default_rng(0).uniform(20, 60, (100, 100))
    hidden = np.zeros_like(values)
    low, high = shown_range(values, hidden)
    assert 20 < low < 21 and 59 < high < 60
    wild = values.copy()
    wild[0, :20] = 900
    assert shown_range(wild, hidden)[1] < 60
    hidden[:50], wild[:50] = 1, 400
    assert shown_range(wild, hidden)[1] < 60
    assert shown_range(np.full((4, 4), 7.0), np.zeros((4, 4))) == (6.5, 7.5)
    assert shown_range(np.zeros((4, 4)), np.zeros((4, 4))) == (0, 1)
    assert shown_range(np.full((4, 4), np.nan), np.zeros((4, 4))) == (0, 1)
    assert shown_range(np.full((4, 4), 7.0), np.ones((4, 4))) == (6.5, 7.5)


def test_colours_grow_lighter():
    tones = colours(np.linspace(-0.1, 1.1, 60)) @ np.array([0.299, 0.587, 0.114])
    assert (np.diff(tones) >= -1).all() and tones[-1] - tones[0] > 180


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 60, [0, 10, 20, 30, 40, 50, 60]),
        (18.2, 52.9, [20, 30, 40, 50]),
        (6.5, 7.5, [6.6, 6.8, 7.0, 7.2, 7.4]),
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
    ],
)
def test_ticks(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_wide_images_are_below_each_other():
    first, second = lay_out((1242, 375), 2)
    assert (first.x, first.y) == (0, HEADER) and second.x == 0
    assert second.y > HEADER + first.height and first.width == second.width > 1400
    first, second = lay_out((640, 480), 2)
    assert (first.width, second.x, second.y) == (800, 806, HEADER)
    assert len(lay_out((640, 480), 1)) == 1


@pytest.mark.parametrize("size", [(16, 16), (4000, 16), (16, 4000)])
@pytest.mark.parametrize("image", [True, False])
def test_extreme_sizes_give_a_picture_with_room_for_words(size, image):
    picture = draw(steps(*size, image=image))
    assert 700 <= picture.width <= 1610 and HEADER < picture.height <= 1000


def test_the_bar_tells_of_the_result():
    def bar(*, title: str | None = None, **options: object) -> bytes:
        return draw(steps(100, 75, **options), title=title).crop((0, 0, 500, HEADER)).tobytes()

    bars = {
        bar(),
        bar(seconds=2.0),
        bar(seen=((50, 38),)),
        bar(occlusion=np.ones((75, 100), np.float32)),
        bar(title="a.png"),
        bar(title="a" * 500),
    }
    assert len(bars) == 6
    assert bar(seen=((100, 75),)) == bar()


def test_draw_and_save(tmp_path):
    occlusion = np.linspace(0, 1, 120_000, dtype=np.float32).reshape(300, 400)
    found = steps(occlusion=occlusion)
    picture = found.draw(tmp_path / "d.png")
    with Image.open(tmp_path / "d.png") as stored:
        assert stored.tobytes() == picture.tobytes() == draw(found).tobytes()
    assert found.draw_occlusion(tmp_path / "o.png").size == (400, 300)
    with Image.open(tmp_path / "o.png") as stored:
        assert (stored.mode, stored.size) == ("L", (400, 300))
        assert np.abs(np.asarray(stored) / 255 - occlusion).max() <= 0.5 / 255 + 1e-6
    with pytest.raises(OptionError, match=r"pictures are written as .png, .jpg, .*, got '.*d.txt'"):
        found.draw(tmp_path / "d.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.png", "o.png"]
