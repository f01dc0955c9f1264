# SPDX-License-Identifier: Apache-2.0
"""Pictures of disparities."""

import numpy as np
from PIL import Image

from quadtree_attention.tasks.stereo.draw import NOT_KNOWN, draw, shown_range, words
from quadtree_attention.tasks.stereo.result import Disparity
from quadtree_attention.viz.canvas import HEADER
from quadtree_attention.viz.palette import BACKGROUND, NEARNESS


def steps(width=400, height=300, *, image=True, **options) -> Disparity:
    """The left half far, the right half near."""
    values = np.full((height, width), 10.0, np.float32)
    values[:, width // 2 :] = 50
    occlusion = options.pop("occlusion", np.zeros_like(values))
    images = (Image.new("RGB", (width, height), (90, 120, 90)),) if image else ()
    return Disparity(disparity=values, occlusion=occlusion, images=images, **options)


def test_near_is_bright_and_what_is_not_known_grey():
    picture = draw(steps())
    assert picture.size == (1606, HEADER + 600)
    pixels = np.asarray(picture)
    assert (pixels[HEADER:, :800] == (90, 120, 90)).all()
    assert (pixels[HEADER:, 806 : 806 + 400] == NEARNESS[0]).all()
    assert (pixels[HEADER:, 806 + 400 :] == NEARNESS[-1]).all()
    assert picture.getpixel((2, 2)) == BACKGROUND
    found = steps()
    found.disparity[:50] = np.nan
    found.disparity[50:100] = np.inf
    shown = np.asarray(draw(found))[HEADER:, 806:]
    assert (shown[:200] == NOT_KNOWN).all() and not (shown[200:] == NOT_KNOWN).all(-1).any()
    found.disparity[:] = np.nan
    assert (np.asarray(draw(found))[HEADER:, 806:] == NOT_KNOWN).all()


def test_hidden_pixels_are_hatched_on_dark_and_bright_colours():
    occlusion = np.zeros((300, 400), np.float32)
    occlusion[100:200] = 0.9
    shown = np.asarray(draw(steps(occlusion=occlusion)), int)[HEADER:, 806:]
    plain = np.asarray(draw(steps()), int)[HEADER:, 806:]
    changed = np.abs(shown - plain).sum(axis=-1) > 60
    assert not changed[:199].any() and not changed[401:].any()
    for half in (changed[210:390, 10:390], changed[210:390, 410:790]):
        assert 0.4 < half.mean() < 0.6  # stripes


def test_the_range_leaves_out_a_few_wild_values_and_what_is_hidden():
    values = np.random.default_rng(0).uniform(20, 60, (100, 100))
    hidden = np.zeros(values.shape, bool)
    low, high = shown_range(values, hidden)
    assert 20 < low < 21 and 59 < high < 60
    wild = values.copy()
    wild[0, :20] = 900
    assert shown_range(wild, hidden)[1] < 60
    hidden[:50], wild[:50] = 1, 400
    assert shown_range(wild, hidden)[1] < 60
    assert shown_range(np.full((4, 4), 7.0), np.zeros((4, 4), bool)) == (6.5, 7.5)
    assert shown_range(np.zeros((4, 4)), np.zeros((4, 4), bool)) == (0, 1)
    assert shown_range(np.full((4, 4), np.nan), np.zeros((4, 4), bool)) == (0, 1)
    assert shown_range(np.full((4, 4), 7.0), np.ones((4, 4), bool)) == (6.5, 7.5)


def test_picture_and_text_name_the_same_range():
    """That of all pixels; the colours span less, and the picture says so."""
    values = np.random.default_rng(0).uniform(20, 60, (100, 100)).astype(np.float32)
    values[0, :20] = 90
    found = Disparity(disparity=values, occlusion=np.zeros_like(values))
    heading, facts = words(found)
    assert heading == f"disparity {values.min():.1f} to 90.0 px"
    assert heading.removeprefix("disparity ") in found.to_text()
    assert facts[0] == "colours: percentiles 1 to 99"
    values[1, 0] = np.nan
    assert words(found)[0] == heading


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


def test_occlusion_as_a_picture(tmp_path):
    occlusion = np.linspace(0, 1, 120_000, dtype=np.float32).reshape(300, 400)
    assert steps(occlusion=occlusion).draw_occlusion(tmp_path / "o.png").size == (400, 300)
    with Image.open(tmp_path / "o.png") as stored:
        assert (stored.mode, stored.size) == ("L", (400, 300))
        assert np.abs(np.asarray(stored) / 255 - occlusion).max() <= 0.5 / 255 + 1e-6
