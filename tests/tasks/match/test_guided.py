# SPDX-License-Identifier: Apache-2.0
"""Views that are turned and zoomed against each other."""

import math

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("poselib", reason="estimators need the extra 'models'")

from quadtree_attention.synthetic import ProceduralTextures, homography_pairs
from quadtree_attention.tasks import Matcher
from quadtree_attention.tasks.match import guided

SIZE = (240, 180)


@pytest.fixture(scope="module")
def photo():
    pair = homography_pairs(ProceduralTextures(4, size=256), [3], size=SIZE[::-1])
    return Image.fromarray((pair.image0[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8))


def similar(angle, zoom=1.0, shift=(0.0, 0.0)):
    cos, sin = zoom * math.cos(math.radians(angle)), zoom * math.sin(math.radians(angle))
    return np.array([[cos, -sin, shift[0]], [sin, cos, shift[1]], [0, 0, 1]])


def far(points, expected):
    return np.linalg.norm(points - expected, axis=1)


def test_a_similarity_among_outliers():
    generator = np.random.default_rng(0)
    points0 = generator.uniform(0, 200, (120, 2))
    matrix = similar(130, 1.7, (30, -20))
    points1 = guided.apply(matrix, points0)
    points1[40:] += generator.uniform(20, 100, (80, 2))
    found, inliers = guided.similarity(points0, points1, 2.0)
    np.testing.assert_allclose(found, matrix, atol=1e-6)
    assert inliers.tolist() == [True] * 40 + [False] * 80
    assert guided.similarity(points0[:3], points1[:3], 2.0) is None
    assert guided.similarity(points0[:1].repeat(9, 0), points1[:9], 2.0) is None


def test_views_show_what_their_matrices_say(photo):
    """A pixel of the image is found where the matrix of a view puts it."""
    grey = photo.convert("L")
    for view in (
        guided.turned(grey, 120, 90),
        guided.turned(grey, 240, 45),
        *guided.aligned([grey, grey], similar(0), 320),
    ):
        height, width = view.pixels.shape[1:]
        points = np.random.default_rng(0).uniform(40, 140, (200, 2))
        places = np.floor(guided.apply(view.matrix, points)).astype(int)
        inside = ((places >= 0) & (places < (width, height))).all(axis=1)
        assert inside.mean() > 0.9
        shown = view.pixels[0].numpy()[tuple(places[inside].T[::-1])]
        there = np.asarray(grey)[tuple(np.floor(points[inside]).astype(int).T[::-1])] / 255
        assert np.corrcoef(shown, there)[0, 1] > 0.9
        assert view.mask is None or 0.4 < view.mask.float().mean() < 1


def test_aligned_views_are_the_shared_part_at_the_finer_detail(photo):
    grey = photo.convert("L")
    near = similar(0, 3.0, (-240, -180))  # image 1 shows a third of image 0
    view0, view1 = guided.aligned([grey, grey], near, 640)
    assert view0.pixels.shape == view1.pixels.shape == (1, 416, 544)
    assert guided.density(view1.matrix, np.array([120, 90])) == pytest.approx(2, rel=0.1)
    assert guided.aligned([grey, grey], similar(0, 1, (10_000, 0)), 640) is None
    assert guided.aligned([grey, grey], np.zeros((3, 3)), 640) is None
    horizon = np.linalg.inv(np.array([[1, 0, 0], [0, 1, 0], [0.01, 0, -1.0]]))
    assert guided.aligned([grey, grey], horizon, 640) is None


def test_features_with_a_common_turn(photo):
    """A photograph of something else, or without texture, has none."""
    grey = photo.convert("L")
    for angle in (130, 90, -90, 180):  # counter-clockwise
        turned = grey.rotate(angle, Image.Resampling.BICUBIC, expand=True)
        found = guided.common_turn([grey, turned])
        assert found is not None and abs((found + angle + 180) % 360 - 180) <= 10, angle
    other = homography_pairs(ProceduralTextures(4, size=256), [8], size=SIZE[::-1]).image0[0, 0]
    other = Image.fromarray((other.numpy() * 255).astype(np.uint8))
    assert guided.common_turn([grey, other]) is None
    assert guided.common_turn([grey, Image.new("L", SIZE, 7)]) is None


def test_turned_and_zoomed_images_match(photo):
    matcher = Matcher.from_pretrained(device="cpu", size=240)
    plain = Matcher.from_pretrained(device="cpu", size=240, guided="never")
    turned = photo.transpose(Image.Transpose.ROTATE_180)
    found, before = matcher(photo, turned), plain(photo, turned)
    size = np.array(SIZE) - 1

    def right(matches, target):
        return int((far(matches.keypoints1, target(matches.keypoints0)) < 3).sum())

    assert right(before, lambda p: size - p) < 20
    assert right(found, lambda p: size - p) > 100
    assert found.seen and found.images[1].size == SIZE
    near = photo.crop((80, 60, 160, 120)).resize(SIZE, Image.Resampling.BICUBIC)
    found, before = matcher(photo, near), plain(photo, near)
    zoomed = right(found, lambda p: (p + 0.5 - (80, 60)) * 3 - 0.5)
    assert zoomed > 50 and zoomed > right(before, lambda p: (p + 0.5 - (80, 60)) * 3 - 0.5)


def test_upright_images_match_as_without_guide(photo):
    other = photo.rotate(15, Image.Resampling.BICUBIC).crop((10, 10, 230, 170))
    searches = []
    matcher = Matcher.from_pretrained(device="cpu", size=240)
    matcher.guide.search = lambda *given: searches.append(given)
    plain = Matcher.from_pretrained(device="cpu", size=240, guided="never")
    found, expected = matcher(photo, other), plain(photo, other)
    assert np.array_equal(found.keypoints1, expected.keypoints1) and not searches
    always = Matcher.from_pretrained(device="cpu", size=240, guided="always")
    assert always(photo, other).seen != found.seen
    assert plain.guide is None
