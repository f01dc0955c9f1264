# SPDX-License-Identifier: Apache-2.0
"""Checks of input images."""

from collections.abc import Mapping

from torch import Tensor

from quadtree_attention.errors import DTypeError, OptionError, ShapeError


def check_image(name: str, image: Tensor, channels: int, *, least: int = 1) -> None:
    """Raise unless `image` is floating point (B, channels, H, W) with sides >= `least`."""
    if image.ndim != 4 or image.shape[1] != channels or min(image.shape[2:]) < least:
        raise ShapeError(
            f"{name} must be (batch, {channels}, y, x) with sides of at least {least} pixels, got "
            f"{name}.shape={tuple(image.shape)}; pass images of {channels} channels"
        )
    check_floating(name, image)


def check_floating(name: str, image: Tensor) -> None:
    """Raise `DTypeError` for an image of integers."""
    if not image.is_floating_point():
        raise DTypeError(
            f"{name} must be floating point, in [0, 1], got {name}.dtype={image.dtype}; "
            "divide bytes by 255"
        )


def pair_of(data: Mapping[str, Tensor], channels: int, *, least: int = 1) -> tuple[Tensor, Tensor]:
    """Return `image0` and `image1` of a batch of pairs, checked."""
    if missing := [name for name in ("image0", "image1") if name not in data]:
        raise OptionError(
            f"data must have image0 and image1, got {', '.join(data) or 'nothing'}; "
            f"add {' and '.join(missing)}"
        )
    for name in ("image0", "image1"):
        check_image(name, data[name], channels, least=least)
    return data["image0"], data["image1"]


def check_same(what: str, got0: object, got1: object) -> None:
    """Raise `ShapeError` unless a property of both images of a pair is equal."""
    if got0 != got1:
        raise ShapeError(
            f"image0 and image1 must have the same {what}, got {got0} and {got1}; convert one"
        )
