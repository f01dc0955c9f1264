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
    """Fewest and most objects of a scene, background aside."""
    depth: Range = (1.5, 8.0)
    """Of the objects, as far as the room allows."""
    room: Range = (3.0, 10.0)
    """Half the length of the room that is the background."""
    focal: Range = (0.7, 1.4)
    """Focal length of the first view over its longer side; 0.7 sees 71 degrees, 1.4 sees 39."""
    texture_scale: Range = (0.6, 2.0)
    """Pixels per texel at the depth of the object: higher is coarser."""
    textureless: float = 0.15
    """Share of surfaces with next to no texture."""
    blank: float = 0.0
    """Share of the surfaces with next to no texture that have a single colour."""
    thin: float = 0.0
    """Share of objects drawn out to poles and wires, beside the bars that are always there."""
    photometric: float = 1.0
    """Strength of what cameras do to images, per view; 0 turns it off."""
    samples: int = 2
    """Rays per pixel for colours: 1, 2 or 4. Depth and flow always use the pixel's centre."""

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

    The second camera is translated by `baseline`, oriented towards the point that the first camera
    looks at, then rotated away from it by `rotation` and about its optical axis by `roll`.
    """

    baseline: Range = (0.05, 0.6)
    """Way between the cameras over the median depth of the first view."""
    rotation: Range = (0.0, 15.0)
    """Degrees by which the second camera looks past the common point."""
    roll: Range = (0.0, 25.0)
    """Degrees about the optical axis, in either direction; 180 is upside down."""
    focal_ratio: Range = (0.8, 1.25)
    """Focal length of the second view over that of the first, in shares of their longer sides."""
    overlap: Range = (0.3, 1.0)
    """Share of each view that the other one sees, measured on a coarse grid. The lower end is
    kept, if need be by moving less; the upper one where one of a few draws allows it."""

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
    """As before; thin things in front of far ones are what stereo fails at."""
    photometric: float = 0.4
    """As before; the two cameras of a rig are much alike."""
    disparity: Range = (0.04, 0.25)
    """Largest disparity of the left view over the width of the image. The right view may see
    nearer surfaces, and so slightly larger ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("disparity", self.disparity, 0, 1)


@dataclass(frozen=True)
class HomographyOptions:
    """Options of pairs of a plane that fills both views."""

    rotation: Range = (0.0, 45.0)
    """Degrees in the plane of the image, in either direction."""
    scale: Range = (0.6, 1.6)
    """Size of things in the second view over the first."""
    perspective: Range = (0.0, 0.5)
    """Strength of the perspective distortion: 0 is affine, above 0.7 is extreme."""
    translation: Range = (0.0, 0.3)
    """Over half the diagonal of the image."""
    texture_scale: Range = (0.6, 2.0)
    """Pixels of the first view per texel."""
    overlap: Range = (0.3, 1.0)
    """Share of each view that the other one sees. The lower end is kept by moving less."""
    photometric: float = 1.0
    """Strength of what cameras do to images, per view; 0 turns it off."""
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
        fits = len(value) == 2 and low <= value[0] <= value[1] <= high  # refuses NaN too
    except TypeError:  # recipes may hold anything
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
