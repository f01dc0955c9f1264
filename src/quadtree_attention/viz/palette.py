# SPDX-License-Identifier: Apache-2.0
"""Colours of pictures."""

import colorsys
import operator
from collections.abc import Sequence
from typing import TypeAlias

Colour: TypeAlias = tuple[int, int, int]

_BY_HAND: tuple[Colour, ...] = (
    *((70, 130, 220), (230, 90, 80), (245, 215, 70), (150, 90, 210), (240, 150, 40)),
    *((60, 170, 90), (240, 120, 190), (150, 110, 70), (40, 195, 205), (175, 215, 60)),
    *((130, 30, 60), (125, 135, 150), (20, 90, 120), (180, 160, 240), (0, 110, 60)),
    *((255, 170, 130), (60, 60, 160), (120, 230, 160), (200, 60, 140), (100, 120, 20)),
)


def colour(value: Sequence[int]) -> Colour:
    """Three bytes as a colour; raises `TypeError` or `ValueError` for anything else."""
    red, green, blue = (operator.index(channel) for channel in value)
    if not all(0 <= channel <= 255 for channel in (red, green, blue)):
        raise ValueError(f"{value} is no colour")
    return red, green, blue


def distinct(count: int) -> list[Colour]:
    """Colours that differ as much as so many can, always the same ones.

    The first twenty are chosen by hand. The hues of the others are a golden angle apart, with four
    pairs of lightness and saturation in turn.
    """
    tones = ((0.52, 0.75), (0.72, 0.62), (0.36, 0.70), (0.62, 0.95))  # lightness, saturation
    found = list(_BY_HAND[:count])
    for i in range(len(found), count):
        lightness, saturation = tones[i % len(tones)]
        red, green, blue = colorsys.hls_to_rgb((i * 0.38196601) % 1, lightness, saturation)
        found.append((round(red * 255), round(green * 255), round(blue * 255)))
    return found
