# SPDX-License-Identifier: Apache-2.0
"""Pictures: everything inside the image, tags apart, colours that can be told apart."""

import itertools

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.tasks.detect.draw import draw, place_tag
from quadtree_attention.tasks.detect.result import Detections
from quadtree_attention.tasks.detect.rle import encode_mask
from quadtree_attention.viz.canvas import HEADER
from quadtree_attention.viz.palette import vivid


def detections(boxes, labels=None, size=(200, 120), masks=None, colour="grey"):
    count = len(boxes)
    labels = np.arange(1, count + 1) if labels is None else np.array(labels)
    return Detections(
        boxes=np.array(boxes, dtype=np.float32).reshape(-1, 4),
        labels=labels,
        names=tuple(f"class {label}" for label in labels),
        scores=np.linspace(0.9, 0.5, count),
        segmentations=None if masks is None else tuple(map(encode_mask, masks)),
        images=(Image.new("RGB", size, colour),),
    )


def test_pictures_without_objects_and_with_a_title():
    picture = draw(detections([]))
    assert picture.size == (600, 360)
    assert (np.array(picture) == 128).all()
    assert draw(detections([], size=(2000, 1500))).size == (2000, 1500)
    found = detections([[10, 10, 50, 50]])
    plain, titled = np.array(draw(found)), np.array(draw(found, title="street"))
    assert titled.shape == (HEADER + 360, 760, 3)  # wide enough for the header
    assert (titled[HEADER:, 80:-80] == plain).all() and (titled[:HEADER] > 200).any()


def test_box_mask_and_tag_are_where_they_belong():
    mask = np.zeros((1, 120, 200), bool)
    mask[0, 60:100, 80:160] = True
    picture = np.array(draw(detections([[80, 60, 160, 100]], masks=mask)))  # three times as large
    colour = np.array(vivid(1))
    assert (picture[180, 340:470] == colour).all()  # the upper edge of the box
    assert (picture[190:290, 241] == colour).all()
    middle = picture[240, 360]  # between the colour and the image
    assert np.allclose(middle, colour * 0.45 + 128 * 0.55, atol=2)
    assert (picture[320:, :] == 128).all() and (picture[:, 490:] == 128).all()
    tag = picture[164:178, 242:300]  # above the box
    assert (tag == colour).all(-1).mean() > 0.4
    one_class = np.array(draw(detections([[10, 30, 60, 90], [110, 30, 180, 90]], labels=[4, 4])))
    shown = {tuple(pixel) for pixel in one_class.reshape(-1, 3)}
    assert {vivid(1), vivid(2)} <= shown  # objects are told apart instead


@pytest.mark.parametrize("box", [(0, 0, 50, 40), (180, 100, 200, 120), (0, 0, 200, 120)])
def test_tags_do_not_leave_the_picture(box):
    x0, y0, x1, y1 = place_tag(box, (60, 14), (200, 120), [])
    assert x0 >= 0 and y0 >= 0 and x1 <= 199 and y1 <= 119


def test_tags_keep_apart_or_are_left_out():
    taken = []
    for _ in range(20):
        place = place_tag((50, 40, 90, 80), (40, 12), (200, 120), taken)
        if place is not None:
            taken.append(place)
    assert 3 <= len(taken) < 20
    for a, b in itertools.combinations(taken, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
