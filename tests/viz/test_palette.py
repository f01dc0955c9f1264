# SPDX-License-Identifier: Apache-2.0
"""Colours that can be told apart."""

import itertools

import numpy as np
import pytest

from quadtree_attention.viz.palette import (
    CONFIDENCE,
    LUMA,
    NEARNESS,
    colour,
    distinct,
    ramp,
    text_on,
    vivid,
)
from tests.support import raises


def test_distinct():
    colours = distinct(200)
    assert len(set(colours)) == 200 and distinct(3) == colours[:3]
    array = np.array(colours[:20])
    apart = np.abs(array[:, None] - array[None]).sum(axis=2) + 999 * np.eye(20)
    assert apart.min() > 75


def test_vivid_and_the_text_on_it():
    colours = [vivid(key) for key in range(1, 13)]
    apart = [np.abs(np.subtract(a, b)).sum() for a, b in itertools.combinations(colours, 2)]
    assert min(apart) > 60
    for one in (*colours, (0, 0, 0), (255, 255, 255)):
        assert abs(LUMA @ one - LUMA @ text_on(one)) > 90


@pytest.mark.parametrize(("colours", "least"), [(CONFIDENCE, 100), (NEARNESS, 180)])
def test_ramps_grow_lighter(colours, least):
    found = ramp(colours, np.linspace(-0.1, 1.1, 60))
    assert np.array_equal(found[[0, -1]], colours[[0, -1]])
    tones = found @ LUMA
    assert (np.diff(tones) >= -1).all() and tones[-1] - tones[0] > least


@pytest.mark.parametrize("value", [(1, 2), (1, 2, 256), (-1, 2, 3), (0.5, 1, 2), "abc"])
def test_what_is_no_colour(value):
    assert colour([1, 2, 3]) == (1, 2, 3)
    raises((TypeError, ValueError), ".", colour, value)
