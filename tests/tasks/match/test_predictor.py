# SPDX-License-Identifier: Apache-2.0
"""Matching of images as users have them."""

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.synthetic import ProceduralTextures, homography_pairs
from quadtree_attention.tasks.match.predictor import Matcher, shrunk


@pytest.fixture(scope="module")
def weights(all_weights):
    return all_weights / "match.safetensors"


@pytest.fixture(scope="module")
def photo():
    pair = homography_pairs(ProceduralTextures(4, size=128), [3], size=(120, 160))
    return Image.fromarray((pair.image0[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8))


@pytest.fixture(scope="module")
def loose(weights):
    """Untrained weights match next to nothing with confidence."""
    return Matcher.from_pretrained(weights, threshold=0.0, guided="never")


def test_points_are_in_pixels_of_the_images_given(loose, photo, weights):
    other = photo.resize((200, 90))
    matches = loose(photo, other)
    assert len(matches) > 0
    for points, image in ((matches.keypoints0, photo), (matches.keypoints1, other)):
        assert (points >= -4.5).all() and (points <= np.array(image.size) + 4).all()
    assert matches.images[1].size == (200, 90)
    large = photo.resize((640, 480), Image.Resampling.NEAREST)
    small = Matcher.from_pretrained(weights, threshold=0.0, guided="never", size=160)
    assert shrunk(large, 160).size == (160, 120)
    matches = small(large, large)
    again = small(shrunk(large, 160), shrunk(large, 160))
    expected = (again.keypoints0 + 0.5) * 4 - 0.5
    assert np.allclose(matches.keypoints0, expected)
    wide, tall = photo.resize((20_000, 400)), photo.resize((400, 20_000))
    loose = Matcher.from_pretrained(weights, threshold=0.0, guided="never", size=256)
    matches = loose(wide, wide)
    assert matches.seen == ((2_560, 51), (2_560, 51)) and len(matches)
    assert matches.keypoints0[:, 0].max() > 10_000 and matches.keypoints0[:, 1].max() < 400
    assert loose(tall, wide).seen == ((51, 2_560), (2_560, 51))


@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_images_without_texture_match_nothing(loose, photo, value):
    """All that the network could tell cells of such an image apart by is its border."""
    flat = np.full((64, 96), value)
    noise = np.random.default_rng(0).uniform(0, 1, (64, 96))
    for pair, told in (((flat, flat), (0, 1)), ((flat, photo), (0,)), ((noise, flat), (1,))):
        (found,) = loose.many([pair])
        assert len(found) == 0 and found.keypoints0.shape == found.keypoints1.shape == (0, 2)
        assert found.warnings == tuple(
            f"image {i} has one grey value only: nothing can match" for i in told
        )
        assert found.to_text().startswith("matches      none: image ")
    dot = flat.copy()
    dot[30, 40] = 0.5
    assert loose(dot, dot).warnings == () and len(loose(noise, noise))
    assert len(loose(np.zeros((1, 1)), photo)) == 0


def test_pairs_of_equal_sizes_go_through_the_network_together(loose, photo):
    other = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    black = Image.new("RGB", photo.size)
    pairs = [(photo, other), (photo, photo.resize((200, 90))), (other, photo), (black, photo)]
    batches = []
    hook = loose.network.register_forward_pre_hook(
        lambda _, inputs: batches.append(len(inputs[0]["image0"]))
    )
    together = list(loose.many(pairs, batch=4))
    hook.remove()
    assert batches == [3, 1]
    for pair, found, again in zip(pairs, together, loose.many(pairs), strict=True):
        alone = loose(*pair)
        assert np.array_equal(again.keypoints1, alone.keypoints1)
        assert np.array_equal(found.keypoints0, alone.keypoints0)
        np.testing.assert_allclose(found.keypoints1, alone.keypoints1, rtol=0, atol=1e-3)
        np.testing.assert_allclose(found.confidence, alone.confidence, rtol=1e-3)
    assert [len(found) > 0 for found in together] == [True, True, True, False]


def test_the_best_of_a_smaller_image(weights, photo):
    matcher = Matcher.from_pretrained(weights, threshold=0.0, guided="never", top=3, size=64)
    whole = Matcher.from_pretrained(weights, threshold=0.0, guided="never", size=64)
    found = matcher(photo, photo)
    assert found.confidence.tolist() == whole(photo, photo).best(3).confidence.tolist()
    assert len(found) == 3
    # The network is not changed: its own threshold holds for others
    assert matcher.network.coarse_matching.threshold == 0.2


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1, 1), (1, 1)),
        ((640, 3), (640, 3)),
        ((1296, 968), (640, 478)),
        ((968, 1296), (478, 640)),
        ((2_000, 500), (640, 160)),
        ((20_000, 1_000), (3_200, 160)),  # 640x32 would be nothing but borders
        ((20_000, 100), (12_800, 64)),
        ((300, 5_000), (160, 2_667)),
        ((20_000, 10), (20_000, 10)),
        ((1_000_000, 90), (95_406, 9)),  # no more pixels than two squares of the size
    ],
)
def test_working_size(size, expected):
    assert shrunk(Image.new("L", size), 640).size == expected
