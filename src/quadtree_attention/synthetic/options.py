# SPDX-License-Identifier: Apache-2.0
"""Options of synthetic pairs.

Example:
    >>> SceneOptions(objects=(2, 4), depth=(2.0, 4.0)).samples
    2
"""

import math
from dataclasses import dataclass

from quadtree_attention.errors import OptionError

Range = tuple[float, float]
SAMPLES = (1, 2, 4)


@dataclass(frozen=True)
class ContentOptions:
    """Content of a scene, and photometric distortion.

    Lengths have no unit: images depend on their ratios only.
    """

    objects: tuple[int, int] = (3, 12)
    """Minimum and maximum number of objects, without the background."""
    depth: Range = (1.5, 8.0)
    """Depth of the objects, limited by the room."""
    room: Range = (3.0, 10.0)
    """Half the length of the room, the background."""
    focal: Range = (0.7, 1.4)
    """Focal length of the first view over its longer side; the field of view is 71 degrees at 0.7
    and 39 degrees at 1.4."""
    texture_scale: Range = (0.6, 2.0)
    """Pixels per texel at the depth of the object; larger values are coarser."""
    textureless: float = 0.15
    """Share of surfaces with almost no texture."""
    blank: float = 0.0
    """Share of the surfaces with almost no texture that have a single colour."""
    thin: float = 0.0
    """Share of objects replaced by poles and wires; bars are always included."""
    photometric: float = 1.0
    """Strength of the photometric distortions of each view; 0 disables them."""
    samples: int = 2
    """Rays per pixel for colours: 1, 2 or 4. Depth and flow use the centre of the pixel."""

    def __post_init__(self) -> None:
        check_range("objects", self.objects, 0, 64)
        check_range("depth", self.depth, 0.1, math.inf)
        check_range("room", self.room, 0.5, math.inf)
        check_range("focal", self.focal, 0.2, 20)
        check_range("texture_scale", self.texture_scale, 0.01, 100)
        check_number("textureless", self.textureless, 0, 1)
        check_number("blank", self.blank, 0, 1)
        check_number("thin", self.thin, 0, 1)
        check_number("photometric", self.photometric, 0, 2)
        check_samples(self.samples)


@dataclass(frozen=True)
class SceneOptions(ContentOptions):
    """Options of scenes with two free cameras; a curriculum widens the ranges of the motion.

    The second camera is translated by `baseline`, oriented towards the point on the optical axis of
    the first camera, then rotated away from it by `rotation` and about its own axis by `roll`.
    """

    baseline: Range = (0.05, 0.6)
    """Distance of the cameras over the median depth of the first view."""
    rotation: Range = (0.0, 15.0)
    """Angle in degrees between the axis of the second camera and the common point."""
    roll: Range = (0.0, 25.0)
    """Rotation about the optical axis in degrees, in either direction; 180 is upside down."""
    focal_ratio: Range = (0.8, 1.25)
    """Focal length of the second view over that of the first, relative to their longer sides."""
    overlap: Range = (0.3, 1.0)
    """Share of each view that is visible in the other one, measured on a coarse grid. The lower
    bound always holds, by reducing the motion; the upper bound only if one of a few random cameras
    satisfies it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("baseline", self.baseline, 0, 10)
        check_range("rotation", self.rotation, 0, 180)
        check_range("roll", self.roll, 0, 180)
        check_range("focal_ratio", self.focal_ratio, 0.1, 10)
        check_range("overlap", self.overlap, 0, 1)


@dataclass(frozen=True)
class StereoOptions(ContentOptions):
    """Options of scenes with two rectified cameras."""

    thin: float = 0.15
    """As in `ContentOptions`; thin structures in front of distant ones are difficult for stereo."""
    photometric: float = 0.4
    """As in `ContentOptions`; the two cameras of a stereo rig are similar."""
    disparity: Range = (0.04, 0.25)
    """Largest disparity of the left view over the width of the image. It may be slightly larger in
    the right view, which can contain nearer surfaces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("disparity", self.disparity, 0, 1)


@dataclass(frozen=True)
class HomographyOptions:
    """Options of pairs of a plane that fills both views."""

    rotation: Range = (0.0, 45.0)
    """Rotation in the image plane in degrees, in either direction."""
    scale: Range = (0.6, 1.6)
    """Scale of the second view relative to the first."""
    perspective: Range = (0.0, 0.5)
    """Strength of the perspective distortion: 0 is affine, above 0.7 is extreme."""
    translation: Range = (0.0, 0.3)
    """Translation relative to half the diagonal of the image."""
    texture_scale: Range = (0.6, 2.0)
    """Pixels of the first view per texel."""
    overlap: Range = (0.3, 1.0)
    """Share of each view that is inside the other one. The lower bound holds by reducing motion."""
    photometric: float = 1.0
    """Strength of the photometric distortions of each view; 0 disables them."""
    samples: int = 2
    """Samples per pixel for colours: 1, 2 or 4."""

    def __post_init__(self) -> None:
        check_range("rotation", self.rotation, 0, 180)
        check_range("scale", self.scale, 0.05, 20)
        check_range("perspective", self.perspective, 0, 0.9)
        check_range("translation", self.translation, 0, 2)
        check_range("texture_scale", self.texture_scale, 0.01, 100)
        check_range("overlap", self.overlap, 0, 1)
        check_number("photometric", self.photometric, 0, 2)
        check_samples(self.samples)


def check_range(name: str, value: Range, low: float, high: float) -> None:
    try:
        fits = len(value) == 2 and low <= value[0] <= value[1] <= high  # also refuses NaN
    except TypeError:  # values of recipes may have any type
        fits = False
    if not fits:
        raise OptionError(
            f"{name} must be two numbers, the lower first, between {low:g} and {high:g}, "
            f"got {value}"
        )


def check_number(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, str) or not low <= value <= high:
        raise OptionError(f"{name} must lie between {low:g} and {high:g}, got {value}")


def check_samples(samples: int) -> None:
    if samples not in SAMPLES:
        raise OptionError(f"samples must be one of {SAMPLES}, got {samples}")


def check_size(name: str, size: tuple[int, int]) -> None:
    if len(size) != 2 or min(size) < 8:
        raise OptionError(
            f"{name} must be (height, width), each at least 8 pixels, got {tuple(size)}"
        )
