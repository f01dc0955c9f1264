# SPDX-License-Identifier: Apache-2.0
"""Colours of pictures."""

import colorsys
import operator
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from quadtree_attention.images import Array

Colour: TypeAlias = tuple[int, int, int]
BACKGROUND, TEXT, FAINT = (22, 24, 29), (240, 240, 240), (160, 165, 175)
LUMA = np.array([0.299, 0.587, 0.114])
# For `ramp`, dark to bright: values also differ in lightness
CONFIDENCE = np.array(
    [(96, 52, 170), (58, 100, 214), (22, 150, 190), (40, 190, 140), (140, 214, 70), (255, 233, 50)]
)
NEARNESS = np.array(
    [
        *((24, 16, 66), (56, 24, 122), (104, 28, 140), (156, 38, 130), (204, 62, 98)),
        *((236, 104, 58), (250, 158, 40), (252, 210, 88), (255, 248, 196)),
    ]
)
_TONES = 1024  # entries of a ramp
_BY_HAND: tuple[Colour, ...] = (
    *((70, 130, 220), (230, 90, 80), (245, 215, 70), (150, 90, 210), (240, 150, 40)),
    *((60, 170, 90), (240, 120, 190), (150, 110, 70), (40, 195, 205), (175, 215, 60)),
    *((130, 30, 60), (125, 135, 150), (20, 90, 120), (180, 160, 240), (0, 110, 60)),
    *((255, 170, 130), (60, 60, 160), (120, 230, 160), (200, 60, 140), (100, 120, 20)),
)


def colour(value: Sequence[int]) -> Colour:
    """Parses three bytes as a colour; raises `TypeError` or `ValueError` otherwise."""
    red, green, blue = (operator.index(channel) for channel in value)
    if not all(0 <= channel <= 255 for channel in (red, green, blue)):
        raise ValueError(f"{value} is not a colour")
    return red, green, blue


def ramp(colours: Array, share: Array) -> Array:
    """Returns colours (..., 3) uint8 for values from 0 (first colour) to 1 (last colour)."""
    places = np.linspace(0, len(colours) - 1, _TONES)
    channels = [np.interp(places, np.arange(len(colours)), channel) for channel in colours.T]
    tones = np.stack(channels, axis=-1).round().astype(np.uint8)
    return tones[(np.clip(share, 0, 1) * (_TONES - 1)).round().astype(np.int16)]


def distinct(count: int) -> list[Colour]:
    """Returns `count` distinct colours, the same in every call.

    The first twenty are a fixed list. The hues of the others differ by the golden angle, with four
    alternating pairs of lightness and saturation.
    """
    tones = ((0.52, 0.75), (0.72, 0.62), (0.36, 0.70), (0.62, 0.95))  # lightness, saturation
    found = list(_BY_HAND[:count])
    for i in range(len(found), count):
        lightness, saturation = tones[i % len(tones)]
        found.append(_bytes(colorsys.hls_to_rgb((i * 0.38196601) % 1, lightness, saturation)))
    return found


def vivid(key: int) -> Colour:
    """Returns a saturated colour for a number, distinct from the colours of nearby numbers."""
    hue = (key * 0.618034 + 0.35) % 1  # multiples of the golden ratio do not repeat a hue
    saturation, value = ((0.85, 1.0), (0.6, 0.95), (1.0, 0.8))[key // 7 % 3]
    return _bytes(colorsys.hsv_to_rgb(hue, saturation, value))


def text_on(background: Colour) -> Colour:
    """Returns the text colour on a background: dark on bright, bright on dark."""
    return BACKGROUND if LUMA @ background > 130 else TEXT


def _bytes(channels: tuple[float, float, float]) -> Colour:
    red, green, blue = (round(channel * 255) for channel in channels)
    return red, green, blue
