# SPDX-License-Identifier: Apache-2.0
"""What options accept."""

import pytest

from quadtree_attention.errors import OptionError
from quadtree_attention.synthetic import HomographyOptions, SceneOptions, StereoOptions
from tests.support import raises


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (SceneOptions, {"objects": (5, 3)}, "objects must be two numbers, the lower first"),
        (SceneOptions, {"depth": (0.0, 3.0)}, "depth must .* between 0.1 and inf, got .0.0, 3.0."),
        (SceneOptions, {"overlap": (0.5, 1.5)}, "overlap"),
        (SceneOptions, {"baseline": (float("nan"), 1.0)}, "baseline"),
        (SceneOptions, {"rotation": (0.0, 200.0)}, "rotation must .* between 0 and 180"),
        (SceneOptions, {"roll": (1.0,)}, "roll must be two numbers"),
        (SceneOptions, {"roll": 30}, "roll must be two numbers.* got 30"),
        (SceneOptions, {"roll": ("a", "b")}, "roll must be two numbers"),
        (SceneOptions, {"photometric": "much"}, "photometric must lie between 0 and 2, got much"),
        (SceneOptions, {"samples": 3}, r"samples must be one of \(1, 2, 4\), got 3"),
        (SceneOptions, {"textureless": 1.2}, "textureless must lie between 0 and 1, got 1.2"),
        (SceneOptions, {"blank": -0.1}, "blank must lie between 0 and 1, got -0.1"),
        (StereoOptions, {"disparity": (0.2, 1.2)}, "disparity"),
        (StereoOptions, {"photometric": -0.1}, "photometric"),
        (HomographyOptions, {"perspective": (0.0, 0.95)}, "perspective"),
        (HomographyOptions, {"scale": (0.0, 1.0)}, "scale"),
    ],
)
def test_bad_options(make, options, message):
    raises(OptionError, message, make, **options)
