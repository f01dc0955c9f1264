# SPDX-License-Identifier: Apache-2.0
"""Masks of COCO files: polygons, and run lengths as a list or as a string."""

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from quadtree_attention.checks import needs
from quadtree_attention.images import Array

LEAST_POINTS = 3  # minimum points of a polygon


def mask_problem(segmentation: Any, height: int, width: int) -> str | None:
    """Reason why a segmentation is invalid for an image of that size; None if it is valid."""
    if isinstance(segmentation, dict):
        return _rle_problem(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation:
        return "there is no segmentation"
    for polygon in segmentation:
        if not isinstance(polygon, list) or not all(is_number(value) for value in polygon):
            return "a polygon must be a list of finite numbers"
        if len(polygon) % 2 or len(polygon) < 2 * LEAST_POINTS:
            return f"a polygon must have pairs of x and y, 3 or more, got {len(polygon)} numbers"
        sides = ((polygon[0::2], width), (polygon[1::2], height))
        far = [v for values, side in sides for v in values if not -side <= v <= 2 * side]
        if far:  # the library cannot draw it
            return f"a polygon must not leave the image by more than its size, got {short(far[0])}"
    return None


def decode_mask(segmentation: Any, height: int, width: int) -> Array:
    """Decode polygons, or run lengths as a list or compressed, to (H, W) bool."""
    if isinstance(segmentation, dict):
        counts = segmentation["counts"]
        runs = run_lengths(counts) if isinstance(counts, str) else counts
        inside = np.arange(len(runs)) % 2 == 1  # runs start outside, in column-major order
        return np.repeat(inside, runs).reshape(width, height).T
    with needs("train", "drawing polygons"):
        from faster_coco_eval.core import mask
    return mask.decode(mask.merge(mask.frPyObjects(segmentation, height, width))).astype(bool)


def encode_mask(mask: Array) -> dict[str, Any]:
    """Encode (H, W) bool as compressed run lengths, as in results."""
    used = np.flatnonzero(mask.any(0))  # columns with pixels
    first, last = (used[0], used[-1] + 1) if used.size else (0, 0)
    columns = mask[:, first:last].T.reshape(-1)
    changes = np.flatnonzero(columns[1:] != columns[:-1]) + 1 + first * len(mask)
    if columns.size and columns[0]:  # the first run is outside
        changes = np.concatenate([[first * len(mask)], changes])
    end = last * len(mask)
    if columns.size and columns[-1] and end < mask.size:
        changes = np.concatenate([changes, [end]])
    runs = np.diff(np.concatenate([[0], changes, [mask.size]])).tolist()
    return {"size": list(mask.shape), "counts": compressed(runs)}


def run_lengths(text: str) -> list[int]:
    """Decode the run lengths in a compressed string of COCO; raise `ValueError` if it is invalid.

    A character is 48 plus five bits of a number, least significant first, and a sixth bit that is
    set if more characters follow. From the fourth number on, each is a difference from the number
    two places before.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise ValueError(f"{character!r} is no character of run lengths")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("the string ends in the middle of a number")
    return counts


def compressed(runs: Sequence[int]) -> str:
    """Encode run lengths as the string that `run_lengths` decodes."""
    characters: list[str] = []
    for i, run in enumerate(runs):
        value = run - runs[i - 2] if i > 2 else run
        more = True
        while more:
            bits = value & 31
            value >>= 5
            more = value != (-1 if bits & 16 else 0)  # until the sign bit is included
            characters.append(chr(48 + (bits | 32 if more else bits)))
    return "".join(characters)


def _rle_problem(segmentation: dict[str, Any], height: int, width: int) -> str | None:
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if size != [height, width]:
        return f"run lengths are of size {short(size)}, the image is {[height, width]} (H, W)"
    try:
        runs = run_lengths(counts) if isinstance(counts, str) else counts
    except ValueError as error:
        return f"run lengths cannot be read: {error}"
    if not isinstance(runs, list) or not all(type(run) is int and run >= 0 for run in runs):
        return "run lengths must be whole numbers from 0 on, or a string"
    if sum(runs) != height * width:
        return f"run lengths cover {sum(runs)} pixels, the image has {height * width}"
    return None


def is_number(value: Any) -> TypeGuard[float]:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
