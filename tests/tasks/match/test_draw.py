# SPDX-License-Identifier: Apache-2.0
"""Pictures of matches: where lines go, what they look like, and which are shown."""

from dataclasses import replace

import numpy as np
from PIL import Image

from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.match.draw import OUTLIER, draw, spread
from quadtree_attention.tasks.match.pose import Pose
from quadtree_attention.tasks.match.result import Matches
from quadtree_attention.viz.canvas import HEADER, lay_out
from quadtree_attention.viz.palette import BACKGROUND, CONFIDENCE
from tests.support import raises


def grey(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), (90, 90, 90))


def some(count: int, *, images=(), seconds: float = 0.0) -> Matches:
    generator = np.random.default_rng(0)
    points = generator.uniform(0, (319, 199), (count, 2))
    return Matches(
        points, points[::-1].copy(), generator.uniform(0, 1, count), seconds=seconds, images=images
    )


def near(pixel: tuple[int, ...], expected: np.ndarray) -> bool:
    return bool(np.abs(np.asarray(pixel, int) - expected).max() < 12)


def test_ends_and_line_of_a_match():
    points0, points1 = np.array([[100.0, 150.0]]), np.array([[20.0, 30.0]])
    images = grey(400, 300), grey(200, 400)
    for confidence, tone in ((0.0, CONFIDENCE[0]), (1.0, CONFIDENCE[-1])):
        picture = draw(
            Matches(points0, points1, np.array([confidence]), seconds=1.0, images=images)
        )
        # 800x600 and 400x800 pixels are shown, the first in the middle of the height
        ends = np.array([[201, 301 + HEADER + 100], [806 + 41, 61 + HEADER]])
        for x, y in ends:
            assert near(picture.getpixel((int(x), int(y))), tone)
        x, y = ends.mean(axis=0).astype(int)
        around = np.asarray(picture)[y - 2 : y + 3, x].astype(int)
        untouched = np.asarray(picture)[HEADER + 790, 900].astype(int)
        assert np.abs(around - untouched).max() > 20 and np.ptp(untouched) < 5


def test_spread_is_even_and_takes_good_and_bad():
    generator = np.random.default_rng(0)
    crowd = generator.uniform((0, 0), (100, 100), (5000, 2))
    others = generator.uniform((0, 0), (800, 600), (500, 2))
    points, confidence = np.concatenate([crowd, others]), generator.uniform(0.2, 1, 5500)
    shown = spread(points, confidence, (800, 600), 100)
    assert len(set(shown.tolist())) == 100
    in_the_crowd = (points[shown] < 100).all(axis=1).sum()
    assert in_the_crowd < 10  # of the matches it is 91 %, of the image 2 %
    assert abs(confidence[shown].mean() - 0.6) < 0.1
    assert (np.diff(confidence[shown]) >= 0).all()  # the best are drawn last, on top
    assert np.array_equal(shown, spread(points, confidence, (800, 600), 100))
    assert sorted(spread(points[:80], confidence[:80], (800, 600), 100)) == list(range(80))
    assert len(spread(points, confidence, (800, 600), 0)) == 0


def test_the_bar_tells_of_the_matches():
    images = grey(320, 200), grey(320, 200)

    def bar(matches: Matches, **options: object) -> bytes:
        return draw(matches, **options).crop((0, 0, 700, HEADER)).tobytes()

    bars = {
        bar(some(0, images=images)),
        bar(some(1, images=images)),
        bar(some(50, images=images)),
        bar(some(50, images=images, seconds=2.0)),
        bar(some(50, images=images), max_lines=20),
        bar(some(50, images=images), title="a.jpg, b.jpg"),
    }
    assert len(bars) == 6 and draw(some(0, images=images)).getpixel((2, 2)) == BACKGROUND


def test_inliers_of_a_pose_are_in_colour():
    points0, points1 = np.array([[100.0, 50.0], [100.0, 150.0]]), np.array([[20.0, 50.0]] * 2)
    images = grey(320, 200), grey(320, 200)
    pose = Pose(np.eye(3), np.array([1.0, 0, 0]), np.array([True, False]))
    matches = Matches(points0, points1, np.ones(2), images=images)
    posed = replace(matches, poses={"poselib": None, "opencv": pose})
    (panel, other), picture, plain = lay_out([(320, 200)] * 2), posed.draw(), matches.draw()
    inlier, outlier = (tuple(int(x) for x in panel.place(point)) for point in posed.keypoints0)
    assert near(picture.getpixel(inlier), CONFIDENCE[-1])
    assert near(plain.getpixel(outlier), CONFIDENCE[-1])
    assert near(picture.getpixel(outlier), np.array(OUTLIER))
    (both,) = {tuple(int(x) for x in other.place(point)) for point in posed.keypoints1}
    assert near(picture.getpixel(both), CONFIDENCE[-1])  # inliers are on top
    bars = [image.crop((0, 0, 700, HEADER)).tobytes() for image in (picture, plain)]
    assert bars[0] != bars[1]  # inliers are counted


def test_number_of_lines():
    raises(OptionError, "max_lines must be at least 0, got -1", some(5).draw, max_lines=-1)
