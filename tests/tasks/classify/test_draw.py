# SPDX-License-Identifier: Apache-2.0
"""Pictures: the image, and the best classes as bars."""

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.tasks.classify.draw import draw
from quadtree_attention.tasks.classify.result import Classification
from quadtree_attention.viz.canvas import HEADER, LEGEND, MARGIN
from quadtree_attention.viz.palette import vivid


def found(*probabilities, size=(200, 120)):
    logits = np.log(np.array(probabilities, np.float32))
    names = [f"class {i}" for i in range(len(logits))]
    image = Image.new("RGB", size, "grey")
    return Classification(logits=logits, classes=names, top=3, images=(image,))


def test_bars_are_as_long_as_their_probability():
    picture = np.array(draw(found(0.25, 0.5, 0.2, 0.05)))
    assert (picture[HEADER : HEADER + 360, :600] == 128).all()  # the image, three times as large
    beside = picture[HEADER:, 600:]
    widths = [(beside == vivid(label)).all(-1).sum(1).max() for label in range(4)]
    room = LEGEND - 2 * MARGIN
    assert [widths[i] / room for i in (1, 0, 2)] == pytest.approx([0.5, 0.25, 0.2], abs=0.02)
    assert widths[3] == 0  # not among the best three
    first = [np.argmax((beside == vivid(label)).all(-1).any(1)) for label in (1, 0, 2)]
    assert first == sorted(first)  # best above


def test_there_is_room_for_all_answers():
    small = np.array(found(0.5, 0.3, 0.2, size=(9, 9)).draw())
    assert len(small) >= HEADER + 3 * 40
