# SPDX-License-Identifier: Apache-2.0
"""Colours that can be told apart."""

import numpy as np

from quadtree_attention.viz.palette import distinct


def test_distinct():
    colours = distinct(200)
    assert len(set(colours)) == 200 and distinct(3) == colours[:3]
    array = np.array(colours[:20])
    apart = np.abs(array[:, None] - array[None]).sum(axis=2) + 999 * np.eye(20)
    assert apart.min() > 75
