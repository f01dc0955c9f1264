# SPDX-License-Identifier: Apache-2.0
"""Pairs that are none, and results that look wrong."""

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.images import to_image
from quadtree_attention.tasks.stereo import checks
from quadtree_attention.tasks.stereo.checks import common_points, pair_warnings, result_warnings
from tests.conftest import ROOT

DATA = ROOT.parent / "shared" / "data" / "stereo"
EXAMPLES = ROOT / "examples" / "images"  # part of the repository
PAIRS = {
    "example": (EXAMPLES / "stereo_left.jpg", "left", "right"),
    "street": ("KITTI_2015/training/image_2/000046_10.png", "image_2", "image_3"),
    "motorcycle": ("MIDDLEBURY_2014/trainingQ/Motorcycle/im0.png", "im0", "im1"),
    "flowerpots": ("MIDDLEBURY_2005_2006/Flowerpots/im0.png", "im0", "im1"),
    "tsukuba": ("MIDDLEBURY_2001_2003/tsukuba/im0.png", "im0", "im1"),
}


def read(name: str) -> tuple[Image.Image, Image.Image]:
    path, left, right = PAIRS[name]
    if not (DATA / path).is_file():
        pytest.skip("the pairs of ../shared/data/stereo are not here")
    return to_image(DATA / path), to_image(DATA / str(path).replace(left, right))


def moved(image: Image.Image, down: float) -> Image.Image:
    matrix = (1, 0, 0, 0, 1, -down)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)


@pytest.mark.parametrize("name", ["example", "street", "flowerpots", "tsukuba"])
def test_real_pairs(name):
    left, right = read(name)
    assert pair_warnings(left, right) == ()
    points, swapped = common_points(left, right), common_points(right, left)
    assert points.off_rows < checks.MOST_OFF_ROWS / 2 and points.behind < checks.MOST_BEHIND / 5
    assert swapped.behind > 0.9
    (said,) = pair_warnings(right, left)
    assert said.startswith("left and right look swapped: 9") or "100 %" in said
    for other in (moved(right, 0.01 * right.width), right.rotate(2, Image.Resampling.BICUBIC)):
        assert "the pair does not look rectified" in pair_warnings(left, other)[0]


def test_the_way_between_rows_is_in_pixels_of_the_images():
    left, right = (image.resize((1482, 994)) for image in read("motorcycle"))
    (said,) = pair_warnings(left, moved(right, 20))
    assert "points are in another row on the right, by " in said
    assert float(said.split("right, by ")[1].split()[0]) == pytest.approx(20, abs=1)


def test_images_that_tell_nothing():
    blank = Image.new("RGB", (90, 60), "grey")
    assert pair_warnings(blank, blank) == ()
    dots = Image.fromarray(np.zeros((60, 90), np.uint8))
    dots.putpixel((45, 30), 255)
    assert len(common_points(dots, dots).dx) < 20 and pair_warnings(dots, moved(dots, 9)) == ()


def test_results():
    near = np.full((20, 30), 12.0, np.float32)
    seen = np.zeros_like(near)
    assert result_warnings(near, seen) == ()
    far = near.copy()
    far[:13] = 0.4
    (said,) = result_warnings(far, seen)
    assert said.startswith("65 % of the disparities are about zero")
    far[:13] = 0.6
    assert result_warnings(far, seen) == ()
    assert "65 % of the disparities" in result_warnings(far, seen, scale=2.0)[0]
    hidden = seen.copy()
    hidden[:15] = 1
    (said,) = result_warnings(near, hidden)
    assert said.startswith("75 % of the left image seems to be hidden")
    assert result_warnings(near, seen + 1)[0].startswith("100 % of the left image")
